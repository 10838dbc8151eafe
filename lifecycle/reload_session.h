// ReloadSession: between `start_reload` and `finish_reload` of one model.
//
//   session.Start({});
//   session.Begin(plan, targets_as_they_are_now);   // refuses before anything is written
//   session.Deliver("q.weight", tensor);            // any order, any number of calls
//   session.PrepareFinish(std::nullopt, targets_as_they_are_now);
//   Receipt receipt = session.Finish().value();
//
// Where the plan has fallbacks, Deliver keeps their tensors, and the caller makes one watched
// `load_weights` call with what TakeFallbackCall gives, then says FallbackCallDone.
#ifndef LOADPLAN_LIFECYCLE_RELOAD_SESSION_H_
#define LOADPLAN_LIFECYCLE_RELOAD_SESSION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "backend/call_watch.h"
#include "backend/target_set.h"
#include "geometry/export.h"
#include "lifecycle/attempt.h"
#include "lifecycle/bound_plan.h"
#include "lifecycle/eager_collection.h"
#include "lifecycle/execute.h"
#include "lifecycle/layer_staging.h"
#include "lifecycle/placed_part.h"
#include "lifecycle/session_parts.h"
#include "lifecycle/session_report.h"
#include "lifecycle/session_state.h"
#include "lifecycle/undefined_bytes.h"
#include "lifecycle/undo_log.h"
#include "lifecycle/written_bytes.h"

namespace loadplan {

// Safe to call from several threads: calls are serialised. Holds tensors, never modules.
class LOADPLAN_API ReloadSession {
 public:
  absl::Status Start(StartOptions options);

  // Chooses the plan of this update; a second call with the same plan does nothing. Refuses,
  // with the session still active and nothing written (FailedPrecondition): another plan than
  // before, a target that is not where it was when the plan was made, a premise that has changed,
  // a required target that is not covered, and after a failed update a plan that would leave its
  // bytes undefined or computes from them. What a fallback call covers is checked after it.
  // InvalidArgument: a pattern that names no target.
  absl::Status Begin(std::shared_ptr<const BoundPlan> plan, std::span<const LiveTarget> current);
  // Whether the active update has chosen `plan`; any plan where it is null.
  bool HasPlan(const BoundPlan* plan) const;
  std::vector<at::Tensor> LiveStorages() const;  // of the plan's targets; none before Begin

  // Lands a checkpoint tensor. Before any byte of it is written (InvalidArgument): a name that
  // was not declared or has landed, another shape or dtype than declared, a tensor without
  // plain memory. Any error fails the session and lists what has landed.
  absl::Status Deliver(std::string_view name, const at::Tensor& tensor);
  absl::Status Deliver(std::span<const std::string> names, std::span<const at::Tensor> tensors);

  // The same, part by part, several names at a time: BeginParts, its parts, CompleteParts. Checks
  // and errors as in Deliver; an error of a part fails the session, and so do bytes that are
  // missing when it is completed. See Note [Parts] in lifecycle/entry_parts.h.
  absl::Status BeginParts(std::string_view name, at::IntArrayRef shape, at::ScalarType dtype);
  // `held`: `to` are bytes of the row-major checkpoint tensor, `from` bytes of `from`.
  absl::Status DeliverPart(std::string_view name, const StridedMap& held, const ByteSide& from);
  // Where the bytes go as they are, or nullopt: it is not that simple, or the update is atomic. Who
  // gets a place holds its tensor, and says when it has written.
  absl::StatusOr<std::optional<ByteSide>> InPlace(std::string_view name, ByteRange bytes);
  absl::Status DeliveredInPlace(std::string_view name, ByteRange bytes);
  // The same for a part with gaps, which may go to several places.
  bool HasPlaces(std::string_view name) const;  // PlacesOf will have an answer for its parts
  absl::StatusOr<std::optional<PlacedPart>> PlacesOf(std::string_view name, const StridedMap& held);
  absl::Status DeliveredPart(std::string_view name, const StridedMap& held,
                             const PlacedPart& placed);
  absl::Status CompleteParts(std::string_view name);
  // OK where `name` was declared and has not arrived, nor in part; else what BeginParts says.
  absl::Status CheckArriving(std::string_view name) const;

