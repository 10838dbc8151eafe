// ReloadSession: between `start_reload` and `finish_reload` of one model.
//
//   session.Start({});
//   session.Begin(plan, targets_as_they_are_now);   // refuses before anything is written
//   session.Deliver("q.weight", tensor);            // any order, any number of calls
//   session.PrepareFinish(std::nullopt, targets_as_they_are_now);
//   Receipt receipt = session.Finish().value();
//
// An update whose plan has fallbacks writes nothing by plan: Deliver keeps the tensors, and the
// caller makes one `load_weights` call with what TakeEagerCall gives, then says EagerDone.
#ifndef LOADPLAN_LIFECYCLE_RELOAD_SESSION_H_
#define LOADPLAN_LIFECYCLE_RELOAD_SESSION_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "backend/target_set.h"
#include "backend/traced_plan.h"
#include "geometry/export.h"
#include "lifecycle/eager_collection.h"
#include "lifecycle/execute.h"
#include "lifecycle/layer_staging.h"
#include "lifecycle/layout_snapshot.h"
#include "lifecycle/premises.h"
#include "lifecycle/session_state.h"
#include "lifecycle/update_checks.h"

namespace loadplan {

// A plan with the live tensors that it was made for.
struct BoundPlan {
  std::shared_ptr<const TracedPlan> traced;
  std::shared_ptr<const TargetSet> targets;
  LayoutSnapshot layout;  // of the targets, when the plan was made
  Premises premises;
  // An engine took destinations (`get_dest`) and may write through them without a word.
  mutable std::atomic<bool> gave_destinations{false};

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

// What an update did.
struct Receipt {
  std::vector<std::string> names;  // in order of arrival
  Index nbytes = 0;                // of targets written; of tensors given to an eager call
  double seconds = 0;              // since Start
  // Layerwise: the most that was staged, and held on the host for want of room, at one time.
  Index peak_staging_nbytes = 0;
  Index peak_held_nbytes = 0;
};

// Layers that can be processed, with their load-format tensors, now real.
struct ReadyLayers {
  std::int32_t group = -1;
  std::vector<std::int32_t> layers;
  std::vector<LiveTarget> tensors;
};

// For people and for `loadplan.state`.
struct SessionReport {
  SessionState state = SessionState::kIdle;
  double since = 0;                    // seconds since 1970: when the state was entered
  std::vector<std::string> landed;     // names of the current or failed update
  std::vector<std::string> undefined;  // targets whose bytes a failed update left half written
  std::string error;                   // what failed it
};

// Safe to call from several threads: calls are serialised. Holds tensors, never modules.
class LOADPLAN_API ReloadSession {
 public:
  // Patterns of target names (`*`, `?`, `[...]`) that the plan must cover in full.
  absl::Status Start(std::vector<std::string> required);

  // Chooses the plan of this update; a second call with the same plan does nothing. Refuses,
  // with the session still active and nothing written (FailedPrecondition): another plan than
  // before, a target that is not where it was when the plan was made, a required target that
  // is not covered, and after a failed update a plan that would leave its bytes undefined.
  // InvalidArgument: a pattern that names no target.
  absl::Status Begin(std::shared_ptr<const BoundPlan> plan, std::span<const LiveTarget> current);
  // Whether the active update has chosen `plan`; any plan where it is null.
  bool HasPlan(const BoundPlan* plan) const;

  // Lands a checkpoint tensor. Before any byte of it is written (InvalidArgument): a name that
  // was not declared or has landed, another shape or dtype than declared, a tensor without
  // plain memory. Any error fails the session and lists what has landed.
  absl::Status Deliver(std::string_view name, const at::Tensor& tensor);
  absl::Status Deliver(std::span<const std::string> names, std::span<const at::Tensor> tensors);
  // An engine has written the name through its destinations.
  absl::Status ReportDelivered(std::string_view name);

  // Whether the update goes through the loader and every declared name has arrived.
  bool EagerReady() const;
  bool NeedsEagerCall() const;
  std::vector<std::pair<std::string, at::Tensor>> TakeEagerCall();
  // `error`: what the loader raised; empty if it returned. `current`: the targets after it.
  absl::Status EagerDone(const std::string& error, std::span<const LiveTarget> current);

