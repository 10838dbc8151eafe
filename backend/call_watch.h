// CallWatch: an eye on the one real call of `load_weights` that an update with
// fallbacks makes. See Note [Fallback calls] in plan/fallback.h.
#ifndef LOADPLAN_BACKEND_CALL_WATCH_H_
#define LOADPLAN_BACKEND_CALL_WATCH_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "backend/target_set.h"
#include "geometry/export.h"
#include "plan/load_plan.h"

namespace loadplan {

// Bytes of a live storage.
struct TargetRegion {
  StorageId storage = -1;
  StridedLayout layout;
};

// While it watches, operators run for real; one that would read or write a byte that the
// plan writes raises before it runs, and the violation is kept in case the loader swallows it.
class LOADPLAN_API CallWatch : public std::enable_shared_from_this<CallWatch> {
 public:
  CallWatch(const LoadPlan& plan, std::shared_ptr<const TargetSet> targets);

  // The watch of the calling thread; nullptr where there is none.
  static CallWatch* Current();

  // Calls `keep` before an operator writes into memory that is no target's: into a mirror that
  // outlives the call, maybe. Its error is raised. Set it before Begin; it may be called from
  // every thread of the call.
  using Keep = std::function<absl::Status(const at::Tensor&)>;
  void KeepOthers(Keep keep) { keep_ = std::move(keep); }

  void Begin() { JoinThread(); }
  void JoinThread();
  // OK, or FailedPrecondition with the first violation.
  absl::Status End();
  // Target storages that an operator of the call took; pure views do not count.
  std::vector<StorageId> met() const;
  // Regions of targets that operators have written, or would have when they raised.
  std::vector<TargetRegion> TakeWritten();

  // Raises where a tensor meets bytes of the plan. Notes the bytes if they are `written`.
  void Check(const at::Tensor& tensor, const std::string& op, bool written);
  void Check(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

 private:
  struct Planned {
    StridedLayout layout;
    std::int32_t name = -1;  // -1: a constant, a computed value
  };

  const LoadPlan& plan_;
  const std::shared_ptr<const TargetSet> targets_;
  std::vector<std::vector<Planned>> planned_;  // per target storage
  Keep keep_;
  std::atomic<bool> active_{true};
  mutable std::mutex mutex_;
  std::vector<bool> met_;  // per target storage
  std::string violation_;
  std::vector<TargetRegion> written_;
};

// For kernels on the mode key, where no pass is active.
inline void CheckWatched(const at::Tensor& tensor, const char* op, bool written) {
  if (CallWatch* const watch = CallWatch::Current()) watch->Check(tensor, op, written);
}

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_CALL_WATCH_H_
