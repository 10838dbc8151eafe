// BoundPlan: a plan with the live tensors that it was made for.
#ifndef LOADPLAN_LIFECYCLE_BOUND_PLAN_H_
#define LOADPLAN_LIFECYCLE_BOUND_PLAN_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "backend/target_set.h"
#include "backend/traced_plan.h"
#include "lifecycle/copy_device.h"
#include "lifecycle/layout_snapshot.h"
#include "lifecycle/premises.h"
#include "lifecycle/written_bytes.h"

namespace loadplan {

// Entries of a plan whose destinations an engine took (`get_dest`): it may write through them
// without a word, in any update.
class HandedOut {
 public:
  void Add(std::int32_t entry) {
    const std::lock_guard lock(mutex_);
    if (is_in_.insert(entry).second) entries_.push_back(entry);
  }
  bool Has(std::int32_t entry) const {
    const std::lock_guard lock(mutex_);
    return is_in_.contains(entry);
  }
  // Those after the first `skip`, in the order in which they were added.
  std::vector<std::int32_t> Entries(std::size_t skip = 0) const {
    const std::lock_guard lock(mutex_);
    return {entries_.begin() + static_cast<std::ptrdiff_t>(skip), entries_.end()};
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::int32_t> entries_;
  absl::flat_hash_set<std::int32_t> is_in_;
};

struct BoundPlan {
  std::shared_ptr<const TracedPlan> traced;
  std::shared_ptr<const TargetSet> targets;
  LayoutSnapshot layout;  // of the targets, when the plan was made
  Premises premises;
  // What batches of copies keep of the plan.
  mutable DevicePlanCache on_device;
  mutable HandedOut handed_out;
  // An engine has said of some name that it was delivered: of what it does not report nothing can
  // be said, neither that it came nor that no byte of it was written.
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
  // What an update that writes all of it covers. Reckoned when it is first asked for.
  const std::vector<TargetBytes>& WholeCoverage() const {
    std::call_once(coverage_reckoned_, [this] {
      coverage_ = WrittenBytes::OfPlan(plan()).PerTarget(plan().declared_targets());
    });
    return coverage_;
  }
  // Whether an engine could write the entry through destinations: it has some, all with memory.
  bool HasPlace(std::int32_t entry) const {
    if (!plan().GetDest(entry).has_value()) return false;
    return std::ranges::none_of(plan().writes_of(entry), [this](const WriteItem& item) {
      return targets->storages()[static_cast<std::size_t>(item.target)].is_meta();
    });
  }

 private:
  mutable std::once_flag coverage_reckoned_;
  mutable std::vector<TargetBytes> coverage_;
};

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_BOUND_PLAN_H_
