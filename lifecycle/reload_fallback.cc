// ReloadSession, the one call of the loader with the names that no plan can do.
#include <c10/core/GradMode.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "lifecycle/byte_copy.h"
#include "lifecycle/reload_session.h"
#include "lifecycle/update_checks.h"

namespace loadplan {

absl::Status ReloadSession::KeepFallback(std::int32_t entry, const at::Tensor& tensor) {
  absl::Status status = executor_->BeforeRead(ByteSide::OfElements(tensor));
  if (status.ok()) {
    status = Attempt(absl::StrCat("`", NameOf(entry), "` could not be kept"),
                     [&] { collection_->Add(entry, tensor); });
  }
  if (!status.ok()) return Fail(std::move(status));
  call_nbytes_ += static_cast<Index>(tensor.nbytes());
  Land(entry);
  return absl::OkStatus();
}

absl::Status ReloadSession::DeliverFallbacks(std::span<const std::string> names,
                                             std::span<const at::Tensor> tensors) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = CheckLocked(SessionEvent::kLoad); !status.ok()) return status;
    if (collection_ == nullptr) return absl::OkStatus();
    for (std::size_t i = 0; i < names.size(); ++i) {
      const std::optional<std::int32_t> entry = plan_->plan().Find(names[i]);
      if (!entry.has_value() || KindOf(*entry) != EntryKind::kFallback) continue;
      if (absl::Status status = DeliverLocked(names[i], tensors[i]); !status.ok()) return status;
    }
    return absl::OkStatus();
  });
}

absl::Status ReloadSession::DeliverPlanned(std::span<const std::string> names,
                                           std::span<const at::Tensor> tensors) {
  return Guarded([&]() -> absl::Status {
    HoldCopies();
    for (std::size_t i = 0; i < names.size(); ++i) {
      const std::optional<std::int32_t> entry =
          plan_ == nullptr ? std::nullopt : plan_->plan().Find(names[i]);
      if (entry.has_value() && KindOf(*entry) == EntryKind::kFallback) continue;
      if (absl::Status status = DeliverLocked(names[i], tensors[i]); !status.ok()) return status;
    }
    return Launch();
  });
}

absl::Status ReloadSession::DeliverPlanned(std::span<const std::int64_t> entries,
                                           std::span<const at::Tensor> tensors) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = CheckLocked(SessionEvent::kLoad); !status.ok()) return status;
    if (plan_ == nullptr) return absl::InternalError("DeliverPlanned before Begin");
    HoldCopies();
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (entries[i] < 0 || entries[i] >= static_cast<std::int64_t>(landed_.size())) {
        return Fail(absl::InternalError("a position that is none of the plan's"));
      }
      const auto entry = static_cast<std::int32_t>(entries[i]);
      if (KindOf(entry) == EntryKind::kFallback) continue;
      if (absl::Status status = DeliverEntry(entry, tensors[i]); !status.ok()) return status;
    }
    return Launch();
  });
}

bool ReloadSession::AllFallbacksArrived() const {
  const auto& entries = plan_->plan().entries();
  return collection_->size() == static_cast<std::size_t>(std::ranges::count(
                                    entries, EntryKind::kFallback, &PlanEntry::kind));
}

bool ReloadSession::FallbackCallReady() const {
  const std::lock_guard lock(mutex_);
  if (state_ != SessionState::kActive || collection_ == nullptr || call_taken_) return false;
  return AllFallbacksArrived() && (staging_ == nullptr || staging_->HasRoomForCall());
}

bool ReloadSession::NeedsFallbackCall() const {
  const std::lock_guard lock(mutex_);
  return state_ == SessionState::kActive && collection_ != nullptr && !call_taken_ &&
         collection_->size() > 0;
}

// The call may write whatever no operator shows beforehand.
absl::Status ReloadSession::KeepForFallbackCall() {
  if (undo_ == nullptr) return absl::OkStatus();
  for (const at::Tensor& storage : plan_->targets->storages()) {
    if (absl::Status status = undo_->KeepWhole(storage); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status ReloadSession::KeepOther(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  if (undo_ == nullptr || !IsCalling()) return absl::OkStatus();
  const c10::NoGradGuard no_grad;
  // Not the tensor itself, which leads to the object that a host sees. The call still runs: an
  // error is told when it has ended.
  return Attempt([&] { return undo_->KeepWhole(BytesOf(tensor.storage())); });
}

absl::StatusOr<ReloadSession::Call> ReloadSession::TakeFallbackCall() {
  return Guarded([&]() -> absl::StatusOr<Call> {
    Call call;
    if (state_ != SessionState::kActive || collection_ == nullptr || call_taken_) return call;
    const c10::NoGradGuard no_grad;
    if (absl::Status status = EnsureBegun(); !status.ok()) return Fail(std::move(status));
    if (absl::Status status = KeepForFallbackCall(); !status.ok()) return Fail(std::move(status));
    call_taken_ = true;
    for (auto& [entry, tensor] : collection_->Take()) {
      call.emplace_back(NameOf(entry), std::move(tensor));
    }
    return call;
  });
}

absl::Status ReloadSession::FallbackCallDone(const std::string& error,
                                             std::vector<TargetRegion> written,
                                             std::span<const LiveTarget> current) {
  return Guarded([&]() -> absl::Status {
    const bool was_calling = IsCalling();
    call_ended_ = call_taken_;
    if (absl::Status status = CheckLocked(SessionEvent::kLoad); !status.ok()) return status;
    if (!was_calling) return absl::InternalError("no fallback call was taken");
    call_done_ = error.empty();
    if (undo_ != nullptr && call_done_) undo_->DropUnshared();
    call_written_ = std::move(written);
    if (!error.empty()) {
      return Fail(absl::FailedPreconditionError(absl::StrCat(
          "`load_weights`, called with the fallback names of the plan, raised ", error)));
    }
    if (absl::Status status = plan_->layout.Check(current); !status.ok()) {
      return Fail(std::move(status));
    }
    // What a plan can cover it will have covered when the update ends: it waits for that.
    WrittenBytes covered = WrittenBytes::OfPlan(plan_->plan());
    for (const TargetRegion& region : call_written_) covered.Add(region.storage, region.layout);
    const auto targets = plan_->plan().declared_targets();
    absl::Status status = CheckRequiredWritten(targets, covered, required_);
    if (status.ok()) status = undefined_.CheckCovered(targets, covered);
    return status.ok() ? status : Fail(std::move(status));
  });
}

}  // namespace loadplan
