// Plans in files: saved with what they were made for, and bound to live tensors again.
#ifndef LOADPLAN_LIFECYCLE_SAVED_PLAN_H_
#define LOADPLAN_LIFECYCLE_SAVED_PLAN_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "backend/target_set.h"
#include "geometry/export.h"
#include "lifecycle/reload_session.h"
#include "plan/plan_file.h"

namespace loadplan {

// Writes `path`, whole or not at all: into a file beside it that then takes its place. What
// stands in a file is read back before, so that what was saved can be loaded.
//
// FailedPrecondition where a file could not say all that the plan rests on: the loader read a
// tensor that is no target, which another process has no name for. Unimplemented where an
// operator's argument has no form in a file. Unavailable: the path cannot be written.
LOADPLAN_API absl::Status SavePlan(const BoundPlan& bound, PlanFileInfo info,
                                   const std::string& path);

// The bytes that SavePlan writes. Errors as there.
absl::StatusOr<std::string> EncodeBoundPlan(const BoundPlan& bound, PlanFileInfo info);

// The bytes of a file. NotFound, Unavailable, naming the path.
absl::StatusOr<std::string> ReadFile(const std::string& path);

// A file without live tensors: for people. Errors as DecodePlanFile, with the path in front.
LOADPLAN_API absl::StatusOr<PlanFile> ReadPlanFile(const std::string& path);

// A plan that works as the one that was saved, on tensors that are laid out in the same way.
//
// FailedPrecondition with the first difference in words: the version of the library (`info`:
// of now), that of torch where the plan runs operators again, the vector instructions where it
// converts or computes values, the tag; then the targets in the
// order of the file: one is missing, shares another storage, has another dtype, kind of device,
// shape, strides, offset or size of storage; last one that the plan does not know. Addresses
// do not matter. InvalidArgument where an operator or a tensor in the file cannot be read.
LOADPLAN_API absl::StatusOr<std::shared_ptr<const BoundPlan>> BindPlan(PlanFile file,
                                                                       std::vector<LiveTarget> live,
                                                                       const PlanFileInfo& info);

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_SAVED_PLAN_H_