  // Layerwise updates; see lifecycle/layer_staging.h. Between Start and Begin: the targets on meta
  // that the update stages.
  absl::Status SetStaging(StagingSpec spec);
  // Layers to process now, after a Deliver or, with `finishing`, after PrepareFinish; nullopt where
  // there are none. LayersDone before the next ones are taken. Errors fail the session.
  absl::StatusOr<std::optional<ReadyLayers>> TakeReadyLayers(bool finishing);
  absl::Status LayersDone(std::int32_t group);
  // Before results of post-processing are copied into live tensors.
  absl::Status LayersOverwrite();
  // Layers that the call with the fallback names may write, before it is made.
  absl::StatusOr<std::vector<ReadyLayers>> OpenLayersForCall();
  // After it: names of targets that it touched.
  void LayersCalled(std::span<const std::string> met);
  // A step outside the library (post-processing) failed.
  absl::Status FailWith(const absl::Status& status);

  // Checks that the update is complete; the session stays active if it is not, so that the
  // rest can be sent. With `partial`, a selective update: those names and no others must have
  // arrived, and every program must have all or none of its names among them.
  absl::Status PrepareFinish(const std::optional<std::vector<std::string>>& partial,
                             std::span<const LiveTarget> current);
  // After PrepareFinish: applies constants and ends the session.
  absl::StatusOr<Receipt> Finish();
  absl::Status Abort();

  SessionReport report() const;

 private:
  using Names = std::vector<std::int32_t>;

  bool has_landed(std::int32_t entry) const { return landed_[static_cast<std::size_t>(entry)]; }
  EntryKind KindOf(std::int32_t entry) const {
    return plan_->plan().entries()[static_cast<std::size_t>(entry)].kind;
  }
  bool AllFallbacksArrived() const;
  const std::string& NameOf(std::int32_t entry) const;
  absl::StatusOr<std::int32_t> CheckArrival(std::string_view name, const at::Tensor& tensor) const;
  absl::Status DeliverLocked(std::string_view name, const at::Tensor& tensor);
  absl::Status EnsureBegun();
  // Whether bytes of the entry go to live memory, and not to staged layers only.
  bool WritesLive(std::int32_t entry) const;
  absl::StatusOr<ReadyLayers> ReadyLayersOf(std::int32_t group);
  absl::StatusOr<Names> PartialNames(const std::vector<std::string>& partial) const;
  Names Missing(const std::optional<Names>& partial) const;
  void Land(std::int32_t entry);
  // The event is allowed in this state; else its own words, with what failed the session.
  absl::Status CheckEvent(SessionEvent event) const;
  std::string Quoted(std::span<const std::int32_t> entries) const;
  std::string LandedText() const;
  // The session has failed with `status`; returns it with what landed.
  absl::Status Fail(absl::Status status);
  void MarkUndefined();
  void Enter(SessionState state);
  static double SecondsSince(double then);
  void Clear();

  mutable std::mutex mutex_;
  SessionState state_ = SessionState::kIdle;
  double since_ = 0;
  std::string error_;
  // Kept until a complete update.
  UndefinedTargets undefined_;

  // The update in progress (or the failed one).
  std::vector<std::string> required_;
  std::shared_ptr<const BoundPlan> plan_;
  std::optional<StagingSpec> staging_spec_;
  std::unique_ptr<LayerStaging> staging_;        // null in direct mode
  std::unique_ptr<PlanExecutor> executor_;       // null where the update is eager
  std::unique_ptr<EagerCollection> collection_;  // null where it is not
  std::vector<bool> landed_;                     // per entry
  Names arrived_;                                // in order
  bool begun_ = false;                           // the executor has gathered live bytes
  bool wrote_ = false;                           // a live byte may have changed
  bool reported_ = false;                        // an engine reports deliveries
  bool eager_called_ = false;
  bool prepared_ = false;
  Index eager_nbytes_ = 0;
};

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_RELOAD_SESSION_H_
