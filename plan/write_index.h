// WriteIndex: which of the many writes into one storage matter to a read.
#ifndef LOADPLAN_PLAN_WRITE_INDEX_H_
#define LOADPLAN_PLAN_WRITE_INDEX_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "geometry/index.h"

namespace loadplan {

// The span of bytes of a write, and its time (the index of its copy record).
struct TimedSpan {
  Index time = 0;
  ByteRange span;
};

// An immutable k-d tree over (time, first byte). One axis alone is not enough:
// `cat` of 384 tensors spreads over addresses, a scratch buffer that a loop reuses
// 384 times over times, and a query must be cheap in both.
class WriteIndex {
 public:
  WriteIndex() = default;
  // Empty spans must not be among `writes`. O(n log n).
  explicit WriteIndex(std::vector<TimedSpan> writes);

  // The greatest time `t`, `since <= t < before`, of a write whose span meets
  // `range`; -1 where there is none.
  Index NewestMeeting(ByteRange range, Index since, Index before) const;

  // Calls `f` with the time of each write older than `before` whose span meets
  // `range`, in no particular order.
  void ForEachMeeting(ByteRange range, Index before, const std::function<void(Index)>& f) const;

 private:
  struct Node {
    ByteRange hull;
    Index min_time = 0;
    Index max_time = 0;
    std::uint32_t begin = 0;  // into writes_
    std::uint32_t end = 0;
    std::int32_t left = -1;  // into nodes_; the right child follows it; -1: a leaf
  };

  Node Summarise(std::uint32_t begin, std::uint32_t end) const;
  void Split(std::size_t node, bool by_time);

  std::vector<TimedSpan> writes_;
  std::vector<Node> nodes_;
};

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_WRITE_INDEX_H_
