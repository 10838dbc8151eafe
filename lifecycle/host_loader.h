// For hosts whose loader is a C++ function: the loop over the passes of a trace, and the loader's
// part of an update.
//
//   auto plan = PlanLoads(metas, targets, load_weights).value();   // nothing is loaded
//   session.Start({});
//   session.Begin(plan, targets);
//   for (...) session.Deliver(name, tensor);
//   CallLoader(session, *plan, load_weights, targets);             // where names fall back
//   session.PrepareFinish(std::nullopt, targets);
//   session.Finish();
#ifndef LOADPLAN_LIFECYCLE_HOST_LOADER_H_
#define LOADPLAN_LIFECYCLE_HOST_LOADER_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "backend/tracer.h"
#include "geometry/export.h"
#include "lifecycle/bound_plan.h"
#include "lifecycle/reload_session.h"

namespace loadplan {

// Gives the next checkpoint tensor; nullopt after the last one.
using NextWeight = std::function<std::optional<std::pair<std::string, at::Tensor>>()>;
// A host's loader: asks for tensors until there are no more, and copies them into its targets. It
// may throw; what it throws becomes an error with its words.
using LoadWeights = std::function<void(const NextWeight& next)>;

// Traces `load_weights` over the declared tensors, as often as it takes, and plans what it does.
// No live byte changes. Errors: InvalidArgument, FailedPrecondition with the loader's own words
// where it fails or does what no plan can follow (it keeps a tensor, say).
LOADPLAN_API absl::StatusOr<std::shared_ptr<const BoundPlan>> PlanLoads(
    std::vector<SourceMeta> metas, std::vector<LiveTarget> targets, const LoadWeights& load_weights,
    OverlapPolicy overlaps = OverlapPolicy::kFallback);

// Calls `load_weights` with the fallback names of the update, watched, if all of them have arrived
// and that was not done before; else does nothing. Errors fail the session. `current`: the targets
// as they are after the call too.
LOADPLAN_API absl::Status CallLoader(ReloadSession& session, const BoundPlan& plan,
                                     const LoadWeights& load_weights,
                                     std::span<const LiveTarget> current);

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_HOST_LOADER_H_
