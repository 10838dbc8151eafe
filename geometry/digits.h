// Digits: a grid as boxes in a mixed-radix number system; internal to `geometry/`.
// See Note [Digits] in geometry/compose.h.
//
// Weights w[0] = 1 < w[1] < ... divide one another. A byte of T is the number
//
//   base + sum q[j] * w[j],   0 <= q[j] < w[j + 1] / w[j]  (the last digit is free)
//
// Example: bytes 20..59 of each row of a matrix whose rows have 100 bytes, rows 3 and
// 4, are one box on the weights 1, 100: `q[0] in [20, 60), q[1] in [3, 5)`. The bytes
// 250..449 in one run are three: the head `[50, 100) x [2, 3)`, the body
// `[0, 100) x [3, 4)` and the tail `[0, 50) x [4, 5)`.
#ifndef LOADPLAN_GEOMETRY_DIGITS_H_
#define LOADPLAN_GEOMETRY_DIGITS_H_

#include <optional>

#include "absl/container/inlined_vector.h"
#include "geometry/grid.h"
#include "geometry/index.h"

namespace loadplan::geometry_internal {

// One digit of a box: values `start <= q < stop`; a step of the digit moves `other`
// bytes on O.
struct Digit {
  Index start = 0;
  Index stop = 1;
  Index other = 0;

  Index extent() const { return stop - start; }
};

// A box in digits; `other_offset` is the byte on O where all digits are at `start`.
struct DigitBox {
  absl::InlinedVector<Digit, 5> digits;
  Index other_offset = 0;
};
using DigitBoxes = absl::InlinedVector<DigitBox, 3>;

struct DigitSystem {
  absl::InlinedVector<Index, 6> weights;
  Index base = 0;

  size_t size() const { return weights.size(); }
  // Values that digit `level` takes; not for the last one.
  Index radix(size_t level) const { return weights[level + 1] / weights[level]; }
};

// A dimension that keeps two grids from having common weights.
struct Offender {
  bool in_first = false;  // of grid `a`, else of `b`
  size_t dim = 0;
};

// Fills the weights from the strides (and atoms) of both grids. False where they do
// not divide one another; `*offender` is then the dimension to unroll, the one of
// least extent among those that stand in the way, or nullopt where only atoms do.
bool FindWeights(const Grid& a, const Grid& b, DigitSystem* system,
                 std::optional<Offender>* offender);

// Chooses the base so that few boxes result: where a digit of both grids can start
// anywhere without a carry, none is split.
void ChooseBase(const Grid& a, const Grid& b, DigitSystem* system);

// The boxes of a grid: disjoint as sets of pairs. Every stride must be a weight.
// Returns false when more than `max_boxes` would be needed.
bool Split(const Grid& grid, const DigitSystem& system, Index max_boxes, DigitBoxes* boxes);

// Digits that both boxes have; false where there are none.
bool Intersect(const DigitBox& a, const DigitBox& b, absl::InlinedVector<Digit, 5>* common);

// Appends the boxes of `box` outside `common`, which lies in it: last digit first, so
// that what is cut off there stays whole rows.
void AppendDifference(const DigitBox& box, const absl::InlinedVector<Digit, 5>& common,
                      DigitBoxes* boxes);

// The bytes of a box as a grid; atoms as given.
Grid GridOf(const DigitBox& box, const DigitSystem& system, Index atom, Index other_atom);

}  // namespace loadplan::geometry_internal

#endif  // LOADPLAN_GEOMETRY_DIGITS_H_
