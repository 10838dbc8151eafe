#include "geometry/compose.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "geometry/divide.h"
#include "geometry/grid.h"
#include "geometry/unique_grids.h"

namespace loadplan {
namespace {

using geometry_internal::CommonPart;
using geometry_internal::Divide;
using geometry_internal::FoldDims;
using geometry_internal::Grid;
using geometry_internal::GridDims;
using geometry_internal::GridOf;
using geometry_internal::MapOf;
using geometry_internal::Side;
using geometry_internal::UniqueGrids;

absl::Status Ignore(const CommonPart&) { return absl::OkStatus(); }

std::vector<StridedMap> MergedMaps(const std::vector<Grid>& grids, Side side,
                                   const GridDims& repeats) {
  std::vector<StridedMap> maps;
  maps.reserve(grids.size());
  for (const Grid& grid : grids) maps.push_back(MapOf(grid, side, repeats));
  return MergePieces(std::move(maps));
}

std::vector<StridedLayout> MergedLayouts(const std::vector<Grid>& grids) {
  std::vector<StridedLayout> layouts;
  for (const StridedMap& map : MergedMaps(grids, Side::kTo, {})) layouts.push_back(map.ToLayout());
  return layouts;
}

// Divides the bytes of `layout` by those of `region`.
absl::Status DivideLayouts(const StridedLayout& layout, const StridedLayout& region,
                           Index max_pieces, std::vector<Grid>* common, std::vector<Grid>* rest) {
  if (layout.empty()) return absl::OkStatus();
  absl::StatusOr<std::vector<Grid>> unique = UniqueGrids(layout, max_pieces);
  if (!unique.ok()) return unique.status();
  if (region.empty()) {
    *rest = *std::move(unique);
    return absl::OkStatus();
  }
  Index pieces_left = max_pieces;
  Grid region_grid = GridOf(region);
  FoldDims(&region_grid.dims);
  const auto on_common = [&](const CommonPart& part) {
    common->push_back(part.OnA());
    return absl::OkStatus();
  };
  for (const Grid& grid : *unique) {
    if (absl::Status s = Divide(grid, region_grid, &pieces_left, on_common, rest); !s.ok()) {
      return s;
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Composition> Compose(const StridedMap& outer, const StridedMap& inner,
                                    Index max_pieces) {
  Composition result;
  if (outer.empty()) return result;
  if (inner.empty()) {
    result.rest.push_back(Coalesce(outer));
    return result;
  }
  GridDims repeats;
  const Grid a = GridOf(outer, Side::kFrom, &repeats);
  const Grid b = GridOf(inner, Side::kTo, nullptr);
  std::vector<Grid> rest;
  Index pieces_left = max_pieces;
  const auto on_common = [&](const CommonPart& part) {
    absl::StatusOr<StridedMap> map = part.Join(repeats);
    if (map.ok()) result.matched.push_back(*std::move(map));
    return map.status();
  };
  if (absl::Status s = Divide(a, b, &pieces_left, on_common, &rest); !s.ok()) return s;
  result.matched = MergePieces(std::move(result.matched));
  result.rest = MergedMaps(rest, Side::kFrom, repeats);
  return result;
}

absl::StatusOr<std::vector<StridedMap>> SubtractTo(const StridedMap& map,
                                                   const StridedLayout& region, Index max_pieces) {
  if (map.empty()) return std::vector<StridedMap>{};
  if (region.empty()) return std::vector<StridedMap>{Coalesce(map)};
  GridDims repeats;
  const Grid a = GridOf(map, Side::kTo, &repeats);
  std::vector<Grid> rest;
  Index pieces_left = max_pieces;
  Grid b = GridOf(region);
  FoldDims(&b.dims);
  if (absl::Status s = Divide(a, b, &pieces_left, Ignore, &rest); !s.ok()) return s;
  return MergedMaps(rest, Side::kTo, repeats);
}

absl::StatusOr<std::vector<StridedLayout>> Intersect(const StridedLayout& layout,
                                                     const StridedLayout& region,
                                                     Index max_pieces) {
  std::vector<Grid> common;
  std::vector<Grid> rest;
  if (absl::Status s = DivideLayouts(layout, region, max_pieces, &common, &rest); !s.ok()) return s;
  return MergedLayouts(common);
}

absl::StatusOr<std::vector<StridedLayout>> Subtract(const StridedLayout& layout,
                                                    const StridedLayout& region, Index max_pieces) {
  std::vector<Grid> common;
  std::vector<Grid> rest;
  if (absl::Status s = DivideLayouts(layout, region, max_pieces, &common, &rest); !s.ok()) return s;
  return MergedLayouts(rest);
}

}  // namespace loadplan
