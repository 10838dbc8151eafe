// Divide: the one algorithm behind composition, intersection and difference;
// internal to `geometry/`.
#ifndef LOADPLAN_GEOMETRY_DIVIDE_H_
#define LOADPLAN_GEOMETRY_DIVIDE_H_

#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "geometry/digits.h"
#include "geometry/grid.h"

namespace loadplan::geometry_internal {

// Bytes of T that a box of grid `a` and a box of grid `b` have in common. Valid during the
// call that hands it out.
struct CommonPart {
  const DigitSystem& system;
  const DigitBox& a;
  const DigitBox& b;
  const absl::InlinedVector<Digit, 5>& digits;
  const Grid& grid_a;  // for the atoms
  const Grid& grid_b;

  Index nbytes() const;
  // Those bytes, each with its byte on the O side of `a`.
  Grid OnA() const;
  // Pairs the O bytes of `a` (which become `to`) with the O bytes of `b` (`from`).
  // FailedPrecondition where that would cut an atom.
  absl::StatusOr<StridedMap> Join(const GridDims& repeats) const;
};

using OnCommon = absl::FunctionRef<absl::Status(const CommonPart&)>;

// Calls `on_common` for parts of `a` that lie on bytes of `b`, and appends to `rest` the
// parts that do not. Each pair of `a` ends up in exactly one of them. `b` may repeat
// bytes. With `rest` null, parts may come twice where `b` does.
//
// Every piece that is made takes one from `*pieces_left`; ResourceExhausted when
// none is left. Errors of `on_common` end the division.
absl::Status Divide(const Grid& a, const Grid& b, Index* pieces_left, OnCommon on_common,
                    std::vector<Grid>* rest);

}  // namespace loadplan::geometry_internal

#endif  // LOADPLAN_GEOMETRY_DIVIDE_H_
