// Random boxes and partitions for the tests of `transfer/`.
#ifndef LOADPLAN_TESTS_TRANSFER_RANDOM_SHARDS_H_
#define LOADPLAN_TESTS_TRANSFER_RANDOM_SHARDS_H_

#include <random>
#include <utility>
#include <vector>

#include "geometry/box.h"
#include "tests/testing/random_geometry.h"
#include "transfer/shards.h"

namespace loadplan::testing {

// A box with elements.
inline Box RandomBox(std::mt19937& gen, const DimVector& shape) {
  absl::InlinedVector<Interval, 4> intervals;
  for (const Index extent : shape) {
    const Index start = Uniform(gen, 0, extent - 1);
    intervals.push_back({start, Uniform(gen, start + 1, extent)});
  }
  return Box(std::move(intervals));
}

// `whole` cut into up to `max_pieces` boxes, as nested cuts of any dimension; piece i is rank i's.
inline std::vector<ShardPiece> RandomPartition(std::mt19937& gen, const Box& whole,
                                               Index max_pieces) {
  std::vector<Box> boxes = {whole};
  for (Index cuts = Uniform(gen, 0, max_pieces - 1); cuts > 0; --cuts) {
    const auto chosen =
        static_cast<std::size_t>(Uniform(gen, 0, static_cast<Index>(boxes.size()) - 1));
    if (whole.rank() == 0) break;
    const auto d = static_cast<std::size_t>(Uniform(gen, 0, whole.rank() - 1));
    const Interval all = boxes[chosen].intervals()[d];
    if (all.extent() < 2) continue;
    const Index cut = Uniform(gen, all.start + 1, all.stop - 1);
    absl::InlinedVector<Interval, 4> low = boxes[chosen].intervals();
    absl::InlinedVector<Interval, 4> high = low;
    low[d].stop = high[d].start = cut;
    boxes[chosen] = Box(std::move(low));
    boxes.push_back(Box(std::move(high)));
  }
  std::vector<ShardPiece> pieces;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    pieces.push_back({static_cast<std::int32_t>(i), boxes[i]});
  }
  return pieces;
}

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_TRANSFER_RANDOM_SHARDS_H_
