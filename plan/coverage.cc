#include "plan/coverage.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "geometry/compose.h"
#include "plan/resolve.h"
#include "plan/write_index.h"

namespace loadplan {
namespace {

bool Meets(const ByteRange& a, const ByteRange& b) { return a.start < b.stop && b.start < a.stop; }

// Takes `region` away from every layout of `left`.
void TakeAway(const StridedLayout& region, std::vector<StridedLayout>& left) {
  const ByteRange span = region.Span();
  std::vector<StridedLayout> next;
  next.reserve(left.size() + 1);
  for (StridedLayout& layout : left) {
    if (Meets(layout.Span(), span)) {
      absl::StatusOr<std::vector<StridedLayout>> rest = Subtract(layout, region);
      if (rest.ok()) {
        std::move(rest->begin(), rest->end(), std::back_inserter(next));
        continue;
      }
    }
    next.push_back(std::move(layout));
  }
  left = std::move(next);
}

}  // namespace

absl::StatusOr<Index> DistinctNbytes(const StridedLayout& layout) {
  absl::StatusOr<std::vector<StridedMap>> maps = BufferMaps(layout);
  if (!maps.ok()) return maps.status();
  Index nbytes = 0;
  for (const StridedMap& map : *maps) nbytes += map.nbytes();
  return nbytes;
}

std::vector<Index> UntouchedNbytes(const std::vector<StridedLayout>& targets,
                                   const std::vector<StridedLayout>& regions) {
  // Sorted backwards: a contiguous target stays one or two layouts while blocks
  // are taken away from its end.
  std::vector<size_t> order(regions.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return regions[a].byte_offset() > regions[b].byte_offset();
  });
  std::vector<TimedSpan> spans;
  for (size_t i = 0; i < order.size(); ++i) {
    const ByteRange span = regions[order[i]].Span();
    if (!span.empty()) spans.push_back({static_cast<Index>(i), span});
  }
  const WriteIndex index(std::move(spans));

  std::vector<Index> untouched;
  for (const StridedLayout& target : targets) {
    std::vector<Index> meeting;
    index.ForEachMeeting(target.Span(), static_cast<Index>(order.size()),
                         [&](Index i) { meeting.push_back(i); });
    std::sort(meeting.begin(), meeting.end());
    std::vector<StridedLayout> left = {target};
    for (const Index i : meeting) TakeAway(regions[order[static_cast<size_t>(i)]], left);
    Index nbytes = 0;
    for (const StridedLayout& layout : left) {
      const absl::StatusOr<Index> distinct = DistinctNbytes(layout);
      nbytes += distinct.ok() ? *distinct : layout.nbytes();
    }
    untouched.push_back(nbytes);
  }
  return untouched;
}

}  // namespace loadplan
