// StridedMap: the bytes of one storage, each with the byte of another storage
// that it is a copy of. It is the one shape in which a traced `copy_`, a step of
// resolving through a temporary and a planned write are all held.
//
//   to    `to_offset   + (shape):(to_strides)   x to_itemsize`
//   from  `from_offset + (shape):(from_strides) x from_itemsize`
//
// Item `c` of `to` is a copy of item `c` of `from`. A map is one object with
// counts and strides whatever its size: a row-parallel slice of 7168 rows is one
// map, not 7168. A stride of `from` may be 0 (a broadcast) or negative (a flip);
// one of `to` is positive wherever the extent is more than 1.
//
// Elements of a *cast* map are atoms: `to` and `from` hold the same number of
// items of different dtypes (often of different sizes), and no operation may cut
// an item. Bytes of a map that is no cast may be cut anywhere.
#ifndef LOADPLAN_GEOMETRY_STRIDED_MAP_H_
#define LOADPLAN_GEOMETRY_STRIDED_MAP_H_

#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "geometry/export.h"
#include "geometry/index.h"
#include "geometry/strided_layout.h"

namespace loadplan {

// One side of a map: where its items lie.
struct MapSide {
  Index byte_offset = 0;
  DimVector byte_strides;
  Index itemsize = 1;

  friend bool operator==(const MapSide&, const MapSide&) = default;
};

class LOADPLAN_API StridedMap {
 public:
  StridedMap() = default;

  // Pairs the items of two layouts of equal shape. InvalidArgument if the shapes
  // differ, if the itemsizes differ and `is_cast` is false, or if `to` has stride 0
  // where the extent is more than 1 (a byte would be written twice).
  static absl::StatusOr<StridedMap> Create(const StridedLayout& to, const StridedLayout& from,
                                           bool is_cast = false);
  // No checks; ranks of shape and both strides must be equal.
  static StridedMap Unchecked(DimVector shape, MapSide to, MapSide from, bool is_cast);
  // Every byte of `layout` paired with itself.
  static StridedMap Identity(const StridedLayout& layout);

  const DimVector& shape() const { return shape_; }
  const MapSide& to() const { return to_; }
  const MapSide& from() const { return from_; }
  bool is_cast() const { return is_cast_; }

  Index num_elements() const;
  bool empty() const;
  // Bytes written (num_elements() * to().itemsize).
  Index nbytes() const { return num_elements() * to_.itemsize; }

  // The written bytes, in the order of the map.
  StridedLayout ToLayout() const;
  // The smallest ranges that hold every byte of a side; empty for an empty map.
  ByteRange ToSpan() const;
  ByteRange FromSpan() const;

  friend bool operator==(const StridedMap&, const StridedMap&) = default;

 private:
  DimVector shape_;
  MapSide to_;
  MapSide from_;
  bool is_cast_ = false;
};

// The same pairs with as few dimensions as possible, in a canonical order: `to`
// strides descend; an empty map becomes `0 + (0):(1) x 1 <- 0 + (0):(1) x 1`. A dimension that is
// contiguous on both sides becomes part of the itemsize unless the map is a cast. Postconditions
// are checked in tests/geometry/strided_map_test.cc:
//  - the set of (to byte, from byte) pairs is the same (for a cast: item pairs);
//  - no extent is 1, and no two neighbours can be merged.
LOADPLAN_API StridedMap Coalesce(const StridedMap& map);

// The map read the other way round. Only where `from` touches no byte twice.
LOADPLAN_API StridedMap Invert(const StridedMap& map);

// Calls `f(to byte offset, from byte offset, nbytes)` for each maximal run of
// `Coalesce(map)` in order of `to`: the only place where a map becomes runs.
// For a cast map: one call per item, with to().itemsize as nbytes.
LOADPLAN_API void ForEachRun(const StridedMap& map,
                             const std::function<void(Index, Index, Index)>& f);

LOADPLAN_API std::string ToString(const StridedMap& map);
LOADPLAN_API std::ostream& operator<<(std::ostream& stream, const StridedMap& map);

}  // namespace loadplan

#endif  // LOADPLAN_GEOMETRY_STRIDED_MAP_H_
