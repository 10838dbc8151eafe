#include "lifecycle/entry_parts.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "geometry/overlap.h"

namespace loadplan {

absl::Status HeldBytes::Add(const StridedLayout& layout, Index nbytes) {
  const ByteRange span = layout.Span();
  if (span.empty()) return absl::OkStatus();
  if (span.start < 0 || span.stop > nbytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a part holds bytes [%d, %d) of a tensor of %d bytes; send bytes of the "
                        "tensor as declared",
                        span.start, span.stop, nbytes));
  }
  // Parts that start before this one's end and are long enough to reach its start.
  for (auto part = parts_.lower_bound(span.start - longest_);
       part != parts_.end() && part->first < span.stop; ++part) {
    if (!MayShareBytes(part->second, layout)) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "bytes in [%d, %d) of it came in two parts; send each byte once",
        std::max(span.start, part->first), std::min(span.stop, part->second.Span().stop)));
  }
  longest_ = std::max(longest_, span.nbytes());
  parts_.emplace(span.start, layout);
  return absl::OkStatus();
}

std::optional<Index> ShiftOf(const StridedMap& map) {
  const StridedMap run = Coalesce(map);
  if (!run.shape().empty() || run.is_cast()) return std::nullopt;
  return run.from().byte_offset - run.to().byte_offset;
}

StridedMap Shifted(const StridedMap& map, Index shift) {
  MapSide from = map.from();
  from.byte_offset += shift;
  return StridedMap::Unchecked(map.shape(), map.to(), std::move(from), map.is_cast());
}

}  // namespace loadplan
