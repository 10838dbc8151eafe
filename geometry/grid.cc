#include "geometry/grid.h"

#include <algorithm>
#include <utility>

namespace loadplan::geometry_internal {
namespace {

// Strides ascend afterwards. Insertion sort: ranks are small and maps mostly sorted.
void SortByStride(GridDims& dims) {
  for (size_t i = 1; i < dims.size(); ++i) {
    for (size_t k = i; k > 0 && dims[k].stride < dims[k - 1].stride; --k) {
      std::swap(dims[k], dims[k - 1]);
    }
  }
}

// Joins neighbours that continue one another on both sides, from `first` on.
void MergeDims(GridDims& dims, size_t first) {
  size_t kept = first;
  for (size_t d = first; d < dims.size(); ++d) {
    const GridDim dim = dims[d];
    if (kept > first) {
      GridDim& inner = dims[kept - 1];
      if (CheckedMultiply(inner.extent, inner.stride) == dim.stride &&
          CheckedMultiply(inner.extent, inner.other) == dim.other) {
        inner.extent *= dim.extent;
        continue;
      }
    }
    dims[kept++] = dim;
  }
  dims.resize(kept);
}

// Turns dimensions that run downwards on T round.
void Flip(Grid& grid, GridDim& dim) {
  grid.offset += (dim.extent - 1) * dim.stride;
  grid.other_offset += (dim.extent - 1) * dim.other;
  dim.stride = -dim.stride;
  dim.other = -dim.other;
}

}  // namespace

ByteRange Grid::Span() const {
  Index stop = offset + 1;
  for (const GridDim& dim : dims) stop += (dim.extent - 1) * dim.stride;
  return {offset, stop};
}

Grid GridOf(const StridedMap& map, Side side, GridDims* repeats) {
  const MapSide& here = side == Side::kTo ? map.to() : map.from();
  const MapSide& there = side == Side::kTo ? map.from() : map.to();
  Grid grid;
  grid.offset = here.byte_offset;
  grid.other_offset = there.byte_offset;
  if (map.is_cast()) {
    grid.atom = here.itemsize;
    grid.other_atom = there.itemsize;
  }
  if (here.itemsize > 1) grid.dims.push_back({here.itemsize, 1, map.is_cast() ? 0 : 1});
  for (size_t d = map.shape().size(); d-- > 0;) {
    GridDim dim{map.shape()[d], here.byte_strides[d], there.byte_strides[d]};
    if (dim.extent == 1) continue;
    if (dim.stride == 0) {
      if (repeats != nullptr) repeats->push_back(dim);
      continue;
    }
    if (dim.stride < 0) Flip(grid, dim);
    grid.dims.push_back(dim);
  }
  SortByStride(grid.dims);
  // A cast of one-byte items has no dimension of its own to keep apart.
  if (grid.HasAtomDim()) {
    const auto item = std::find(grid.dims.begin(), grid.dims.end(), GridDim{grid.atom, 1, 0});
    std::rotate(grid.dims.begin(), item, item + 1);
  }
  MergeDims(grid.dims, grid.HasAtomDim() ? 1 : 0);
  return grid;
}

Grid GridOf(const StridedLayout& layout) {
  Grid grid;
  grid.offset = layout.byte_offset();
  grid.other_offset = layout.byte_offset();
  if (layout.itemsize() > 1) grid.dims.push_back({layout.itemsize(), 1, 1});
  for (size_t d = layout.shape().size(); d-- > 0;) {
    const Index stride = layout.byte_strides()[d];
    if (layout.shape()[d] == 1 || stride == 0) continue;
    grid.dims.push_back({layout.shape()[d], stride, stride});
  }
  SortByStride(grid.dims);
  MergeDims(grid.dims, 0);
  return grid;
}

StridedMap MapOf(const Grid& grid, Side side, const GridDims& repeats) {
  DimVector shape;
  MapSide here{grid.offset, {}, std::max<Index>(grid.atom, 1)};
  MapSide there{grid.other_offset, {}, std::max<Index>(grid.other_atom, 1)};
  const auto append = [&](const GridDim& dim) {
    shape.push_back(dim.extent);
    here.byte_strides.push_back(dim.stride);
    there.byte_strides.push_back(dim.other);
  };
  for (const GridDim& dim : repeats) append(dim);
  for (size_t d = grid.dims.size(); d-- > (grid.HasAtomDim() ? 1u : 0u);) append(grid.dims[d]);
  if (side == Side::kFrom) std::swap(here, there);
  return Coalesce(
      StridedMap::Unchecked(std::move(shape), std::move(here), std::move(there), grid.atom != 0));
}

bool ClipToSpan(ByteRange range, Grid* grid, std::vector<Grid>* outside, bool* vanished) {
  *vanished = false;
  bool changed = false;
  const auto keep_aside = [&](size_t d, Index start, Index stop) {
    changed = true;
    if (outside == nullptr) return;
    Grid part = Select(*grid, d, start);
    if (stop - start > 1) {
      GridDim dim = grid->dims[d];
      dim.extent = stop - start;
      part.dims.insert(part.dims.begin() + static_cast<std::ptrdiff_t>(d), dim);
    }
    outside->push_back(std::move(part));
  };
  for (size_t d = grid->dims.size(); d-- > (grid->HasAtomDim() ? 1u : 0u);) {
    GridDim& dim = grid->dims[d];
    const ByteRange span = grid->Span();
    const Index block = span.nbytes() - (dim.extent - 1) * dim.stride;  // bytes of one index
    // First index whose block ends after range.start; first that starts at its stop.
    const Index behind = range.start - grid->offset - block;
    const Index ahead = range.stop - grid->offset;
    const Index first = behind < 0 ? 0 : std::min(behind / dim.stride + 1, dim.extent);
    const Index last = ahead <= 0 ? 0 : std::min((ahead - 1) / dim.stride + 1, dim.extent);
    if (first >= last) {
      keep_aside(d, 0, dim.extent);
      *vanished = true;
      return true;
    }
    if (first > 0) keep_aside(d, 0, first);
    if (last < dim.extent) keep_aside(d, last, dim.extent);
    grid->offset += first * dim.stride;
    grid->other_offset += first * dim.other;
    dim.extent = last - first;
    if (dim.extent == 1) grid->dims.erase(grid->dims.begin() + static_cast<std::ptrdiff_t>(d));
  }
  return changed;
}

Grid Select(const Grid& grid, size_t dim, Index index) {
  Grid part = grid;
  part.offset += index * grid.dims[dim].stride;
  part.other_offset += index * grid.dims[dim].other;
  part.dims.erase(part.dims.begin() + static_cast<std::ptrdiff_t>(dim));
  return part;
}

}  // namespace loadplan::geometry_internal
