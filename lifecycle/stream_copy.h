// Copies past the caches of the processor.
#ifndef LOADPLAN_LIFECYCLE_STREAM_COPY_H_
#define LOADPLAN_LIFECYCLE_STREAM_COPY_H_

#include <cstddef>

#include "geometry/export.h"
#include "geometry/strided_map.h"

namespace loadplan {

// As CopyInLoops, for bytes that nobody reads soon: lines of memory that are written whole are not
// fetched before, which is a third of what a copy moves. Where the processor cannot, or runs are
// short, it is CopyInLoops.
LOADPLAN_API void StreamInLoops(const StridedMap& map, std::byte* to, const std::byte* from);

// memcpy past the caches, but for lines that it writes in part. Follow with StreamFence.
void StreamBytes(std::byte* to, const std::byte* from, std::size_t nbytes);
void StreamFence();

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_STREAM_COPY_H_
