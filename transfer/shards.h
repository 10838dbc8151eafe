// Shards: which box of a checkpoint tensor lies on which rank, and whether the boxes make the
// tensor.
//
//   w (5, 6)   rank 0: [0:3, 0:6]   rank 1: [3:5, 0:6]   rank 2: [3:5, 0:6], a replica
#ifndef LOADPLAN_TRANSFER_SHARDS_H_
#define LOADPLAN_TRANSFER_SHARDS_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "geometry/box.h"
#include "geometry/export.h"
#include "geometry/index.h"

namespace loadplan {

// `box`, in elements of the whole tensor, lies on `rank` (or is needed there).
struct ShardPiece {
  std::int32_t rank = 0;
  Box box;

  friend bool operator==(const ShardPiece&, const ShardPiece&) = default;
};

// A box and every rank that holds all of it, ascending.
struct OwnedBox {
  Box box;
  std::vector<std::int32_t> ranks;
};

// The distinct boxes of `pieces`, sorted by origin; pieces without elements are left out.
//
// Equal boxes on several ranks are replicas. Boxes that overlap without being equal are refused: of
// two ranks that disagree about a byte nobody could say which is right. InvalidArgument, naming the
// tensor and the box: those, a box outside of `shape` or of another rank, a box that one rank
// holds twice, and, with `must_cover`, elements that lie in no box.
LOADPLAN_API absl::StatusOr<std::vector<OwnedBox>> DistinctBoxes(const std::string& name,
                                                                 const DimVector& shape,
                                                                 std::span<const ShardPiece> pieces,
                                                                 bool must_cover);

// Some box of elements of `whole` that lies in none of `boxes`; `whole` itself has to have elements
// that do. For messages.
Box FirstGap(const Box& whole, std::span<const OwnedBox> boxes);

// Boxes looked up by where they lie: those that meet a query are found without looking at each.
class BoxIndex {
 public:
  // `boxes` has to outlive the index.
  explicit BoxIndex(std::span<const OwnedBox> boxes);

  // Calls `f(position in boxes, common elements)` for every box that meets `query`.
  template <typename F>
  void ForEachMeeting(const Box& query, F f) const;

 private:
  struct Slot {
    Interval along;      // in dimension dim_
    Index max_stop = 0;  // of this slot and all before it
    std::int32_t position = 0;
  };
  std::size_t FirstMeeting(const Interval& along) const;

  std::span<const OwnedBox> boxes_;
  int dim_ = -1;             // in which starts differ most; -1 for scalars
  std::vector<Slot> slots_;  // by start
};

template <typename F>
void BoxIndex::ForEachMeeting(const Box& query, F f) const {
  const Interval along = dim_ < 0 ? Interval{0, 1} : query[dim_];
  for (std::size_t i = FirstMeeting(along); i < slots_.size(); ++i) {
    if (slots_[i].along.start >= along.stop) break;
    const std::int32_t position = slots_[i].position;
    if (auto common = Intersect(boxes_[static_cast<std::size_t>(position)].box, query)) {
      f(position, *common);
    }
  }
}

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_SHARDS_H_
