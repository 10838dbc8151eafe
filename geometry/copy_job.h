// CopyJob: a strided copy in the form in which a device runs it; geometry/copy_tile.h runs it.
//
// Included by CUDA sources as well: C++17, integers and nothing else.
#ifndef LOADPLAN_GEOMETRY_COPY_JOB_H_
#define LOADPLAN_GEOMETRY_COPY_JOB_H_

#include <cstdint>

#ifdef __CUDACC__
#define LOADPLAN_ON_DEVICE __host__ __device__
#else
#define LOADPLAN_ON_DEVICE
#endif

namespace loadplan {

// Note [Copies in tiles]
//
//   job 0    40,000 bytes    tiles 0 1 2        a block of threads takes tiles
//   job 1       600 bytes    tile  3            b, b + blocks, b + 2 * blocks ...
//   job 2    20,000 bytes    tiles 4 5
//
// A job is *rows* of contiguous bytes on both sides, at strides of their own in up to four
// dimensions. Its bytes, row after row, are cut into tiles, whatever the rows are: one large row
// and thousands of short ones keep a device busy alike. A thread finds its bytes from a position
// in the job by division; the divisors are known beforehand.
//
// What of a job is known when a plan is made does not change from update to update: only the
// address of the source does. An item is a job with that address, and its first tile.
//
// Bytes are moved in units of 16, 8, 4, 2 or 1: the largest that divides the row and every address
// of both sides. Nothing orders the copies of one batch: no byte that one of them writes may be
// read or written by another.
//
// Items of a cast have a size on each side. Its positions count bytes of the larger one, so that
// tiles are as much work as others; the smaller side is at the same item:
//
//   float32 -> bfloat16    from  | 0 . . . | 4 . . . | 8 . . . | 12. . . |  one unit of 16
//                          to    | 0 . | 2 . | 4 . | 6 . |
//
// A unit is 16 of those bytes, or one item where either side is not aligned for as many.
inline constexpr int kMaxCopyDims = 4;
inline constexpr std::uint32_t kCopyTileNbytes = 16384;
inline constexpr std::uint32_t kMaxCopyUnit = 16;
// Of one job: positions have to stay below 2^31.
inline constexpr std::uint32_t kMaxCopyNbytes = std::uint32_t{1} << 30;

// Division of numbers below 2^31 by one that is known beforehand.
struct Divisor {
  std::uint32_t value = 1;
  std::uint32_t multiplier = 0;
  std::uint32_t shift = 0;

  Divisor() = default;
  // 1 <= `divisor` < 2^31.
  explicit Divisor(std::uint32_t divisor) : value(divisor) {
    if (divisor == 1) return;
    std::uint32_t log2 = 0;  // rounded up
    while ((std::uint64_t{1} << log2) < divisor) ++log2;
    multiplier =
        static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + log2)) + divisor - 1) / divisor);
    shift = log2 - 1;
  }
  LOADPLAN_ON_DEVICE std::uint32_t Quotient(std::uint32_t dividend) const {
    if (value == 1) return dividend;
    const std::uint64_t product = std::uint64_t{dividend} * multiplier;
    return static_cast<std::uint32_t>(product >> 32) >> shift;
  }
};

// The dtypes of a cast, as torch numbers them; none where bytes are moved as they are.
struct CopyCast {
  std::int8_t from = -1;
  std::int8_t to = -1;

  LOADPLAN_ON_DEVICE bool is_none() const { return to < 0; }
};

struct CopyJob {
  std::uint64_t to = 0;   // address of the first row
  std::int64_t from = 0;  // of its source, from the start of the source's bytes
  // By dimension, innermost first; 0 for those that are not there.
  std::int64_t to_strides[kMaxCopyDims] = {};
  std::int64_t from_strides[kMaxCopyDims] = {};
  Divisor extents[kMaxCopyDims - 1];  // of all dimensions but the outermost
  Divisor row_nbytes;
  std::uint32_t nbytes = 0;  // positions
  std::uint32_t rank = 1;    // at least 1
  // Bytes moved at a time, if the start of the source's bytes allows it.
  std::uint32_t unit = 1;
  CopyCast cast;
  std::uint16_t unused = 0;
};

struct CopyItem {
  std::uint64_t from = 0;  // address of the source's bytes
  std::uint32_t job = 0;
  std::uint32_t first_tile = 0;  // ascending from item to item, from 0
};

// A batch of copies. Jobs [0, num_planned) are those of a plan, those after them the batch's own.
struct CopyBatch {
  const CopyJob* planned = nullptr;
  const CopyJob* extra = nullptr;
  const CopyItem* items = nullptr;
  std::uint32_t num_planned = 0;
  std::uint32_t num_items = 0;
  std::uint32_t num_tiles = 0;
  bool has_casts = false;
};

// A batch that is small enough to be an argument of a kernel: nothing has to be uploaded.
inline constexpr std::uint32_t kSmallCopyBatch = 16;
struct SmallCopyBatch {
  CopyJob jobs[kSmallCopyBatch];
  CopyItem items[kSmallCopyBatch];
  std::uint32_t num_items = 0;
  std::uint32_t num_tiles = 0;
  bool has_casts = false;

  LOADPLAN_ON_DEVICE CopyBatch View() const {
    CopyBatch batch;
    batch.extra = jobs;
    batch.items = items;
    batch.num_items = num_items;
    batch.num_tiles = num_tiles;
    batch.has_casts = has_casts;
    return batch;
  }
};

// Tiles of a job.
inline std::uint32_t NumCopyTiles(const CopyJob& job) {
  return (job.nbytes + kCopyTileNbytes - 1) / kCopyTileNbytes;
}

}  // namespace loadplan

#endif  // LOADPLAN_GEOMETRY_COPY_JOB_H_
