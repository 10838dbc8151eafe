// ReferenceCopyEngine: runs batches of copies in host memory as the kernel of a device does.
#ifndef LOADPLAN_LIFECYCLE_REFERENCE_COPIES_H_
#define LOADPLAN_LIFECYCLE_REFERENCE_COPIES_H_

#include <cstdint>

#include "cuda/copy_engine.h"
#include "geometry/export.h"

namespace loadplan {

// As blocks of one thread. For tests: LOADPLAN_CUDA_BATCH=reference.
LOADPLAN_API const CopyEngine& ReferenceCopyEngine();

// RunCopiesOnHost (geometry/copy_jobs.h), of casts as well.
LOADPLAN_API void RunReferenceCopies(const CopyBatch& batch, std::uint32_t num_threads = 1);

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_REFERENCE_COPIES_H_
