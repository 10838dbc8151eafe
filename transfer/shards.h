// Shards: which box of a checkpoint tensor lies on which rank, and whether the boxes make the
// tensor.
//
//   w (5, 6)   rank 0: [0:3, 0:6]   rank 1: [3:5, 0:6]   rank 2: [3:5, 0:6], a replica
//   v (4, 4)   rank 0: [0:3, 0:4]   rank 1: [2:4, 0:4]   row 2 is on both, a partial replica
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

// A box and every piece that holds all of it, by position, in order of their ranks.
struct PieceBox {
  Box box;
  std::vector<std::int32_t> pieces;
};

// `pieces` cut where they overlap: boxes that share no element, sorted by origin, each held by
// whole pieces. Pieces without elements are left out.
//
// Example: rows [0:3) and [2:4) are [0:2), [2:3) of both, and [3:4).
//
// InvalidArgument, naming the tensor and the box: a box outside of `shape` or of another rank, a
// box that one rank holds twice, a rank from kMaxRanks on, overlaps that make more than kMaxCuts
// boxes.
LOADPLAN_API absl::StatusOr<std::vector<PieceBox>> DisjointBoxes(
    const std::string& name, const DimVector& shape, std::span<const ShardPiece> pieces);
inline constexpr std::size_t kMaxCuts = std::size_t{1} << 12;
inline constexpr std::int32_t kMaxRanks = std::int32_t{1} << 20;

// The same boxes with the ranks that hold them: the owners of a box are replicas of it, whether
// their pieces are equal or overlap. InvalidArgument as DisjointBoxes and, with `must_cover`, where
// elements lie in no box.
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
  // Of the `box` of each; they have to outlive the index.
  template <typename Boxes>
  explicit BoxIndex(const Boxes& boxes) {
    boxes_.reserve(boxes.size());
    for (const auto& held : boxes) boxes_.push_back(&held.box);
    Build();
  }

  // Calls `f(position in boxes, common elements)` for every box that meets `query`.
  template <typename F>
  void ForEachMeeting(const Box& query, F f) const;

 private:
  struct Slot {
    Interval along;      // in dimension dim_
    Index max_stop = 0;  // of this slot and all before it
    std::int32_t position = 0;
  };
  void Build();
  std::size_t FirstMeeting(const Interval& along) const;

  std::vector<const Box*> boxes_;
  int dim_ = -1;             // in which starts differ most; -1 for scalars
  std::vector<Slot> slots_;  // by start
};

template <typename F>
void BoxIndex::ForEachMeeting(const Box& query, F f) const {
  const Interval along = dim_ < 0 ? Interval{0, 1} : query[dim_];
  for (std::size_t i = FirstMeeting(along); i < slots_.size(); ++i) {
    if (slots_[i].along.start >= along.stop) break;
    const std::int32_t position = slots_[i].position;
    if (auto common = Intersect(*boxes_[static_cast<std::size_t>(position)], query)) {
      f(position, *common);
    }
  }
}

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_SHARDS_H_
