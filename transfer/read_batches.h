// Batches: what is read, and landed, together.
#ifndef LOADPLAN_TRANSFER_READ_BATCHES_H_
#define LOADPLAN_TRANSFER_READ_BATCHES_H_

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "geometry/index.h"
#include "geometry/strided_map.h"
#include "transfer/checkpoint_files.h"

namespace loadplan {

// A range of one tensor.
struct Segment {
  std::int32_t tensor = -1;  // into CheckpointFiles::tensors()
  ByteRange bytes;           // of the row-major tensor
};

struct ReadBatch {
  std::vector<Segment> segments;       // of one file, ascending
  std::vector<std::int32_t> finishes;  // tensors of which nothing comes after this batch
  Index nbytes = 0;                    // of the segments
  bool is_mapped = false;              // for the caller
};

struct BatchLimits {
  Index nbytes = 0;  // of all segments
  // From the first byte of a batch to its last, in the file.
  Index span = std::numeric_limits<Index>::max();
  // A tensor of more bytes is cut over several batches; one of fewer, but more than a batch has, is
  // a batch of its own.
  Index most = std::numeric_limits<Index>::max();
};

// All of `ranges` (per tensor of `files`; ascending), in batches within `limits` and segments of at
// most kMaxSegment bytes. Files take turns, so that several are read at once. `skipped` tensors
// (true) are in none.
std::vector<ReadBatch> MakeBatches(const CheckpointFiles& files,
                                   std::span<const std::vector<ByteRange>> ranges,
                                   const std::vector<bool>& skipped, const BatchLimits& limits);
// What one thread copies in one go.
inline constexpr Index kMaxSegment = Index{8} << 20;

// A contiguous copy of `nbytes` bytes.
struct ByteRun {
  Index to = 0;
  Index from = 0;
  Index nbytes = 0;
};

// The same pairs in as few maps as equal lengths and steps allow.
//
// Example: 4096 rows of 3584 bytes each, 28672 apart, that were read one behind the other: one map.
std::vector<StridedMap> ToMaps(std::span<const ByteRun> runs);

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_READ_BATCHES_H_
