// How much of a file's bytes is in memory already: it decides what a read costs.
#ifndef LOADPLAN_TRANSFER_PAGE_CACHE_H_
#define LOADPLAN_TRANSFER_PAGE_CACHE_H_

#include "geometry/index.h"

namespace loadplan {

// How much of `range` of the file seems to be in the page cache, by a few samples: 0 to 1. Nothing
// where the file system does not say. Waits for no disk.
double CachedShare(int fd, ByteRange range);

// Whether the file lies on a kind of file system that only this machine's kernel changes, and that
// takes direct reads: ext4, xfs, btrfs, tmpfs.
bool IsOnLocalFileSystem(int fd);

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_PAGE_CACHE_H_
