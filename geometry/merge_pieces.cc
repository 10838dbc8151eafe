// MergePieces of geometry/compose.h.
//
// Pieces are joined in three ways until none applies:
//  - one continues another along a dimension they have in common (or byte after
//    byte): the dimension grows;
//  - one is a further index of a dimension of another (the last row of a matrix);
//  - pieces of one form stand at equal distances: they become a new dimension.
#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "geometry/compose.h"

namespace loadplan {
namespace {

// Fewer pieces at equal distances stay apart: a pair of row blocks is easier to
// execute, and to send, than one map that steps over rows.
constexpr size_t kMinProgression = 4;

// The form of a map: what pieces must have in common to be joined. The extent of
// dimension `open` is left out (-1: none is; rank: the itemsize is).
struct Form {
  DimVector values;

  friend bool operator==(const Form&, const Form&) = default;
  friend bool operator<(const Form& a, const Form& b) { return a.values < b.values; }
  template <typename H>
  friend H AbslHashValue(H h, const Form& form) {
    return H::combine(std::move(h), form.values);
  }
};

Form FormOf(const StridedMap& map, int open) {
  Form form;
  const int rank = static_cast<int>(map.shape().size());
  form.values.push_back(map.is_cast() ? 1 : 0);
  form.values.push_back(open == rank ? 0 : map.to().itemsize);
  form.values.push_back(open == rank ? 0 : map.from().itemsize);
  for (int d = 0; d < rank; ++d) {
    const auto i = static_cast<size_t>(d);
    form.values.push_back(d == open ? 0 : map.shape()[i]);
    form.values.push_back(map.to().byte_strides[i]);
    form.values.push_back(map.from().byte_strides[i]);
  }
  return form;
}

bool StartsBefore(const StridedMap& a, const StridedMap& b) {
  return std::tie(a.to().byte_offset, a.from().byte_offset) <
         std::tie(b.to().byte_offset, b.from().byte_offset);
}

// Bytes by which the end of dimension `open` lies behind its start, on one side.
Index Reach(const StridedMap& map, const MapSide& side, int open) {
  if (open == static_cast<int>(map.shape().size())) return side.itemsize;
  const auto i = static_cast<size_t>(open);
  return map.shape()[i] * side.byte_strides[i];
}

StridedMap Grow(const StridedMap& map, int open, const StridedMap& by) {
  DimVector shape = map.shape();
  MapSide to = map.to();
  MapSide from = map.from();
  if (open == static_cast<int>(shape.size())) {
    to.itemsize += by.to().itemsize;
    from.itemsize += by.from().itemsize;
  } else {
    shape[static_cast<size_t>(open)] += by.shape()[static_cast<size_t>(open)];
  }
  return StridedMap::Unchecked(std::move(shape), std::move(to), std::move(from), map.is_cast());
}

// A form and where its pieces start.
struct Key {
  Form form;
  Index to;
  Index from;
  friend bool operator==(const Key&, const Key&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const Key& key) {
    return H::combine(std::move(h), key.form, key.to, key.from);
  }
};

// Joins pieces that continue one another along dimension `open` of pieces that have
// that many. Returns whether any did. Pieces are sorted before and after.
bool JoinAlong(int open, std::vector<StridedMap>& pieces) {
  // Where a piece would have to start to continue the one that ends there.
  absl::flat_hash_map<Key, size_t> ends;
  ends.reserve(pieces.size());
  std::vector<StridedMap> joined;
  joined.reserve(pieces.size());
  for (StridedMap& piece : pieces) {
    const int rank = static_cast<int>(piece.shape().size());
    if (open > rank || (open == rank && piece.is_cast())) {
      joined.push_back(std::move(piece));
      continue;
    }
    Key key{FormOf(piece, open), piece.to().byte_offset, piece.from().byte_offset};
    size_t index = joined.size();
    if (const auto found = ends.find(key); found != ends.end()) {
      index = found->second;
      ends.erase(found);
      joined[index] = Grow(joined[index], open, piece);
    } else {
      joined.push_back(std::move(piece));
    }
    const StridedMap& whole = joined[index];
    key.to = whole.to().byte_offset + Reach(whole, whole.to(), open);
    key.from = whole.from().byte_offset + Reach(whole, whole.from(), open);
    ends.insert_or_assign(std::move(key), index);
  }
  const bool changed = joined.size() < pieces.size();
  pieces = std::move(joined);
  if (changed) {
    for (StridedMap& piece : pieces) piece = Coalesce(piece);
    std::sort(pieces.begin(), pieces.end(), StartsBefore);
  }
  return changed;
}

// `map` at one index of dimension `dim`.
StridedMap SliceOf(const StridedMap& map, size_t dim) {
  DimVector shape = map.shape();
  shape[dim] = 1;
  return Coalesce(StridedMap::Unchecked(std::move(shape), map.to(), map.from(), map.is_cast()));
}

// `map` with `before` and `after` further indices of dimension `dim`.
StridedMap Widen(const StridedMap& map, size_t dim, Index before, Index after) {
  DimVector shape = map.shape();
  shape[dim] += before + after;
  MapSide to = map.to();
  MapSide from = map.from();
  to.byte_offset -= before * to.byte_strides[dim];
  from.byte_offset -= before * from.byte_strides[dim];
  return StridedMap::Unchecked(std::move(shape), std::move(to), std::move(from), map.is_cast());
}

// Joins pieces that are further indices of a dimension of another piece. Returns
// whether any was. Pieces are sorted before and after.
bool AbsorbSlices(std::vector<StridedMap>& pieces) {
  const auto rank = [](const StridedMap& piece) { return piece.shape().size(); };
  // A slice has fewer dimensions than what it is a slice of.
  const bool mixed = std::any_of(pieces.begin(), pieces.end(), [&](const StridedMap& piece) {
    return rank(piece) != rank(pieces.front());
  });
  if (!mixed) return false;
  absl::flat_hash_map<Key, size_t> index_of;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const StridedMap& piece = pieces[i];
    index_of[{FormOf(piece, -1), piece.to().byte_offset, piece.from().byte_offset}] = i;
  }
  std::vector<bool> gone(pieces.size(), false);
  std::vector<bool> grown(pieces.size(), false);  // no longer what `index_of` says
  // Takes the piece that starts there out, if there is one.
  const auto take = [&](const Form& form, Index to, Index from) {
    const auto found = index_of.find(Key{form, to, from});
    if (found == index_of.end() || gone[found->second] || grown[found->second]) return false;
    gone[found->second] = true;
    return true;
  };
  bool changed = false;
  for (size_t i = 0; i < pieces.size(); ++i) {
    for (size_t d = 0; d < rank(pieces[i]) && !gone[i]; ++d) {
      const StridedMap& piece = pieces[i];
      const Form form = FormOf(SliceOf(piece, d), -1);
      const Index to_stride = piece.to().byte_strides[d];
      const Index from_stride = piece.from().byte_strides[d];
      const auto take_at = [&](Index index) {
        return take(form, piece.to().byte_offset + index * to_stride,
                    piece.from().byte_offset + index * from_stride);
      };
      Index before = 0;
      Index after = 0;
      while (take_at(-before - 1)) ++before;
      while (take_at(piece.shape()[d] + after)) ++after;
      if (before + after == 0) continue;
      pieces[i] = Widen(piece, d, before, after);
      grown[i] = true;
      changed = true;
    }
  }
  if (!changed) return false;
  std::vector<StridedMap> kept;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (!gone[i]) kept.push_back(Coalesce(pieces[i]));
  }
  pieces = std::move(kept);
  std::sort(pieces.begin(), pieces.end(), StartsBefore);
  return true;
}

