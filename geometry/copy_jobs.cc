#include "geometry/copy_jobs.h"

#include <algorithm>
#include <utility>

#include "geometry/copy_tile.h"

namespace loadplan {
namespace {

// The lowest bit that is set in any of the numbers, kMaxCopyUnit at most.
class CommonUnit {
 public:
  void Add(std::uint64_t number) { bits_ |= number; }
  void Add(Index number) { Add(static_cast<std::uint64_t>(number)); }
  std::uint32_t unit() const { return static_cast<std::uint32_t>(bits_ & (~bits_ + 1)); }

 private:
  std::uint64_t bits_ = kMaxCopyUnit;
};

CopyJob JobOf(const StridedMap& map, std::uint64_t to) {
  CopyJob job;
  const std::size_t rank = map.shape().size();
  job.to = to + static_cast<std::uint64_t>(map.to().byte_offset);
  job.from = map.from().byte_offset;
  job.row_nbytes = Divisor(static_cast<std::uint32_t>(map.to().itemsize));
  job.nbytes = static_cast<std::uint32_t>(map.nbytes());
  job.rank = static_cast<std::uint32_t>(std::max<std::size_t>(rank, 1));
  CommonUnit common;
  common.Add(job.to);
  common.Add(job.from);
  common.Add(map.to().itemsize);
  for (std::size_t i = 0; i < rank; ++i) {
    const std::size_t d = rank - 1 - i;
    job.to_strides[i] = map.to().byte_strides[d];
    job.from_strides[i] = map.from().byte_strides[d];
    if (d > 0) job.extents[i] = Divisor(static_cast<std::uint32_t>(map.shape()[d]));
    common.Add(job.to_strides[i]);
    common.Add(job.from_strides[i]);
  }
  job.unit = common.unit();
  return job;
}

// `count` of the outermost extent from `start` on; without that dimension where it is one.
StridedMap PartOf(const StridedMap& map, Index start, Index count) {
  DimVector shape = map.shape();
  MapSide to = map.to();
  MapSide from = map.from();
  to.byte_offset += start * to.byte_strides[0];
  from.byte_offset += start * from.byte_strides[0];
  shape[0] = count;
  if (count == 1) {
    shape.erase(shape.begin());
    to.byte_strides.erase(to.byte_strides.begin());
    from.byte_strides.erase(from.byte_strides.begin());
  }
  return StridedMap::Unchecked(std::move(shape), std::move(to), std::move(from),
                               /*is_cast=*/false);
}

// One contiguous run as rows of at most kMaxCopyNbytes: all of that size, and the rest.
StridedMap RunAsRows(const StridedMap& run, Index start, Index nbytes) {
  return StridedMap::Unchecked({}, {run.to().byte_offset + start, {}, nbytes},
                               {run.from().byte_offset + start, {}, nbytes}, /*is_cast=*/false);
}

bool Append(const StridedMap& map, std::uint64_t to, std::size_t max_size,
            std::vector<CopyJob>* jobs) {
  constexpr Index kMax = kMaxCopyNbytes;
  const std::size_t rank = map.shape().size();
  if (rank <= static_cast<std::size_t>(kMaxCopyDims) && map.nbytes() <= kMax) {
    if (jobs->size() == max_size) return false;
    jobs->push_back(JobOf(map, to));
    return true;
  }
  if (rank == 0) {
    for (Index start = 0; start < map.nbytes(); start += kMax) {
      const Index nbytes = std::min(kMax, map.nbytes() - start);
      if (!Append(RunAsRows(map, start, nbytes), to, max_size, jobs)) return false;
    }
    return true;
  }
  const Index extent = map.shape()[0];
  const bool is_flat = rank <= static_cast<std::size_t>(kMaxCopyDims);
  const Index step = is_flat ? std::max<Index>(1, kMax / (map.nbytes() / extent)) : 1;
  for (Index start = 0; start < extent; start += step) {
    const StridedMap part = PartOf(map, start, std::min(step, extent - start));
    if (!Append(part, to, max_size, jobs)) return false;
  }
  return true;
}

}  // namespace

bool AppendCopyJobs(const StridedMap& map, std::uint64_t to, std::size_t max_jobs,
                    std::vector<CopyJob>* jobs) {
  if (map.empty()) return true;
  const std::size_t before = jobs->size();
  if (Append(Coalesce(map), to, before + max_jobs, jobs)) return true;
  jobs->resize(before);
  return false;
}

std::uint32_t NumberTiles(std::span<const CopyJob> planned, std::span<const CopyJob> extra,
                          std::span<CopyItem> items) {
  std::uint32_t tiles = 0;
  for (CopyItem& item : items) {
    item.first_tile = tiles;
    tiles += NumCopyTiles(item.job < planned.size() ? planned[item.job]
                                                    : extra[item.job - planned.size()]);
  }
  return tiles;
}

void RunCopiesOnHost(const CopyBatch& batch, std::uint32_t num_threads) {
  for (std::uint32_t tile = 0; tile < batch.num_tiles; ++tile) {
    for (std::uint32_t thread = 0; thread < num_threads; ++thread) {
      CopyTile(batch, tile, thread, num_threads);
    }
  }
}

}  // namespace loadplan
