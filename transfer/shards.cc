#include "transfer/shards.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace loadplan {
namespace {

bool ComesBefore(const Box& a, const Box& b) {
  return std::ranges::lexicographical_compare(
      a.intervals(), b.intervals(), [](const Interval& x, const Interval& y) {
        return x.start != y.start ? x.start < y.start : x.stop < y.stop;
      });
}

std::string ShapeText(const DimVector& shape) {
  return absl::StrCat("(", absl::StrJoin(shape, ", "), shape.size() == 1 ? ",)" : ")");
}

absl::Status CheckWithin(const std::string& name, const DimVector& shape, const ShardPiece& piece) {
  if (piece.rank < 0 || piece.rank >= kMaxRanks) {
    return absl::InvalidArgumentError(absl::StrCat("`", name, "`: rank ", piece.rank,
                                                   " cannot hold ", ToString(piece.box),
                                                   "; ranks are 0 to ", kMaxRanks - 1));
  }
  if (static_cast<std::size_t>(piece.box.rank()) == shape.size() && piece.box.IsWithin(shape)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("`", name, "`: the shard ", ToString(piece.box), " of rank ", piece.rank,
                   " is no box of a tensor of shape ", ShapeText(shape)));
}

// What of `whole` lies around `inside`, a part of it: boxes, first to last.
std::vector<Box> Around(const Box& whole, const Box& inside) {
  std::vector<Box> around;
  absl::InlinedVector<Interval, 4> rest = whole.intervals();
  for (int d = 0; d < whole.rank(); ++d) {
    const auto i = static_cast<std::size_t>(d);
    const Interval all = rest[i];
    for (const Interval side :
         {Interval{all.start, inside[d].start}, Interval{inside[d].stop, all.stop}}) {
      if (side.extent() <= 0) continue;
      rest[i] = side;
      around.push_back(Box(rest));
    }
    rest[i] = inside[d];
  }
  return around;
}

// Adds `added` to boxes that share no element, cutting both where it meets them.
void Overlay(const PieceBox& added, std::vector<PieceBox>& boxes) {
  std::vector<Box> rest = {added.box};
  for (std::size_t i = 0, before = boxes.size(); i < before; ++i) {
    const std::optional<Box> common = Intersect(boxes[i].box, added.box);
    if (!common.has_value()) continue;
    for (Box& side : Around(boxes[i].box, *common)) {
      boxes.push_back({std::move(side), boxes[i].pieces});
    }
    boxes[i].box = *common;
    std::ranges::copy(added.pieces, std::back_inserter(boxes[i].pieces));
    std::vector<Box> left;
    for (Box& part : rest) {
      const std::optional<Box> taken = Intersect(part, *common);
      if (taken.has_value()) {
        std::ranges::move(Around(part, *taken), std::back_inserter(left));
      } else {
        left.push_back(std::move(part));
      }
    }
    rest = std::move(left);
  }
  for (Box& part : rest) boxes.push_back({std::move(part), added.pieces});
}

// Cuts boxes that overlap. Those that meet no other, usually all, stay as they are.
absl::Status CutOverlaps(const std::string& name, std::vector<PieceBox>& boxes) {
  const BoxIndex index(boxes);
  std::vector<PieceBox> apart;
  std::vector<PieceBox> overlapping;
  for (const PieceBox& held : boxes) {
    int num_meeting = 0;
    index.ForEachMeeting(held.box, [&](std::int32_t, const Box&) { ++num_meeting; });
    (num_meeting > 1 ? overlapping : apart).push_back(held);
  }
  if (overlapping.empty()) return absl::OkStatus();
  std::vector<PieceBox> cut;
  for (const PieceBox& held : overlapping) {
    Overlay(held, cut);
    if (cut.size() <= kMaxCuts) continue;
    return absl::InvalidArgumentError(absl::StrCat("`", name, "`: the shards overlap in more than ",
                                                   kMaxCuts,
                                                   " places; give each element to one box"));
  }
  boxes = std::move(apart);
  std::ranges::move(cut, std::back_inserter(boxes));
  std::ranges::sort(boxes, ComesBefore, &PieceBox::box);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<PieceBox>> DisjointBoxes(const std::string& name, const DimVector& shape,
                                                    std::span<const ShardPiece> pieces) {
  std::vector<std::int32_t> sorted;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (absl::Status status = CheckWithin(name, shape, pieces[i]); !status.ok()) return status;
    if (pieces[i].box.num_elements() > 0) sorted.push_back(static_cast<std::int32_t>(i));
  }
  const auto at = [&](std::int32_t i) -> const ShardPiece& {
    return pieces[static_cast<std::size_t>(i)];
  };
  std::ranges::stable_sort(sorted, [&](std::int32_t a, std::int32_t b) {
    return at(a).box == at(b).box ? at(a).rank < at(b).rank : ComesBefore(at(a).box, at(b).box);
  });
  std::vector<PieceBox> boxes;
  for (const std::int32_t i : sorted) {
    const ShardPiece& piece = at(i);
    if (boxes.empty() || boxes.back().box != piece.box) {
      boxes.push_back({piece.box, {}});
    } else if (at(boxes.back().pieces.back()).rank == piece.rank) {
      return absl::InvalidArgumentError(absl::StrCat("`", name, "`: rank ", piece.rank,
                                                     " holds the shard ", ToString(piece.box),
                                                     " twice; name each shard once"));
    }
    boxes.back().pieces.push_back(i);
  }
  if (absl::Status status = CutOverlaps(name, boxes); !status.ok()) return status;
  for (PieceBox& held : boxes)
    std::ranges::stable_sort(held.pieces, {}, [&](std::int32_t i) { return at(i).rank; });
  return boxes;
}

absl::StatusOr<std::vector<OwnedBox>> DistinctBoxes(const std::string& name, const DimVector& shape,
                                                    std::span<const ShardPiece> pieces,
                                                    bool must_cover) {
  absl::StatusOr<std::vector<PieceBox>> disjoint = DisjointBoxes(name, shape, pieces);
  if (!disjoint.ok()) return disjoint.status();
  std::vector<OwnedBox> boxes;
  Index covered = 0;
  for (PieceBox& held : *disjoint) {
    OwnedBox owned{std::move(held.box), {}};
    for (const std::int32_t i : held.pieces) {
      const std::int32_t rank = pieces[static_cast<std::size_t>(i)].rank;
      if (owned.ranks.empty() || owned.ranks.back() != rank) owned.ranks.push_back(rank);
    }
    covered += owned.box.num_elements();
    boxes.push_back(std::move(owned));
  }
  const Box whole = Box::Whole(shape);
  if (must_cover && covered != whole.num_elements()) {
    return absl::InvalidArgumentError(
        absl::StrCat("`", name, "`: the shards hold ", covered, " of ", whole.num_elements(),
                     " elements; no rank holds ", ToString(FirstGap(whole, boxes))));
  }
  return boxes;
}

Box FirstGap(const Box& whole, std::span<const OwnedBox> boxes) {
  // Cut the region down to a part without the box, box by box; where a box takes all of it the
  // gap lies elsewhere, so walk the parts in order.
  std::vector<std::pair<Box, std::size_t>> parts = {{whole, 0}};
  while (!parts.empty()) {
    auto [part, next] = std::move(parts.back());
    parts.pop_back();
    std::optional<Box> common;
    while (next < boxes.size() && !(common = Intersect(part, boxes[next].box))) ++next;
    if (next == boxes.size()) return part;
    std::vector<Box> around = Around(part, *common);
    for (std::size_t i = around.size(); i-- > 0;)
      parts.emplace_back(std::move(around[i]), next + 1);
  }
  return whole;
}

void BoxIndex::Build() {
  std::size_t most = 0;
  for (int d = 0; !boxes_.empty() && d < boxes_.front()->rank(); ++d) {
    std::set<Index> starts;
    for (const Box* box : boxes_) starts.insert((*box)[d].start);
    if (starts.size() > most) {
      most = starts.size();
      dim_ = d;
    }
  }
  for (std::size_t i = 0; i < boxes_.size(); ++i) {
    const Interval along = dim_ < 0 ? Interval{0, 1} : (*boxes_[i])[dim_];
    slots_.push_back({along, 0, static_cast<std::int32_t>(i)});
  }
  std::ranges::stable_sort(slots_, {}, [](const Slot& slot) { return slot.along.start; });
  Index max_stop = 0;
  for (Slot& slot : slots_) slot.max_stop = max_stop = std::max(max_stop, slot.along.stop);
}

std::size_t BoxIndex::FirstMeeting(const Interval& along) const {
  const auto first = std::ranges::partition_point(
      slots_, [&](const Slot& slot) { return slot.max_stop <= along.start; });
  return static_cast<std::size_t>(first - slots_.begin());
}

}  // namespace loadplan
