// Grid: one side of a strided map in the form that the algebra of
// `geometry/compose` works on; internal to `geometry/`.
//
// A grid is a set of bytes of a storage T, each with a byte of another storage O:
//
//   (offset + sum c[d] * stride[d],  other_offset + sum c[d] * other[d])
//
// Everything is in bytes: the itemsize is the dimension `{itemsize, 1, 1}`. Strides
// on T are positive and ascend; flips have been turned round (so that `other` may be
// negative), extents of 1 are gone, and dimensions that continue one another on
// both sides are one.
//
// The items of a cast are atoms: `atom` bytes on T pair with `other_atom` bytes on O
// as a whole, and the item's own dimension is `{atom, 1, 0}`. Both are 0 where bytes
// may be cut.
#ifndef LOADPLAN_GEOMETRY_GRID_H_
#define LOADPLAN_GEOMETRY_GRID_H_

#include <vector>

#include "absl/container/inlined_vector.h"
#include "geometry/index.h"
#include "geometry/strided_layout.h"
#include "geometry/strided_map.h"

namespace loadplan::geometry_internal {

struct GridDim {
  Index extent = 1;
  Index stride = 0;
  Index other = 0;

  friend bool operator==(const GridDim&, const GridDim&) = default;
};
using GridDims = absl::InlinedVector<GridDim, 6>;

struct Grid {
  Index offset = 0;
  Index other_offset = 0;
  GridDims dims;
  Index atom = 0;
  Index other_atom = 0;

  // Whether dims[0] is the item of a cast, which nothing may take apart.
  bool HasAtomDim() const { return atom > 1; }
  // The smallest range on T that holds every byte.
  ByteRange Span() const;

  friend bool operator==(const Grid&, const Grid&) = default;
};

// Which side of a map is T.
enum class Side { kTo, kFrom };

// The pairs of a map that is not empty, seen from `side`. Dimensions of stride 0 on
// that side go to `repeats` (those with two or more items): each pair of the grid
// stands for all of them.
Grid GridOf(const StridedMap& map, Side side, GridDims* repeats);

// The bytes of a layout that is not empty, each paired with itself. Order and
// repeats are lost.
Grid GridOf(const StridedLayout& layout);

// The map of a grid and its repeats; coalesced. Inverse of GridOf.
StridedMap MapOf(const Grid& grid, Side side, const GridDims& repeats);

// What is left of `grid` inside items that meet `range`; the parts that do not
// meet it are appended to `outside` where that is not null. Only whole indices of
// dimensions are taken away, so that what stays may still reach out of the range.
// Returns whether anything was taken away; `*vanished` says whether all was.
bool ClipToSpan(ByteRange range, Grid* grid, std::vector<Grid>* outside, bool* vanished);

// The part of `grid` at index `index` of dimension `dim`.
Grid Select(const Grid& grid, size_t dim, Index index);

}  // namespace loadplan::geometry_internal

#endif  // LOADPLAN_GEOMETRY_GRID_H_
