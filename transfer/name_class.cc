#include "transfer/name_class.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lifecycle/annotate.h"

namespace loadplan {
namespace {

std::string GeometryText(const TensorGeometry& geometry) {
  return absl::StrCat("(", absl::StrJoin(geometry.shape, ", "),
                      geometry.shape.size() == 1 ? ",) " : ") ", std::string(geometry.dtype.name));
}

absl::Status CheckAlike(const std::string& name, const TableStatement& first,
                        const TableStatement& other) {
  if (first.geometry->shape == other.geometry->shape &&
      first.geometry->dtype == other.geometry->dtype) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("`", name, "` is ", GeometryText(*first.geometry), " on rank ",
                   first.ranks->front(), " and ", GeometryText(*other.geometry), " on rank ",
                   other.ranks->front(), "; shards and plans have to agree"));
}

// For messages of what nobody holds: a rank that should, and is not there with its shards.
std::string AbsentText(std::span<const TableStatement> statements) {
  std::set<std::int32_t> present;
  for (const TableStatement& statement : statements) {
    if (statement.is_held) present.insert(statement.ranks->begin(), statement.ranks->end());
  }
  for (const TableStatement& statement : statements) {
    if (!statement.is_held) continue;
    for (const ShardPiece& piece : statement.geometry->pieces) {
      if (piece.box.num_elements() == 0 || present.contains(piece.rank)) continue;
      return absl::StrCat("; rank ", statement.ranks->front(), " says that rank ", piece.rank,
                          " holds ", ToString(piece.box),
                          ", and there is no such rank with shards of it");
    }
  }
  return "";
}

absl::Status WithAbsent(const absl::Status& status, std::span<const TableStatement> statements) {
  return Annotate(status, AbsentText(statements));
}

Box WithInterval(const Box& box, std::size_t dim, Interval interval) {
  absl::InlinedVector<Interval, 4> intervals = box.intervals();
  intervals[dim] = interval;
  return Box(std::move(intervals));
}

}  // namespace

absl::StatusOr<NameClass> MakeNameClass(const std::string& name,
                                        std::span<const TableStatement> statements,
                                        const HoldRules& rules) {
  NameClass result;
  std::vector<ShardPiece> held;
  std::vector<ShardPiece> needed;
  bool is_held = false;
  for (const TableStatement& statement : statements) {
    absl::Status status = CheckAlike(name, statements.front(), statement);
    if (!status.ok()) return status;
    is_held = is_held || statement.is_held;
    for (const ShardPiece& piece : statement.geometry->pieces) {
      if (!std::ranges::binary_search(*statement.ranks, piece.rank)) continue;
      (statement.is_held ? held : needed).push_back(piece);
    }
  }
  result.shape = statements.front().geometry->shape;
  result.dtype = statements.front().geometry->dtype;
  if (!is_held && !rules.needed) return result;
  absl::StatusOr<std::vector<OwnedBox>> shards =
      DistinctBoxes(name, result.shape, held, rules.whole && is_held);
  if (!shards.ok()) return WithAbsent(shards.status(), statements);
  std::erase_if(needed, [](const ShardPiece& piece) { return piece.box.num_elements() == 0; });
  std::ranges::stable_sort(needed, {}, &ShardPiece::rank);
  const BoxIndex index(*shards);
  for (const ShardPiece& piece : needed) {
    if (result.items.empty() || result.items.back().receiver != piece.rank) ++result.num_receivers;
    Index found = 0;
    index.ForEachMeeting(piece.box, [&](std::int32_t position, Box common) {
      const Index elements = common.num_elements();
      found += elements;
      result.items.push_back({.receiver = piece.rank,
                              .box = std::move(common),
                              .nbytes = elements * result.dtype.itemsize,
                              .senders = (*shards)[static_cast<std::size_t>(position)].ranks});
    });
    if (found == piece.box.num_elements()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", piece.rank, " needs ", ToString(piece.box), " of `", name, "` and no rank holds ",
        ToString(FirstGap(piece.box, *shards)), AbsentText(statements)));
  }
  return result;
}

std::vector<Box> SplitBox(const Box& box, Index itemsize, Index max_nbytes) {
  std::vector<Box> boxes;
  Index row = itemsize;  // of one coordinate in dimension d
  for (const Interval& interval : box.intervals()) row *= interval.extent();
  if (row <= max_nbytes) return {box};
  for (int d = 0; d < box.rank(); ++d) {
    const Interval all = box[d];
    row /= all.extent();
    if (all.extent() == 1) continue;
    const Index step = std::max<Index>(max_nbytes / row, 1);
    for (Index start = all.start; start < all.stop; start += step) {
      const Interval cut{start, std::min(start + step, all.stop)};
      const Box part = WithInterval(box, static_cast<std::size_t>(d), cut);
      std::vector<Box> smaller = SplitBox(part, itemsize, max_nbytes);
      std::ranges::move(smaller, std::back_inserter(boxes));
    }
    return boxes;
  }
  return {box};
}

std::vector<Box> Stripes(const Box& box, Index count) {
  for (int d = 0; d < box.rank(); ++d) {
    const Interval all = box[d];
    if (all.extent() < 2) continue;
    count = std::min(count, all.extent());
    std::vector<Box> boxes;
    for (Index i = 0; i < count; ++i) {
      const Interval cut{all.start + all.extent() * i / count,
                         all.start + all.extent() * (i + 1) / count};
      boxes.push_back(WithInterval(box, static_cast<std::size_t>(d), cut));
    }
    return boxes;
  }
  return {box};
}

}  // namespace loadplan
