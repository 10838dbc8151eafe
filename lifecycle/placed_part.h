// PlacedPart: where the bytes of a part go, for whoever writes them there without the session.
#ifndef LOADPLAN_LIFECYCLE_PLACED_PART_H_
#define LOADPLAN_LIFECYCLE_PLACED_PART_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "geometry/export.h"
#include "geometry/strided_map.h"

namespace loadplan {

// Plain copies to memory of the host. Writing them takes no lock and calls no torch: any thread
// may, while the session goes on.
struct LOADPLAN_API PlacedPart {
  struct Copy {
    StridedMap map;  // coalesced; `from` as in the part, `to` from `to` on
    std::byte* to = nullptr;
    at::Tensor held;  // keeps that memory
  };

  std::vector<Copy> copies;
  Index nbytes = 0;         // of all copies
  Index target_nbytes = 0;  // of those into targets

  // Writes all of them out of the memory where byte 0 of `from` lies.
  void Write(const std::byte* from) const;
};

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_PLACED_PART_H_
