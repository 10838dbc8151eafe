#include "transfer/shards.h"

#include <algorithm>
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
  if (piece.rank < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("`", name, "`: rank ", piece.rank, " cannot hold ", ToString(piece.box)));
  }
  if (static_cast<std::size_t>(piece.box.rank()) == shape.size() && piece.box.IsWithin(shape)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("`", name, "`: the shard ", ToString(piece.box), " of rank ", piece.rank,
                   " is no box of a tensor of shape ", ShapeText(shape)));
}

std::string RanksText(const OwnedBox& owned) {
  return absl::StrCat(ToString(owned.box), " of rank ", owned.ranks.front());
}

absl::Status CheckDisjoint(const std::string& name, std::span<const OwnedBox> boxes) {
  const BoxIndex index(boxes);
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    std::optional<std::size_t> other;
    index.ForEachMeeting(boxes[i].box, [&](std::int32_t position, const Box&) {
      if (static_cast<std::size_t>(position) != i) other = static_cast<std::size_t>(position);
    });
    if (!other.has_value()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "`", name, "`: the shards ", RanksText(boxes[i]), " and ", RanksText(boxes[*other]),
        " overlap without being equal, so that some elements have two values; give each element "
        "to one box (replicas of a whole box are fine)"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<OwnedBox>> DistinctBoxes(const std::string& name, const DimVector& shape,
                                                    std::span<const ShardPiece> pieces,
                                                    bool must_cover) {
  std::vector<const ShardPiece*> sorted;
  for (const ShardPiece& piece : pieces) {
    if (absl::Status status = CheckWithin(name, shape, piece); !status.ok()) return status;
    if (piece.box.num_elements() > 0) sorted.push_back(&piece);
  }
  std::ranges::sort(sorted, [](const ShardPiece* a, const ShardPiece* b) {
    return a->box == b->box ? a->rank < b->rank : ComesBefore(a->box, b->box);
  });
  std::vector<OwnedBox> boxes;
  Index covered = 0;
  for (const ShardPiece* piece : sorted) {
    if (boxes.empty() || boxes.back().box != piece->box) {
      boxes.push_back({piece->box, {}});
      covered += piece->box.num_elements();
    } else if (boxes.back().ranks.back() == piece->rank) {
      return absl::InvalidArgumentError(absl::StrCat("`", name, "`: rank ", piece->rank,
                                                     " holds the shard ", ToString(piece->box),
                                                     " twice; name each shard once"));
    }
    boxes.back().ranks.push_back(piece->rank);
  }
  if (absl::Status status = CheckDisjoint(name, boxes); !status.ok()) return status;
  const Box whole = Box::Whole(shape);
  if (must_cover && covered != whole.num_elements()) {
    return absl::InvalidArgumentError(
        absl::StrCat("`", name, "`: the shards hold ", covered, " of ", whole.num_elements(),
                     " elements; no rank holds ", ToString(FirstGap(whole, boxes))));
  }
  return boxes;
}

Box FirstGap(const Box& whole, std::span<const OwnedBox> boxes) {
  Box gap = whole;
  // Cut the region down to a part without the box, box by box; where a box takes all of it the
  // gap lies elsewhere, so walk the parts in order.
  std::vector<std::pair<Box, std::size_t>> parts = {{whole, 0}};
  while (!parts.empty()) {
    auto [part, next] = std::move(parts.back());
    parts.pop_back();
    std::optional<Box> common;
    while (next < boxes.size() && !(common = Intersect(part, boxes[next].box))) ++next;
    if (next == boxes.size()) return part;
    // What is left of `part` around the common box, first to last.
    std::vector<std::pair<Box, std::size_t>> around;
    absl::InlinedVector<Interval, 4> rest = part.intervals();
    for (int d = 0; d < part.rank(); ++d) {
      const auto i = static_cast<std::size_t>(d);
      const Interval inside = (*common)[d];
      const Interval all = rest[i];
      for (const Interval side :
           {Interval{all.start, inside.start}, Interval{inside.stop, all.stop}}) {
        if (side.extent() <= 0) continue;
        absl::InlinedVector<Interval, 4> cut = rest;
        cut[i] = side;
        around.emplace_back(Box(std::move(cut)), next + 1);
      }
      rest[i] = inside;
    }
    parts.insert(parts.end(), around.rbegin(), around.rend());
  }
  return gap;
}

BoxIndex::BoxIndex(std::span<const OwnedBox> boxes) : boxes_(boxes) {
  std::size_t most = 0;
  for (int d = 0; !boxes.empty() && d < boxes.front().box.rank(); ++d) {
    std::set<Index> starts;
    for (const OwnedBox& owned : boxes) starts.insert(owned.box[d].start);
    if (starts.size() > most) {
      most = starts.size();
      dim_ = d;
    }
  }
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const Interval along = dim_ < 0 ? Interval{0, 1} : boxes[i].box[dim_];
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
