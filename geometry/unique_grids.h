// UniqueGrids: a layout as a set of bytes; internal to `geometry/`.
#ifndef LOADPLAN_GEOMETRY_UNIQUE_GRIDS_H_
#define LOADPLAN_GEOMETRY_UNIQUE_GRIDS_H_

#include <vector>

#include "absl/status/statusor.h"
#include "geometry/grid.h"
#include "geometry/strided_layout.h"

namespace loadplan::geometry_internal {

// Joins dimensions that fill one another's gaps, as a set: windows of an unfold, rows
// that overlap or follow on. `other` strides are of no use afterwards. Strides ascend
// before and after.
void FoldDims(GridDims* dims);

// Grids that hold each byte of `layout` exactly once, each byte paired with itself:
// one where nothing repeats, and for regular repeats (broadcasts, windows of an
// unfold, rows that overlap); several for an irregular as_strided. None for an
// empty layout. ResourceExhausted when more than `max_pieces` would be needed.
absl::StatusOr<std::vector<Grid>> UniqueGrids(const StridedLayout& layout, Index max_pieces);

}  // namespace loadplan::geometry_internal

#endif  // LOADPLAN_GEOMETRY_UNIQUE_GRIDS_H_
