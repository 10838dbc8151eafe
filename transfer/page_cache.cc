#include "transfer/page_cache.h"

#include <linux/magic.h>
#include <sys/uio.h>
#include <sys/vfs.h>

#include <algorithm>
#include <iterator>

namespace loadplan {

bool IsOnLocalFileSystem(int fd) {
  struct statfs found {};
  if (fstatfs(fd, &found) != 0) return false;
  constexpr long kXfs = 0x58465342;
  constexpr long kKinds[] = {EXT4_SUPER_MAGIC, kXfs, BTRFS_SUPER_MAGIC, TMPFS_MAGIC};
  return std::ranges::find(kKinds, found.f_type) != std::end(kKinds);
}

double CachedShare(int fd, ByteRange range) {
  constexpr Index kSamples = 16;
  if (range.empty()) return 0;
  Index cached = 0;
  for (Index i = 0; i < kSamples; ++i) {
    char byte = 0;
    iovec to{&byte, 1};
    const Index offset = range.start + range.nbytes() / kSamples * i;
    if (preadv2(fd, &to, 1, offset, RWF_NOWAIT) == 1) ++cached;
  }
  return static_cast<double>(cached) / kSamples;
}

}  // namespace loadplan
