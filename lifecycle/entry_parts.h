// EntryParts: what has come of a checkpoint tensor that arrives in parts.
#ifndef LOADPLAN_LIFECYCLE_ENTRY_PARTS_H_
#define LOADPLAN_LIFECYCLE_ENTRY_PARTS_H_

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>

#include "absl/status/status.h"
#include "geometry/index.h"
#include "geometry/strided_layout.h"
#include "geometry/strided_map.h"

namespace loadplan {

// Note [Parts]
//
//   full tensor   0 1 2 3 4 5 6 7      a plan that reads 2..6
//   part 1        0 1 2 3              from rank 0's shard: 2 and 3 land
//   part 2                4 5 6 7      from rank 1's: 4, 5, 6 land, and the entry is complete
//
// A part is a strided map: bytes of the row-major checkpoint tensor, each with its byte in some
// buffer. What a write reads, composed with the part, is what of it can be written now.
//
// Copies of bytes may be cut anywhere. Items that are cast may not, and the bits of a cast depend
// on more than the item: torch converts the NaNs of a contiguous row otherwise than those of
// scattered items. What casts read is therefore kept, with the gaps that it has in the tensor,
// until all of it is there, and converted as the whole tensor would be. A part that is one
// contiguous run with all of it needs no keeping.
//
// Nothing tells two landings of one byte and none of another from one landing each, once bytes are
// counted. So a part that shares a byte with an earlier one is refused.
class HeldBytes {
 public:
  // InvalidArgument, with nothing noted: bytes outside [0, nbytes), or bytes noted before. A
  // refusal in doubt is possible for irregular layouts whose spans meet.
  absl::Status Add(const StridedLayout& layout, Index nbytes);

 private:
  // By first byte. Spans of disjoint parts may still interleave (columns).
  std::multimap<Index, StridedLayout> parts_;
  Index longest_ = 0;  // span
};

struct EntryParts {
  HeldBytes held;
  Index needed = 0;  // bytes that everything which reads the entry takes
  Index landed = 0;

  // For casts: the bytes [kept_range) of the tensor, while they come, and the largest item.
  ByteRange kept_range;
  Index cast_itemsize = 1;
  at::Tensor kept;
  bool converted = false;
};

// Of a map that is one contiguous run on both sides: what to add to an offset in `to` to have the
// one in `from`. nullopt for any other map.
std::optional<Index> ShiftOf(const StridedMap& map);

// `map` read `shift` bytes further on.
StridedMap Shifted(const StridedMap& map, Index shift);

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_ENTRY_PARTS_H_