  // Until EndBatch this thread's copies may wait, and sources stay: see Note [Batched copies].
  void BeginBatch();
  absl::Status EndBatch();
  absl::Status ReportDelivered(std::string_view name);  // written through its destinations
  // A bucket in two steps: fallback names, whose call can fail before others land, and the others.
  absl::Status DeliverFallbacks(std::span<const std::string> names,
                                std::span<const at::Tensor> tensors);
  absl::Status DeliverPlanned(std::span<const std::string> names,
                              std::span<const at::Tensor> tensors);
  // Names by their positions in LoadPlan::sources(): nothing is looked up.
  absl::Status DeliverPlanned(std::span<const std::int64_t> entries,
                              std::span<const at::Tensor> tensors);

  // Whether every fallback name has arrived, their call has not been made, and what it may write
  // can be staged.
  bool FallbackCallReady() const;
  bool NeedsFallbackCall() const;  // the same for some of them
  using Call = std::vector<std::pair<std::string, at::Tensor>>;
  absl::StatusOr<Call> TakeFallbackCall();
  // Before it writes memory that is no target's: see CallWatch::KeepOthers.
  absl::Status KeepOther(const at::Tensor& tensor);
  // `error`: what the loader raised; empty if it returned. `written`: the regions of targets that
  // it was seen to write. `current`: the targets after it. Fails the session where a required
  // target, or what a failed update left undefined, is still not covered.
  absl::Status FallbackCallDone(const std::string& error, std::vector<TargetRegion> written,
                                std::span<const LiveTarget> current);

  // Destinations were handed out: an atomic update keeps what lies there.
  absl::Status HandOut(std::shared_ptr<const BoundPlan> plan);
  // Before a hook of the host changes targets at will: an atomic update keeps all of them.
  absl::Status BeforeHook(std::span<const LiveTarget> current);
  // A hook raised, in whatever state: the session fails, with every byte of `current` undefined. A
  // later update has to write what this one's plan, or else `known`, writes. Returns the error.
  absl::Status HookFailed(const std::string& error, std::span<const LiveTarget> current,
                          std::shared_ptr<const BoundPlan> known = nullptr);
  // After a failure: layers that a hook put in load format and that stay so.
  void LeftInLoadFormat(std::span<const LiveTarget> targets);

  // Layerwise updates; see lifecycle/layer_staging.h. Between Start and Begin: the targets on meta
  // that the update stages.
  absl::Status SetStaging(StagingSpec spec);
  // Layers to process now, after a Deliver or, with `finishing`, after PrepareFinish; nullopt where
  // there are none. LayersDone before the next ones are taken. Errors fail the session.
  absl::StatusOr<std::optional<ReadyLayers>> TakeReadyLayers(bool finishing);
  absl::Status LayersDone(std::int32_t group);
  // Before post-processing of a layer, which may write its tensors in kernel format.
  absl::Status LayersOverwrite(std::vector<LiveTarget> kernel);
  // After PrepareFinish: bytes of processed layers that no name wrote nor the spec knew: zeroed.
  std::vector<TargetBytes> ZeroedBytes() const;
  // Layers that the fallback call may write, before it is made.
  absl::StatusOr<std::vector<ReadyLayers>> OpenLayersForCall();
  void LayersCalled(std::span<const std::string> met);  // after it: targets that it touched
  // A step outside the library failed (post-processing, a sender): fails the session with `status`.
  // Returns it with what landed; alone where the session is not active.
  absl::Status FailWith(const absl::Status& status);

  // Checks that the update is complete; the session stays active if it is not, so that the
  // rest can be sent. With `partial`, a selective update: those names and no others must have
  // arrived, and every program must have all or none of its names among them.
  absl::Status PrepareFinish(const std::optional<std::vector<std::string>>& partial,
                             std::span<const LiveTarget> current);
  // After PrepareFinish: writes what comes last. Every byte is then there; hooks may run.
  absl::Status Complete();
  absl::StatusOr<Receipt> Finish();  // ends the session, completing it if that was not done
  // Idle where no byte may have been written, or where the update is atomic; else failed.
  absl::Status Abort();

  // FailedPrecondition, in its own words, where `event` may not happen now.
  absl::Status CheckEvent(SessionEvent event) const;
  // Whether a live byte may have changed, and is not back, in the update that is active or failed.
  bool MayHaveWritten() const;
  SessionReport report() const;

