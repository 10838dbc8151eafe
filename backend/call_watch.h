// CallWatch: an eye on the one real call of `load_weights` that an update with
// fallbacks makes. See Note [Fallback calls] in plan/fallback.h.
#ifndef LOADPLAN_BACKEND_CALL_WATCH_H_
#define LOADPLAN_BACKEND_CALL_WATCH_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "backend/target_set.h"
#include "plan/load_plan.h"

namespace loadplan {

// While it watches, operators run for real; one that would read or write a byte that the
// plan writes raises before it runs, and the violation is kept in case the loader swallows it.
class CallWatch : public std::enable_shared_from_this<CallWatch> {
 public:
  CallWatch(const LoadPlan& plan, std::shared_ptr<const TargetSet> targets);

  // The watch of the calling thread; nullptr where there is none.
  static CallWatch* Current();

  void Begin() { JoinThread(); }
  void JoinThread();
  // OK, or FailedPrecondition with the first violation.
  absl::Status End();
  // Target storages that an operator of the call took; pure views do not count.
  std::vector<StorageId> met() const;

  // Raises where a tensor meets bytes of the plan.
  void Check(const at::Tensor& tensor, const std::string& op);
  void Check(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

 private:
  struct Planned {
    StridedLayout layout;
    std::int32_t name = -1;  // -1: a constant, a computed value
  };

  const LoadPlan& plan_;
  const std::shared_ptr<const TargetSet> targets_;
  std::vector<std::vector<Planned>> planned_;  // per target storage
  std::atomic<bool> active_{true};
  mutable std::mutex mutex_;
  std::vector<bool> met_;  // per target storage
  std::string violation_;
};

// For kernels on the mode key, where no pass is active.
inline void CheckWatched(const at::Tensor& tensor, const char* op) {
  if (CallWatch* const watch = CallWatch::Current()) watch->Check(tensor, op);
}

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_CALL_WATCH_H_
