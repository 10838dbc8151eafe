#include "plan/plan_file_geometry.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace loadplan {
namespace {

// Where the items of a side lie, relative to its offset.
std::optional<ByteRange> RelativeSpan(const DimVector& shape, const MapSide& side) {
  ByteRange span{0, side.itemsize};
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] == 0) return ByteRange{};
    const std::optional<Index> last = CheckedMultiply(shape[d] - 1, side.byte_strides[d]);
    if (!last.has_value()) return std::nullopt;
    const std::optional<Index> moved = CheckedAdd(*last < 0 ? span.start : span.stop, *last);
    if (!moved.has_value()) return std::nullopt;
    (*last < 0 ? span.start : span.stop) = *moved;
  }
  return span;
}

bool Lies(const ByteRange& span, Index offset, Index limit) {
  const std::optional<Index> start = CheckedAdd(span.start, offset);
  const std::optional<Index> stop = CheckedAdd(span.stop, offset);
  return start.has_value() && stop.has_value() && *start >= 0 && *stop <= limit;
}

}  // namespace

std::optional<Index> NbytesOf(const DimVector& shape, Index itemsize) {
  std::optional<Index> nbytes = itemsize;
  for (const Index extent : shape) {
    nbytes = CheckedMultiply(*nbytes, std::max(extent, Index{1}));
    if (!nbytes.has_value()) return std::nullopt;
  }
  return std::ranges::count(shape, 0) > 0 ? 0 : nbytes;
}

DimVector ReadShape(ByteReader& in) {
  const Index rank = in.Bounded(kMaxSavedRank, "a number of dimensions");
  DimVector shape(static_cast<std::size_t>(rank));
  for (Index& extent : shape) {
    extent = in.Signed();
    if (extent < 0) in.Fail(absl::StrCat("an extent is ", extent));
  }
  return shape;
}

absl::StatusOr<StridedLayout> ReadLayout(ByteReader& in) {
  const Index offset = in.Signed();
  DimVector shape = ReadShape(in);
  DimVector strides(shape.size());
  for (Index& stride : strides) stride = in.Signed();
  const Index itemsize = in.Signed();
  if (!in.ok()) return in.status();
  if (!NbytesOf(shape, itemsize).has_value()) {
    return absl::InvalidArgumentError("a layout is larger than any tensor");
  }
  return StridedLayout::Create(offset, std::move(shape), std::move(strides), itemsize);
}

MapRow MapRow::Read(ByteReader& in, const std::vector<DType>& dtypes) {
  MapRow row;
  const Index rank = in.Bounded(kMaxSavedRank, "a number of dimensions");
  DimVector shape;
  MapSide to;
  MapSide from;
  for (Index d = 0; d < rank; ++d) {
    shape.push_back(in.Signed());
    to.byte_strides.push_back(in.Signed());
    from.byte_strides.push_back(in.Signed());
  }
  to.itemsize = in.Signed();
  from.itemsize = in.Signed();
  for (std::size_t left = in.Count(1); left > 0 && in.ok(); --left) {
    const std::size_t step = in.Unsigned();  // twice the dtype, and whether it is scattered
    if (step / 2 >= dtypes.size()) {
      in.Fail(absl::StrCat("dtype ", step / 2, " of ", dtypes.size()));
      return row;
    }
    row.casts_.emplace_back(dtypes[step / 2], step % 2 == 1);
  }
  row.map_ =
      StridedMap::Unchecked(std::move(shape), std::move(to), std::move(from), !row.casts_.empty());
  if (in.ok() && !row.Check(in)) in.Fail("a row of the table is no map from bytes to bytes");
  return row;
}

bool MapRow::Check(ByteReader& in) {
  if (!in.ok()) return false;
  const DimVector& shape = map_.shape();
  const MapSide& to = map_.to();
  const MapSide& from = map_.from();
  if (to.itemsize < 1 || from.itemsize < 1) return false;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] < 0 || (shape[d] > 1 && to.byte_strides[d] <= 0)) return false;
  }
  if (casts_.empty() ? to.itemsize != from.itemsize
                     : casts_.size() < 2 || casts_.front().dtype.itemsize != from.itemsize ||
                           casts_.back().dtype.itemsize != to.itemsize) {
    return false;
  }
  if (!NbytesOf(shape, to.itemsize).has_value() || !NbytesOf(shape, from.itemsize).has_value()) {
    return false;
  }
  const std::optional<ByteRange> to_span = RelativeSpan(shape, to);
  const std::optional<ByteRange> from_span = RelativeSpan(shape, from);
  if (!to_span.has_value() || !from_span.has_value()) return false;
  to_span_ = *to_span;
  from_span_ = *from_span;
  return map_.empty() || IsUnique(map_.ToLayout());
}

std::optional<StridedMap> MapRow::At(Index to_offset, Index to_limit, Index from_offset,
                                     Index from_limit) const {
  if (!Lies(to_span_, to_offset, to_limit) || !Lies(from_span_, from_offset, from_limit)) {
    return std::nullopt;
  }
  MapSide to = map_.to();
  MapSide from = map_.from();
  to.byte_offset = to_offset;
  from.byte_offset = from_offset;
  return StridedMap::Unchecked(map_.shape(), std::move(to), std::move(from), map_.is_cast());
}

}  // namespace loadplan
