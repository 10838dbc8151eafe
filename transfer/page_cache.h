// Whether a file's bytes are in memory already: it decides what a read costs.
#ifndef LOADPLAN_TRANSFER_PAGE_CACHE_H_
#define LOADPLAN_TRANSFER_PAGE_CACHE_H_

#include "geometry/index.h"

namespace loadplan {

// Whether most of `range` of the file seems to be in the page cache, by a few samples. False where
// the file system does not say. Waits for no disk.
bool IsCached(int fd, ByteRange range);

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_PAGE_CACHE_H_
