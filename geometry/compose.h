// Composition, intersection and difference of strided maps: the algebra by which
// a write is followed backwards through temporaries, and by which an earlier
// write is clipped by a later one.
//
// How it works (Note [Digits]): strides that divide one another are the digits
// of a mixed-radix number. On the digits of both operands a regular map is a box,
// and intersection and difference are interval arithmetic per digit. A dimension
// that fits no common chain of digits (a diagonal under rows, a step that does not
// divide the row) is unrolled, as few of them as possible, so that the result is
// exact for every input; `max_pieces` bounds that work.
#ifndef LOADPLAN_GEOMETRY_COMPOSE_H_
#define LOADPLAN_GEOMETRY_COMPOSE_H_

#include <vector>

#include "absl/status/statusor.h"
#include "geometry/export.h"
#include "geometry/index.h"
#include "geometry/strided_layout.h"
#include "geometry/strided_map.h"

namespace loadplan {

// Work limit of one call: pieces that may exist at a time.
inline constexpr Index kDefaultMaxPieces = Index{1} << 20;

struct Composition {
  // Pairs (d, s) with (d, t) in `outer` and (t, s) in `inner`.
  std::vector<StridedMap> matched;
  // Pairs (d, t) of `outer` whose t no pair of `inner` writes.
  std::vector<StridedMap> rest;
};

// `outer` maps D <- T, `inner` maps T <- S; `inner` writes no byte twice
// (IsUnique(inner.ToLayout())). `outer` may read a byte several times.
//
// matched and rest are coalesced, cover disjoint parts of outer's `to`, and
// together cover it exactly. A matched piece is a cast if either operand is one.
//
// Errors: ResourceExhausted when more than `max_pieces` pieces would be needed;
// FailedPrecondition when an item of a cast map would have to be cut (the items
// of both maps do not coincide on T). Where items of the other map are smaller or
// start elsewhere, so that several of its parts share an item, this may be returned
// although together they hold it.
LOADPLAN_API absl::StatusOr<Composition> Compose(const StridedMap& outer, const StridedMap& inner,
                                                 Index max_pieces = kDefaultMaxPieces);

// The pairs of `map` whose `to` byte lies outside `region`. Errors as in Compose.
LOADPLAN_API absl::StatusOr<std::vector<StridedMap>> SubtractTo(
    const StridedMap& map, const StridedLayout& region, Index max_pieces = kDefaultMaxPieces);

// The bytes of `layout` that lie in / outside `region`, as layouts (order is lost;
// each byte appears once even where `layout` touches it several times).
LOADPLAN_API absl::StatusOr<std::vector<StridedLayout>> Intersect(
    const StridedLayout& layout, const StridedLayout& region, Index max_pieces = kDefaultMaxPieces);
LOADPLAN_API absl::StatusOr<std::vector<StridedLayout>> Subtract(
    const StridedLayout& layout, const StridedLayout& region, Index max_pieces = kDefaultMaxPieces);

// Joins pieces that continue one another (rows that a `cat` had cut, a dimension
// that was unrolled): the same pairs, usually in fewer maps, sorted by the first byte
// of `to`. Pieces must write disjoint bytes. Two or three equal blocks with gaps
// between them stay apart: they are boxes, the map that steps over them is none.
// O(n log n) per joined dimension.
LOADPLAN_API std::vector<StridedMap> MergePieces(std::vector<StridedMap> pieces);

}  // namespace loadplan

#endif  // LOADPLAN_GEOMETRY_COMPOSE_H_
