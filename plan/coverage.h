// Which bytes of a target a set of writes leaves alone.
#ifndef LOADPLAN_PLAN_COVERAGE_H_
#define LOADPLAN_PLAN_COVERAGE_H_

#include <vector>

#include "absl/status/statusor.h"
#include "geometry/strided_layout.h"

namespace loadplan {

// Bytes that `layout` touches, each counted once. Errors as in Compose.
absl::StatusOr<Index> DistinctNbytes(const StridedLayout& layout);

// For each of `targets`, layouts on one storage that may alias one another: how
// many of its bytes no region touches. Regions may overlap. Where the geometry is too
// irregular to say, bytes count as untouched: coverage is never claimed in doubt.
std::vector<Index> UntouchedNbytes(const std::vector<StridedLayout>& targets,
                                   const std::vector<StridedLayout>& regions);

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_COVERAGE_H_
