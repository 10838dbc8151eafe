// BoundPlan: a plan with the live tensors that it was made for.
#ifndef LOADPLAN_LIFECYCLE_BOUND_PLAN_H_
#define LOADPLAN_LIFECYCLE_BOUND_PLAN_H_

#include <atomic>
#include <memory>
#include <utility>

#include "backend/target_set.h"
#include "backend/traced_plan.h"
#include "lifecycle/copy_device.h"
#include "lifecycle/layout_snapshot.h"
#include "lifecycle/premises.h"

namespace loadplan {

struct BoundPlan {
  std::shared_ptr<const TracedPlan> traced;
  std::shared_ptr<const TargetSet> targets;
  LayoutSnapshot layout;  // of the targets, when the plan was made
  Premises premises;
  // What batches of copies keep of the plan.
  mutable DevicePlanCache on_device;
  // An engine took destinations (`get_dest`) and may write through them without a word.
  mutable std::atomic<bool> gave_destinations{false};
  // It has said of some name that it was delivered: what it does not report it did not write.
  mutable std::atomic<bool> is_reported{false};

  BoundPlan(std::shared_ptr<const TracedPlan> plan, std::shared_ptr<const TargetSet> live)
      : BoundPlan(plan, live, Premises(*plan, *live)) {}
  // With the premises of a plan that was saved.
  BoundPlan(std::shared_ptr<const TracedPlan> plan, std::shared_ptr<const TargetSet> live,
            Premises saved)
      : traced(std::move(plan)),
        targets(std::move(live)),
        layout(LayoutSnapshot::Of(targets->targets())),
        premises(std::move(saved)) {}
  const LoadPlan& plan() const { return traced->plan; }
};

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_BOUND_PLAN_H_
