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

// Bytes of the larger item of a pair: what positions count.
Index LargeItem(const StridedMap& map) { return std::max(map.to().itemsize, map.from().itemsize); }
Index NumPositions(const StridedMap& map) { return map.num_elements() * LargeItem(map); }

// Whether the innermost dimension of a cast is a row. Rows of other maps are their items.
bool HasRow(const StridedMap& map) {
  return map.is_cast() && !map.shape().empty() &&
         map.to().byte_strides.back() == map.to().itemsize &&
         map.from().byte_strides.back() == map.from().itemsize;
}
std::size_t NumDims(const StridedMap& map) { return map.shape().size() - (HasRow(map) ? 1 : 0); }

CopyJob JobOf(const StridedMap& map, std::uint64_t to, CopyCast cast) {
  CopyJob job;
  const std::size_t rank = NumDims(map);
  const Index large = LargeItem(map);
  job.to = to + static_cast<std::uint64_t>(map.to().byte_offset);
  job.from = map.from().byte_offset;
  job.row_nbytes =
      Divisor(static_cast<std::uint32_t>(large * (HasRow(map) ? map.shape().back() : 1)));
  job.nbytes = static_cast<std::uint32_t>(NumPositions(map));
  job.rank = static_cast<std::uint32_t>(std::max<std::size_t>(rank, 1));
  job.cast = cast;
  // In positions: a side of small items is aligned for a unit at fewer bytes.
  const Index to_scale = large / map.to().itemsize;
  const Index from_scale = large / map.from().itemsize;
  CommonUnit common;
  common.Add(job.to * static_cast<std::uint64_t>(to_scale));
  common.Add(job.from * from_scale);
  common.Add(Index{job.row_nbytes.value});
  for (std::size_t i = 0; i < rank; ++i) {
    const std::size_t d = rank - 1 - i;
    job.to_strides[i] = map.to().byte_strides[d];
    job.from_strides[i] = map.from().byte_strides[d];
    if (d > 0) job.extents[i] = Divisor(static_cast<std::uint32_t>(map.shape()[d]));
    common.Add(job.to_strides[i] * to_scale);
    common.Add(job.from_strides[i] * from_scale);
  }
  job.unit = common.unit();
  if (!cast.is_none() && job.unit < kMaxCopyUnit) {
    // One item, or 0: where it does not lie at a multiple of its size.
    job.unit = job.unit < large ? 0 : static_cast<std::uint32_t>(large);
  }
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
  return StridedMap::Unchecked(std::move(shape), std::move(to), std::move(from), map.is_cast());
}

// One contiguous run as rows of at most kMaxCopyNbytes: all of that size, and the rest.
StridedMap RunAsRows(const StridedMap& run, Index start, Index nbytes) {
  return StridedMap::Unchecked({}, {run.to().byte_offset + start, {}, nbytes},
                               {run.from().byte_offset + start, {}, nbytes}, /*is_cast=*/false);
}

bool Append(const StridedMap& map, std::uint64_t to, std::size_t max_size, CopyCast cast,
            std::vector<CopyJob>* jobs) {
  constexpr Index kMax = kMaxCopyNbytes;
  const bool is_flat = NumDims(map) <= static_cast<std::size_t>(kMaxCopyDims);
  if (is_flat && NumPositions(map) <= kMax) {
    if (jobs->size() == max_size) return false;
    jobs->push_back(JobOf(map, to, cast));
    return jobs->back().unit > 0;
  }
  if (map.shape().empty()) {
    for (Index start = 0; start < map.nbytes(); start += kMax) {
      const Index nbytes = std::min(kMax, map.nbytes() - start);
      if (!Append(RunAsRows(map, start, nbytes), to, max_size, cast, jobs)) return false;
    }
    return true;
  }
  const Index extent = map.shape()[0];
  const Index step = is_flat ? std::max<Index>(1, kMax / (NumPositions(map) / extent)) : 1;
  for (Index start = 0; start < extent; start += step) {
    const StridedMap part = PartOf(map, start, std::min(step, extent - start));
    if (!Append(part, to, max_size, cast, jobs)) return false;
  }
  return true;
}

}  // namespace

bool AppendCopyJobs(const StridedMap& map, std::uint64_t to, std::size_t max_jobs,
                    std::vector<CopyJob>* jobs, CopyCast cast) {
  if (map.empty()) return true;
  const std::size_t before = jobs->size();
  if (Append(Coalesce(map), to, before + max_jobs, cast, jobs)) return true;
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
      CopyTile(batch, tile, thread, num_threads, NoCasts());
    }
  }
}

}  // namespace loadplan
