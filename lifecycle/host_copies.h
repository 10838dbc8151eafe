// HostCopyEngine: runs batches of copies in host memory, on several threads.
#ifndef LOADPLAN_LIFECYCLE_HOST_COPIES_H_
#define LOADPLAN_LIFECYCLE_HOST_COPIES_H_

#include <cstdint>

#include "cuda/copy_engine.h"
#include "geometry/export.h"

namespace loadplan {

// Note [Copies on the host]
//
// The loader's `copy_` starts and joins the threads for each tensor, and leaves those of less than
// 32,768 elements to one. A batch is cut into pieces of a size, whatever its tensors are, which
// threads take as they come: a slow one takes fewer.
//
// Threads are started for a batch and end with it: that takes some 20 us, a batch large enough for
// a second thread hundreds. Torch's own pool is OpenMP's, which is only there for code that is
// compiled for it, and a pool of ours would have to survive `fork`.
//
// Large batches are written past the caches: an ordinary store first reads the line that it
// overwrites, a third of all traffic, and such a batch would not stay in a cache anyway.
struct HostCopyOptions {
  int max_threads = 1;
  // Of a batch: what a thread is worth, and from what on it goes past the caches.
  std::uint64_t thread_nbytes = std::uint64_t{1} << 20;
  std::uint64_t stream_nbytes = std::uint64_t{32} << 20;
  std::uint32_t tiles_at_a_time = 32;
};
LOADPLAN_API void RunCopiesInParallel(const CopyBatch& batch, const HostCopyOptions& options);

// On as many threads as torch's operators use. The stream is ignored.
LOADPLAN_API const CopyEngine& HostCopyEngine();

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_HOST_COPIES_H_
