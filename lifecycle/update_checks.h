// What a plan must be like for an update that is about to start.
#ifndef LOADPLAN_LIFECYCLE_UPDATE_CHECKS_H_
#define LOADPLAN_LIFECYCLE_UPDATE_CHECKS_H_

#include <cstdint>
#include <span>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "plan/load_plan.h"

namespace loadplan {

// Names of targets that a failed update may have half written, each with the number of its
// bytes that the failed plan would not have written anyway.
using UndefinedTargets = absl::flat_hash_map<std::string, Index>;

// FailedPrecondition, naming the targets, where one that matches a pattern of `required` has bytes
// that the plan does not write. InvalidArgument: a pattern that matches no target. A plan with
// fallbacks passes: what they cover is known to their loader alone.
absl::Status CheckRequired(const LoadPlan& plan, std::span<const std::string> required);

// FailedPrecondition where the plan would leave bytes undefined that a failed update may have
// written. Counted per target: what the failed plan left alone, this one may leave alone too.
absl::Status CheckUndefined(const LoadPlan& plan, const UndefinedTargets& undefined);

// `partial` holds entries, sorted. InvalidArgument where a program has some but not all of its
// names among them.
absl::Status CheckWhole(const LoadPlan& plan, std::span<const std::int32_t> partial);

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_UPDATE_CHECKS_H_
