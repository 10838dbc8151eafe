#include "geometry/strided_map.h"

#include <algorithm>
#include <ostream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace loadplan {
namespace {

struct MapDim {
  Index extent;
  Index to;
  Index from;
};
using MapDims = absl::InlinedVector<MapDim, 6>;

// Span of one side of a map; strides may be negative.
ByteRange SpanOf(const DimVector& shape, const MapSide& side) {
  ByteRange span{side.byte_offset, side.byte_offset + side.itemsize};
  for (size_t d = 0; d < shape.size(); ++d) {
    const Index reach = (shape[d] - 1) * side.byte_strides[d];
    (reach < 0 ? span.start : span.stop) += reach;
  }
  return span;
}

bool Continues(const MapDim& inner, const MapDim& outer) {
  return CheckedMultiply(inner.extent, inner.to) == outer.to &&
         CheckedMultiply(inner.extent, inner.from) == outer.from;
}

// Dimensions of more than one item with `to` ascending and positive.
MapDims SortedDims(const StridedMap& map, Index* to_offset, Index* from_offset) {
  MapDims dims;
  for (size_t d = map.shape().size(); d-- > 0;) {
    MapDim dim{map.shape()[d], map.to().byte_strides[d], map.from().byte_strides[d]};
    if (dim.extent == 1) continue;
    if (dim.to < 0) {
      *to_offset += (dim.extent - 1) * dim.to;
      *from_offset += (dim.extent - 1) * dim.from;
      dim.to = -dim.to;
      dim.from = -dim.from;
    }
    dims.push_back(dim);
  }
  // Insertion sort: ranks are small and most maps are in order already.
  for (size_t i = 1; i < dims.size(); ++i) {
    for (size_t k = i; k > 0 && dims[k].to < dims[k - 1].to; --k) std::swap(dims[k], dims[k - 1]);
  }
  return dims;
}

}  // namespace

absl::StatusOr<StridedMap> StridedMap::Create(const StridedLayout& to, const StridedLayout& from,
                                              bool is_cast) {
  if (to.shape() != from.shape()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("`to` has shape (%s) and `from` (%s); they must be equal",
                        absl::StrJoin(to.shape(), ", "), absl::StrJoin(from.shape(), ", ")));
  }
  if (!is_cast && to.itemsize() != from.itemsize()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("`to` has items of %d bytes and `from` of %d; only a cast may differ",
                        to.itemsize(), from.itemsize()));
  }
  for (size_t d = 0; d < to.shape().size(); ++d) {
    if (to.shape()[d] > 1 && to.byte_strides()[d] == 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "`to` has stride 0 in dimension %d of extent %d; a byte would be written twice", d,
          to.shape()[d]));
    }
  }
  return Unchecked(to.shape(), {to.byte_offset(), to.byte_strides(), to.itemsize()},
                   {from.byte_offset(), from.byte_strides(), from.itemsize()}, is_cast);
}

StridedMap StridedMap::Unchecked(DimVector shape, MapSide to, MapSide from, bool is_cast) {
  StridedMap map;
  map.shape_ = std::move(shape);
  map.to_ = std::move(to);
  map.from_ = std::move(from);
  map.is_cast_ = is_cast;
  return map;
}

StridedMap StridedMap::Identity(const StridedLayout& layout) {
  const MapSide side{layout.byte_offset(), layout.byte_strides(), layout.itemsize()};
  return Unchecked(layout.shape(), side, side, /*is_cast=*/false);
}

bool StridedMap::empty() const {
  return std::find(shape_.begin(), shape_.end(), 0) != shape_.end();
}

Index StridedMap::num_elements() const {
  // Zero first: the product of the others may not fit.
  if (empty()) return 0;
  Index count = 1;
  for (const Index extent : shape_) count *= extent;
  return count;
}

StridedLayout StridedMap::ToLayout() const {
  return StridedLayout::Unchecked(to_.byte_offset, shape_, to_.byte_strides, to_.itemsize);
}

ByteRange StridedMap::ToSpan() const { return empty() ? ByteRange{} : SpanOf(shape_, to_); }
ByteRange StridedMap::FromSpan() const { return empty() ? ByteRange{} : SpanOf(shape_, from_); }

StridedMap Coalesce(const StridedMap& map) {
  if (map.empty()) {
    return StridedMap::Unchecked({0}, {0, {1}, 1}, {0, {1}, 1}, /*is_cast=*/false);
  }
  MapSide to{map.to().byte_offset, {}, map.to().itemsize};
  MapSide from{map.from().byte_offset, {}, map.from().itemsize};
  const MapDims sorted = SortedDims(map, &to.byte_offset, &from.byte_offset);
  MapDims dims;
  for (const MapDim& dim : sorted) {
    if (dims.empty() && !map.is_cast() && dim.to == to.itemsize && dim.from == from.itemsize) {
      to.itemsize *= dim.extent;
      from.itemsize *= dim.extent;
    } else if (!dims.empty() && Continues(dims.back(), dim)) {
      dims.back().extent *= dim.extent;
    } else {
      dims.push_back(dim);
    }
  }
  DimVector shape;
  for (size_t d = dims.size(); d-- > 0;) {
    shape.push_back(dims[d].extent);
    to.byte_strides.push_back(dims[d].to);
    from.byte_strides.push_back(dims[d].from);
  }
  return StridedMap::Unchecked(std::move(shape), std::move(to), std::move(from), map.is_cast());
}

StridedMap Invert(const StridedMap& map) {
  return Coalesce(StridedMap::Unchecked(map.shape(), map.from(), map.to(), map.is_cast()));
}

void ForEachRun(const StridedMap& map, const std::function<void(Index, Index, Index)>& f) {
  const StridedMap runs = Coalesce(map);
  if (runs.empty()) return;
  const size_t rank = runs.shape().size();
  DimVector coordinate(rank, 0);
  Index to = runs.to().byte_offset;
  Index from = runs.from().byte_offset;
  while (true) {
    f(to, from, runs.to().itemsize);
    size_t d = rank;
    while (d > 0 && ++coordinate[d - 1] == runs.shape()[d - 1]) {
      --d;
      coordinate[d] = 0;
      to -= (runs.shape()[d] - 1) * runs.to().byte_strides[d];
      from -= (runs.shape()[d] - 1) * runs.from().byte_strides[d];
    }
    if (d == 0) return;
    to += runs.to().byte_strides[d - 1];
    from += runs.from().byte_strides[d - 1];
  }
}

std::string ToString(const StridedMap& map) {
  const auto side = [&](const MapSide& s) {
    return absl::StrCat(s.byte_offset, " + (", absl::StrJoin(map.shape(), ", "), "):(",
                        absl::StrJoin(s.byte_strides, ", "), ") x ", s.itemsize);
  };
  return absl::StrCat(side(map.to()), map.is_cast() ? " <-cast- " : " <- ", side(map.from()));
}

std::ostream& operator<<(std::ostream& stream, const StridedMap& map) {
  return stream << ToString(map);
}

}  // namespace loadplan