// The pieces [first, last) as one map with a new dimension.
StridedMap Stack(const std::vector<StridedMap>& pieces, size_t first, size_t last) {
  const StridedMap& map = pieces[first];
  DimVector shape{static_cast<Index>(last - first)};
  MapSide to{map.to().byte_offset,
             {pieces[first + 1].to().byte_offset - map.to().byte_offset},
             map.to().itemsize};
  MapSide from{map.from().byte_offset,
               {pieces[first + 1].from().byte_offset - map.from().byte_offset},
               map.from().itemsize};
  shape.insert(shape.end(), map.shape().begin(), map.shape().end());
  const auto append = [](const MapSide& side, MapSide& out) {
    out.byte_strides.insert(out.byte_strides.end(), side.byte_strides.begin(),
                            side.byte_strides.end());
  };
  append(map.to(), to);
  append(map.from(), from);
  return Coalesce(
      StridedMap::Unchecked(std::move(shape), std::move(to), std::move(from), map.is_cast()));
}

bool SameDistance(const std::vector<StridedMap>& pieces, size_t i) {
  const auto distance = [&](size_t k, const MapSide& (StridedMap::*side)() const) {
    return (pieces[k].*side)().byte_offset - (pieces[k - 1].*side)().byte_offset;
  };
  return distance(i, &StridedMap::to) == distance(i - 1, &StridedMap::to) &&
         distance(i, &StridedMap::from) == distance(i - 1, &StridedMap::from);
}

