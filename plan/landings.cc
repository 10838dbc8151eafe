#include "plan/landings.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <optional>
#include <span>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "geometry/view_to_box.h"

namespace loadplan {
namespace {

// Boxes of one side of a write beyond which their hull is shown.
constexpr Index kMaxBoxes = 64;

class LandingMaker {
 public:
  explicit LandingMaker(const LoadPlan& plan) : plan_(plan) {
    for (std::size_t t = 0; t < plan.targets().size(); ++t) {
      targets_of_[plan.targets()[t].storage].push_back(static_cast<std::int32_t>(t));
    }
  }

  void Add(std::span<const WriteItem> writes) {
    for (const WriteItem& write : writes) Add(write);
  }
  std::vector<Landing> Take() { return std::move(landings_); }

 private:
  void Add(const WriteItem& write) {
    Landing landing;
    landing.origin = write.origin;
    landing.target = TargetOf(write);
    if (landing.target >= 0 && !write.map.empty()) {
      PutTo(write, landing);
      if (write.origin.kind == OriginKind::kCheckpoint) {
        PutFrom(write, landing);
        PutOrder(write.map, landing);
      }
    }
    landings_.push_back(std::move(landing));
  }

  std::int32_t TargetOf(const WriteItem& write) const {
    const auto found = targets_of_.find(write.target);
    if (found == targets_of_.end()) return -1;
    const ByteRange span = write.map.ToSpan();
    for (const std::int32_t target : found->second) {
      const ByteRange shown = plan_.targets()[static_cast<std::size_t>(target)].layout.Span();
      if (shown.start <= span.start && span.stop <= shown.stop) return target;
    }
    return found->second.front();
  }

  void PutTo(const WriteItem& write, Landing& landing) const {
    const StridedLayout& shown = plan_.targets()[static_cast<std::size_t>(landing.target)].layout;
    const StridedLayout region = write.map.ToLayout();
    const ByteRange span = region.Span();
    const bool is_inside = shown.Span().start <= span.start && span.stop <= shown.Span().stop;
    if (is_inside && IsRowMajor(shown)) {
      const StridedLayout moved =
          StridedLayout::Unchecked(region.byte_offset() - shown.byte_offset(), region.shape(),
                                   region.byte_strides(), region.itemsize());
      Put(moved, {shown.shape(), shown.itemsize()}, landing.to, landing.is_hull);
      return;
    }
    landing.to = {Box::Whole(shown.shape())};
    landing.is_hull = true;
  }

  void PutFrom(const WriteItem& write, Landing& landing) const {
    const SourceTensor& source = plan_.sources()[static_cast<std::size_t>(write.origin.index)];
    Put(FromLayout(write.map), {source.shape, source.dtype.itemsize}, landing.from,
        landing.is_hull);
  }

  // In the order of the target, outermost dimension first, the steps in the source descend too.
  static void PutOrder(const StridedMap& map, Landing& landing) {
    absl::InlinedVector<std::pair<Index, Index>, 6> steps;  // in the target, in the source
    for (std::size_t d = 0; d < map.shape().size(); ++d) {
      if (map.shape()[d] <= 1) continue;
      const Index to = map.to().byte_strides[d];
      const Index from = map.from().byte_strides[d];
      steps.emplace_back(std::abs(to), to > 0 ? from : -from);
    }
    std::ranges::sort(steps, std::greater<>());
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const Index step = steps[i].second;
      if (i > 0 && std::abs(step) > std::abs(steps[i - 1].second)) landing.is_transposed = true;
      if (step < 0) landing.is_reversed = true;
      if (step == 0) landing.is_repeated = true;
    }
  }

  static bool IsRowMajor(const StridedLayout& layout) {
    Index stride = layout.itemsize();
    for (std::size_t d = layout.shape().size(); d-- > 0;) {
      if (layout.shape()[d] != 1 && layout.byte_strides()[d] != stride) return false;
      stride *= layout.shape()[d];
    }
    return true;
  }

  static void Put(const StridedLayout& layout, const DenseTensor& base, std::vector<Box>& boxes,
                  bool& is_hull) {
    if (std::optional<std::vector<Box>> exact = BoxesOf(layout, base, kMaxBoxes)) {
      boxes = *std::move(exact);
    } else if (std::optional<Box> hull = BoundingBoxOf(layout, base)) {
      boxes = {*std::move(hull)};
      is_hull = true;
    }
  }

  const LoadPlan& plan_;
  absl::flat_hash_map<StorageId, std::vector<std::int32_t>> targets_of_;
  std::vector<Landing> landings_;
};

}  // namespace

StridedLayout FromLayout(const StridedMap& map) {
  Index byte_offset = map.from().byte_offset;
  DimVector shape;
  DimVector byte_strides;
  for (size_t d = 0; d < map.shape().size(); ++d) {
    Index stride = map.from().byte_strides[d];
    if (stride == 0 && map.shape()[d] > 0) continue;
    if (stride < 0) {
      byte_offset += stride * (map.shape()[d] - 1);
      stride = -stride;
    }
    shape.push_back(map.shape()[d]);
    byte_strides.push_back(stride);
  }
  return StridedLayout::Unchecked(byte_offset, std::move(shape), std::move(byte_strides),
                                  map.from().itemsize);
}

std::vector<Landing> LandingsOf(const LoadPlan& plan) {
  LandingMaker maker(plan);
  maker.Add(plan.writes());
  maker.Add(plan.constants());
  maker.Add(plan.live_copies());
  maker.Add(plan.value_writes());
  return maker.Take();
}

}  // namespace loadplan
