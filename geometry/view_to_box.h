// From bytes back to boxes: the coordinates of a row-major tensor that a layout
// or a map touches. The only file where bytes become elements.
#ifndef LOADPLAN_GEOMETRY_VIEW_TO_BOX_H_
#define LOADPLAN_GEOMETRY_VIEW_TO_BOX_H_

#include <optional>
#include <vector>

#include "geometry/box.h"
#include "geometry/export.h"
#include "geometry/index.h"
#include "geometry/strided_layout.h"
#include "geometry/strided_map.h"

namespace loadplan {

// A row-major tensor without gaps at offset 0 of its storage.
struct DenseTensor {
  DimVector shape;
  Index itemsize = 1;
};

// A box of a dense tensor and where its elements lie elsewhere: the elements of
// the box in row-major order are the items of `region` in order, so that
// `as_strided(region).copy_(full[box].reshape(region.shape))` is the copy.
struct BoxRegion {
  Box box;
  StridedLayout region;

  friend bool operator==(const BoxRegion&, const BoxRegion&) = default;
};

// The boxes whose union is exactly the elements that `from` of `map` touches
// inside `base`, each with its region on the `to` side. One box for a narrow, a
// transpose or a reshape of one; several where a flat range cuts rows
// (`w.view(-1)[3:17]` of a 4x6 tensor: three).
//
// nullopt where no such list says the same as the map: an element is cut or
// reaches two places (a broadcast), a source is stepped, flipped or diagonal, or the map is a
// cast. Precondition: the map reads only inside `base`.
LOADPLAN_API std::optional<std::vector<BoxRegion>> BoxRegionsOf(const StridedMap& map,
                                                                const DenseTensor& base);

// The elements of `base` of which `layout` touches at least one byte, as disjoint
// boxes in row-major order of their origins, with as few as the digits allow: a
// stepped column view gives one box per column. More than `max_boxes`: nullopt
// (the caller then takes BoundingBox).
LOADPLAN_API std::optional<std::vector<Box>> BoxesOf(const StridedLayout& layout,
                                                     const DenseTensor& base, Index max_boxes);

// The smallest box that holds every element that `layout` touches; nullopt for an empty layout.
LOADPLAN_API std::optional<Box> BoundingBoxOf(const StridedLayout& layout, const DenseTensor& base);

// Disjoint boxes that cover the same elements as `boxes`, which may overlap;
// neighbours that form one box are joined. nullopt over `max_boxes`.
LOADPLAN_API std::optional<std::vector<Box>> UnionOf(std::vector<Box> boxes, Index max_boxes);

}  // namespace loadplan

#endif  // LOADPLAN_GEOMETRY_VIEW_TO_BOX_H_
