#include "geometry/unique_grids.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "geometry/divide.h"

namespace loadplan::geometry_internal {
namespace {

absl::Status Ignore(const CommonPart&) { return absl::OkStatus(); }

// Appends grids that hold each byte of `grid` once.
absl::Status AppendUnique(Grid grid, Index* pieces_left, std::vector<Grid>* unique) {
  FoldDims(&grid.dims);
  for (GridDim& dim : grid.dims) dim.other = dim.stride;
  if (IsUnique(MapOf(grid, Side::kTo, {}).ToLayout())) {
    unique->push_back(std::move(grid));
    return absl::OkStatus();
  }
  const auto shortest =
      std::min_element(grid.dims.begin(), grid.dims.end(),
                       [](const auto& a, const auto& b) { return a.extent < b.extent; });
  const Index extent = shortest->extent;
  *pieces_left -= std::min(extent, *pieces_left + 1);
  if (*pieces_left < 0) {
    return absl::ResourceExhaustedError(
        "more pieces than `max_pieces` are needed: a layout repeats bytes irregularly");
  }
  const auto dim = static_cast<size_t>(shortest - grid.dims.begin());
  std::vector<Grid> before;  // what earlier indices hold and later ones may repeat
  for (Index i = 0; i < extent; ++i) {
    std::vector<Grid> fresh;
    if (absl::Status s = AppendUnique(Select(grid, dim, i), pieces_left, &fresh); !s.ok()) return s;
    const Index start = grid.offset + i * grid.dims[dim].stride;
    std::erase_if(before, [&](const Grid& g) { return g.Span().stop <= start; });
    std::vector<Grid> left;
    for (const Grid& g : before) {
      left.clear();
      for (const Grid& part : fresh) {
        if (absl::Status s = Divide(part, g, pieces_left, Ignore, &left); !s.ok()) return s;
      }
      std::swap(fresh, left);
    }
    before.insert(before.end(), fresh.begin(), fresh.end());
    unique->insert(unique->end(), fresh.begin(), fresh.end());
  }
  return absl::OkStatus();
}

}  // namespace

void FoldDims(GridDims* dims_ptr) {
  GridDims& dims = *dims_ptr;
  for (size_t outer = dims.size(); outer-- > 1;) {
    for (size_t inner = 0; inner < outer; ++inner) {
      const Index steps = dims[outer].stride / dims[inner].stride;
      if (dims[outer].stride % dims[inner].stride != 0 || steps > dims[inner].extent) continue;
      dims[inner].extent += (dims[outer].extent - 1) * steps;
      dims.erase(dims.begin() + static_cast<std::ptrdiff_t>(outer));
      // What was folded into may now hold others.
      outer = dims.size();
      break;
    }
  }
}

absl::StatusOr<std::vector<Grid>> UniqueGrids(const StridedLayout& layout, Index max_pieces) {
  std::vector<Grid> unique;
  if (layout.empty()) return unique;
  if (absl::Status s = AppendUnique(GridOf(layout), &max_pieces, &unique); !s.ok()) return s;
  return unique;
}

}  // namespace loadplan::geometry_internal
