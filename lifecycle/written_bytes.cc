#include "lifecycle/written_bytes.h"

#include <algorithm>

#include "plan/coverage.h"

namespace loadplan {
namespace {

constexpr std::size_t kMaxRanges = 8;

ByteRange Clipped(const ByteRange& range, const ByteRange& to) {
  return {std::max(range.start, to.start), std::min(range.stop, to.stop)};
}

}  // namespace

std::vector<ByteRange> MergedRanges(std::vector<ByteRange> ranges, std::size_t max_ranges) {
  std::ranges::sort(ranges, {}, &ByteRange::start);
  std::vector<ByteRange> merged;
  for (const ByteRange& range : ranges) {
    if (range.empty()) continue;
    const bool touches = !merged.empty() && range.start <= merged.back().stop;
    if (touches || merged.size() == max_ranges) {
      merged.back().stop = std::max(merged.back().stop, range.stop);
    } else {
      merged.push_back(range);
    }
  }
  return merged;
}

WrittenBytes WrittenBytes::OfPlan(const LoadPlan& plan) {
  WrittenBytes written;
  for (const WriteItem& item : plan.writes()) written.Add(item);
  for (const WriteItem& item : plan.constants()) written.Add(item);
  for (const WriteItem& item : plan.live_copies()) written.Add(item);
  for (const WriteItem& item : plan.value_writes()) written.Add(item);
  return written;
}

void WrittenBytes::AddWhole(std::span<const TargetTensor> targets) {
  for (const TargetTensor& target : targets) Add(target.storage, target.layout);
}

std::span<const StridedLayout> WrittenBytes::Of(StorageId storage) const {
  const auto found = regions_.find(storage);
  if (found == regions_.end()) return {};
  return found->second;
}

std::vector<TargetBytes> WrittenBytes::PerTarget(std::span<const TargetTensor> targets) const {
  std::vector<TargetBytes> result(targets.size());
  absl::flat_hash_map<StorageId, std::vector<std::size_t>> of_storage;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const absl::StatusOr<Index> total = DistinctNbytes(targets[i].layout);
    const Index nbytes = total.ok() ? *total : targets[i].layout.nbytes();
    result[i] = {targets[i].name, 0, nbytes, {}};
    if (regions_.contains(targets[i].storage)) of_storage[targets[i].storage].push_back(i);
  }
  for (const auto& [storage, indices] : of_storage) {
    const std::vector<StridedLayout>& regions = regions_.at(storage);
    std::vector<StridedLayout> layouts;
    for (const std::size_t i : indices) layouts.push_back(targets[i].layout);
    const std::vector<Index> untouched = UntouchedNbytes(layouts, regions);
    for (std::size_t k = 0; k < indices.size(); ++k) {
      TargetBytes& target = result[indices[k]];
      target.nbytes = target.total_nbytes - untouched[k];
      if (target.nbytes == 0) continue;
      std::vector<ByteRange> ranges;
      for (const StridedLayout& region : regions) {
        ranges.push_back(Clipped(region.Span(), layouts[k].Span()));
      }
      target.ranges = MergedRanges(std::move(ranges), kMaxRanges);
    }
  }
  return result;
}

}  // namespace loadplan