 private:
  using Names = std::vector<std::int32_t>;
  // A call from outside: what raises in it fails the session, as an error does.
  template <typename Step>
  auto Guarded(const Step& step) {
    const std::lock_guard lock(mutex_);
    return Attempt(step, [this](const absl::Status& raised) { return FailActive(raised); });
  }
  bool has_landed(std::int32_t entry) const { return landed_[static_cast<std::size_t>(entry)]; }
  EntryKind KindOf(std::int32_t entry) const;
  bool AllFallbacksArrived() const;
  bool IsCalling() const { return call_taken_ && !call_ended_; }  // of the loader, now
  const std::string& NameOf(std::int32_t entry) const;
  absl::StatusOr<std::int32_t> FindArriving(std::string_view name) const;  // has not arrived yet
  absl::Status CheckNotArrived(std::int32_t entry) const;
  absl::Status CheckArrival(std::int32_t entry, const at::Tensor& tensor) const;
  absl::Status DeliverLocked(std::string_view name, const at::Tensor& tensor);
  absl::Status DeliverEntry(std::int32_t entry, const at::Tensor& tensor);
  void HoldCopies();  // until Launch
  absl::Status KeepFallback(std::int32_t entry, const at::Tensor& tensor);
  absl::Status EnsureBegun();
  absl::Status Launch();  // the copies that wait: the last thing of a call that lands bytes
  absl::StatusOr<ReadyLayers> ReadyLayersOf(std::int32_t group);
  absl::Status AddDestinations(std::shared_ptr<const BoundPlan> plan);
  absl::Status KeepDestinations(Destinations& destinations);
  absl::Status KeepForFallbackCall();
  absl::StatusOr<std::int32_t> OpenEntry(std::string_view name);  // one that arrives in parts
  absl::Status EnsureWritable();  // before a byte of an open entry changes a live one
  absl::Status FailInPart(const absl::Status& status, std::int32_t entry);
  absl::StatusOr<Names> PartialNames(const std::vector<std::string>& partial) const;
  absl::Status CheckPartial(const Names& partial) const;
  Names Missing(const std::optional<Names>& partial, const Names& trusted) const;
  absl::Status CompleteLocked();
  void Land(std::int32_t entry);
  // As CheckEvent, for callers that hold the lock; with what failed the session.
  absl::Status CheckLocked(SessionEvent event) const;
  std::string Quoted(std::span<const std::int32_t> entries) const;
  std::string LandedText() const;
  bool WroteLocked() const;
  // Bytes that the update has written; without `live_only` staged ones too.
  WrittenBytes Written(bool live_only) const;
  void AddPlanned(WrittenBytes& written, bool of_processed_layers) const;
  // Names of `among` (null: all) that count as arrived because an engine could have written them.
  Names Trusted(const std::optional<Names>& among) const;
  bool IsStaged(StorageId id) const { return staging_ != nullptr && staging_->Stages(id); }
  Names Landed() const;  // fallback names after their call
  // Fails with `status`; returns it with what became of the bytes, `whole` wholly undefined.
  absl::Status Fail(absl::Status status, std::span<const LiveTarget> whole = {});
  absl::Status FailActive(const absl::Status& status);  // `status` alone where it is not active
  absl::Status FailDamaged(absl::Status status, std::span<const LiveTarget> whole);
  absl::Status PutBack();
  void EndUnchanged(std::string error);
  void EnterFailed(std::string error, std::span<const LiveTarget> whole);
  void MarkUndefined(std::span<const LiveTarget> whole);
  void Enter(SessionState state);
  static double SecondsSince(double then);
  void Clear();

  mutable std::mutex mutex_;
  SessionState state_ = SessionState::kIdle;
  double since_ = 0;
  std::string error_;
  UndefinedBytes undefined_;  // kept until a complete update
  // The update in progress (or the failed one).
  std::vector<std::string> required_;
  std::unique_ptr<UndoLog> undo_;  // null where the update is not atomic
  std::vector<Destinations> destinations_;
  std::shared_ptr<const BoundPlan> plan_;
  std::optional<StagingSpec> staging_spec_;
  std::unique_ptr<LayerStaging> staging_;  // null in direct mode
  std::unique_ptr<PlanExecutor> executor_;
  std::unique_ptr<EagerCollection> collection_;        // null where no name falls back
  std::vector<bool> landed_;                           // per entry
  absl::flat_hash_map<std::int32_t, OpenParts> open_;  // entries that arrive in parts
  Names arrived_, reported_, trusted_;  // in order; by an engine, of those; not of those
  std::thread::id batching_;            // whose copies may wait
  bool begun_ = false;                  // the executor has gathered live bytes
  bool prepared_ = false, completed_ = false, failed_after_write_ = false;
  bool call_taken_ = false, call_ended_ = false;  // ended: it raised or returned
  bool call_done_ = false;                        // it returned
  bool layers_overwrote_ = false;                 // post-processing may have written live tensors
  std::vector<LiveTarget> overwritten_;           // these
  std::vector<TargetRegion> call_written_;
  Index call_nbytes_ = 0;
};

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_RELOAD_SESSION_H_
