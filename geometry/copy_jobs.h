// Copies as jobs of a device: made from strided maps, and run on the host.
#ifndef LOADPLAN_GEOMETRY_COPY_JOBS_H_
#define LOADPLAN_GEOMETRY_COPY_JOBS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "geometry/copy_job.h"
#include "geometry/export.h"
#include "geometry/strided_map.h"

namespace loadplan {

// Appends the jobs that together copy `map`; byte 0 of `to` lies at address `to`. `cast` says what
// a map of a cast converts; its items have 1, 2, 4 or 8 bytes.
//
// Almost every map is one job: more where it has more than kMaxCopyDims dimensions (the outermost
// are unrolled) or more than kMaxCopyNbytes positions. False, with nothing appended, where that
// would be more than `max_jobs`, or an item of a cast does not lie at a multiple of its size. The
// source's bytes have to start at such a multiple as well. Nothing to do for an empty map.
LOADPLAN_API bool AppendCopyJobs(const StridedMap& map, std::uint64_t to, std::size_t max_jobs,
                                 std::vector<CopyJob>* jobs, CopyCast cast = {});

// Gives `items` their first tiles; returns how many tiles there are. Items are of jobs in `planned`
// and, counted on, in `extra`. They have less than 2^32 tiles (64 TiB).
LOADPLAN_API std::uint32_t NumberTiles(std::span<const CopyJob> planned,
                                       std::span<const CopyJob> extra, std::span<CopyItem> items);

// Runs a batch without casts in host memory, as blocks of `num_threads` threads would.
LOADPLAN_API void RunCopiesOnHost(const CopyBatch& batch, std::uint32_t num_threads = 1);

}  // namespace loadplan

#endif  // LOADPLAN_GEOMETRY_COPY_JOBS_H_
