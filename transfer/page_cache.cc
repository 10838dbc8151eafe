#include "transfer/page_cache.h"

#include <sys/uio.h>

namespace loadplan {

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