// Turns progressions of pieces of one form into dimensions. Returns whether any was.
bool StackProgressions(std::vector<StridedMap>& pieces) {
  if (pieces.size() < kMinProgression) return false;
  std::vector<std::pair<Form, StridedMap>> formed;
  formed.reserve(pieces.size());
  for (StridedMap& piece : pieces) {
    Form form = FormOf(piece, /*open=*/-1);
    formed.emplace_back(std::move(form), std::move(piece));
  }
  std::stable_sort(formed.begin(), formed.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<StridedMap> sorted;
  std::vector<size_t> group_of;
  for (size_t i = 0; i < formed.size(); ++i) {
    const bool same = i > 0 && formed[i].first == formed[i - 1].first;
    group_of.push_back(same ? group_of.back() : i);
    sorted.push_back(std::move(formed[i].second));
  }
  std::vector<StridedMap> stacked;
  for (size_t i = 0; i < sorted.size();) {
    size_t last = std::min(i + 2, sorted.size());
    while (last < sorted.size() && group_of[last] == group_of[i] && SameDistance(sorted, last)) {
      ++last;
    }
    if (last - i >= kMinProgression && group_of[i + 1] == group_of[i]) {
      stacked.push_back(Stack(sorted, i, last));
      i = last;
    } else {
      stacked.push_back(std::move(sorted[i++]));
    }
  }
  const bool changed = stacked.size() < sorted.size();
  pieces = std::move(stacked);
  std::sort(pieces.begin(), pieces.end(), StartsBefore);
  return changed;
}

}  // namespace

std::vector<StridedMap> MergePieces(std::vector<StridedMap> pieces) {
  std::erase_if(pieces, [](const StridedMap& piece) { return piece.empty(); });
  for (StridedMap& piece : pieces) piece = Coalesce(piece);
  if (pieces.size() < 2) return pieces;
  std::sort(pieces.begin(), pieces.end(), StartsBefore);
  bool changed = true;
  while (changed && pieces.size() > 1) {
    changed = false;
    size_t max_rank = 0;
    for (const StridedMap& piece : pieces) max_rank = std::max(max_rank, piece.shape().size());
    for (int open = static_cast<int>(max_rank); open >= 0 && pieces.size() > 1; --open) {
      changed |= JoinAlong(open, pieces);
    }
    changed |= AbsorbSlices(pieces);
    changed |= StackProgressions(pieces);
  }
  return pieces;
}

}  // namespace loadplan
