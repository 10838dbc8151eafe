#include "lifecycle/reload_session.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "lifecycle/annotate.h"
#include "lifecycle/arrival.h"
#include "lifecycle/update_checks.h"

namespace loadplan {

absl::Status ReloadSession::Start(StartOptions options) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = CheckLocked(SessionEvent::kStart); !status.ok()) return status;
    Clear();
    required_ = std::move(options.required);
    for (auto& plan : options.destinations) {
      destinations_.push_back({std::move(plan)});
    }
    if (options.atomic) undo_ = std::make_unique<UndoLog>(std::move(options.undo));
    Enter(SessionState::kActive);
    for (Destinations& destinations : destinations_) {
      if (absl::Status status = KeepDestinations(destinations); !status.ok()) {
        return Fail(std::move(status));
      }
    }
    return absl::OkStatus();
  });
}

absl::Status ReloadSession::Begin(std::shared_ptr<const BoundPlan> plan,
                                  std::span<const LiveTarget> current) {
  return Guarded([&]() -> absl::Status {
    absl::Status status = CheckLocked(SessionEvent::kLoad);
    if (!status.ok()) return status;
    if (plan_ == plan) return absl::OkStatus();
    if (plan_ != nullptr) {
      return absl::FailedPreconditionError(
          "`load_planned` was called with another plan before in this reload; finish or abort it "
          "first");
    }
    if (status = plan->layout.Check(current); !status.ok()) return status;
    if (status = plan->premises.Check(*plan->traced, *plan->targets); !status.ok()) return status;
    if (status = CheckRequired(*plan->traced, required_); !status.ok()) return status;
    if (status = undefined_.CheckNotRead(plan->plan()); !status.ok()) return status;
    if (!undefined_.empty() && !plan->plan().has_fallbacks()) {
      status = undefined_.CheckCovered(plan->plan().declared_targets(),
                                       WrittenBytes::OfPlan(plan->plan()));
      if (!status.ok()) return status;
    }
    auto batches = ChooseCopyDevice(*plan->targets);
    if (!batches.ok()) return batches.status();
    if (!batches->has_value()) *batches = HostCopyDevice(*plan->targets);
    if (staging_spec_.has_value()) {
      absl::StatusOr<std::unique_ptr<LayerStaging>> staging =
          LayerStaging::Create(plan->traced, plan->targets, *staging_spec_);
      if (!staging.ok()) return staging.status();
      staging_ = *std::move(staging);
    }
    // Where a host did not say so at the start: nothing is kept of what was written before.
    if (status = AddDestinations(plan); !status.ok()) return status;
    if (plan->plan().has_fallbacks()) {
      const auto& storages = plan->targets->storages();
      // Where no target has memory (meta), checkpoint tensors keep to the CPU.
      const bool has_memory = !storages.empty() && !storages.front().is_meta();
      at::Device device = has_memory ? storages.front().device() : at::Device(at::kCPU);
      if (staging_ != nullptr) device = staging_->device();
      collection_ = std::make_unique<EagerCollection>(plan->plan(), device);
    }
    executor_ = std::make_unique<PlanExecutor>(plan->traced, plan->targets, staging_.get());
    executor_->KeepIn(undo_.get());
    if (batches->has_value()) {
      executor_->BatchOn(**batches, plan->on_device.Get(plan->plan(), *plan->targets, **batches));
    }
    landed_.assign(plan->plan().sources().size(), false);
    plan_ = std::move(plan);
    return absl::OkStatus();
  });
}

bool ReloadSession::HasPlan(const BoundPlan* plan) const {
  const std::lock_guard lock(mutex_);
  return state_ == SessionState::kActive && plan_ != nullptr &&
         (plan == nullptr || plan_.get() == plan);
}

std::vector<at::Tensor> ReloadSession::LiveStorages() const {
  const std::lock_guard lock(mutex_);
  return plan_ == nullptr ? std::vector<at::Tensor>() : plan_->targets->storages();
}

absl::Status ReloadSession::Deliver(std::string_view name, const at::Tensor& tensor) {
  return Guarded([&]() -> absl::Status {
    absl::Status status = DeliverLocked(name, tensor);
    return status.ok() ? Launch() : status;
  });
}

absl::Status ReloadSession::Deliver(std::span<const std::string> names,
                                    std::span<const at::Tensor> tensors) {
  return Guarded([&]() -> absl::Status {
    HoldCopies();
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (absl::Status status = DeliverLocked(names[i], tensors[i]); !status.ok()) return status;
    }
    return Launch();
  });
}

void ReloadSession::HoldCopies() {
  if (executor_ != nullptr) executor_->BeginBatch();
}

void ReloadSession::BeginBatch() {
  const std::lock_guard lock(mutex_);
  batching_ = std::this_thread::get_id();
  HoldCopies();
}

absl::Status ReloadSession::EndBatch() {
  return Guarded([&]() -> absl::Status {
    batching_ = {};
    return Launch();
  });
}

absl::Status ReloadSession::Launch() {
  if (executor_ == nullptr || batching_ == std::this_thread::get_id()) return absl::OkStatus();
  absl::Status status = executor_->Flush();
  return status.ok() ? status
                     : Fail(Annotate(status, "; names that came last may not have landed"));
}

absl::StatusOr<std::int32_t> ReloadSession::FindArriving(std::string_view name) const {
  const std::optional<std::int32_t> entry = plan_->plan().Find(name);
  if (!entry.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("`", std::string(name),
                     "` arrived but was not declared when the plan was made; declare it and plan "
                     "again, or do not send it"));
  }
  if (absl::Status status = CheckNotArrived(*entry); !status.ok()) return status;
  return *entry;
}

absl::Status ReloadSession::CheckNotArrived(std::int32_t entry) const {
  if (!has_landed(entry) && (open_.empty() || !open_.contains(entry))) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("`", NameOf(entry), "` arrived twice in one update; send each name once"));
}

absl::Status ReloadSession::CheckArrival(std::int32_t entry, const at::Tensor& tensor) const {
  if (absl::Status status = CheckNotArrived(entry); !status.ok()) return status;
  const bool needs_memory = KindOf(entry) != EntryKind::kUnneeded;
  return CheckDeclared(plan_->plan().sources()[static_cast<std::size_t>(entry)], tensor,
                       needs_memory);
}

absl::Status ReloadSession::EnsureBegun() {
  if (begun_) return absl::OkStatus();
  absl::Status status = Attempt("what the plan takes from before the first write could not be kept",
                                [&] { return executor_->Begin(); });
  begun_ = status.ok();
  return status;
}

absl::Status ReloadSession::DeliverLocked(std::string_view name, const at::Tensor& tensor) {
  absl::Status status = CheckLocked(SessionEvent::kLoad);
  if (!status.ok()) return status;
  if (plan_ == nullptr) return absl::InternalError("Deliver before Begin");
  const absl::StatusOr<std::int32_t> entry = FindArriving(name);
  return entry.ok() ? DeliverEntry(*entry, tensor) : Fail(entry.status());
}

absl::Status ReloadSession::DeliverEntry(std::int32_t entry, const at::Tensor& tensor) {
  absl::Status status = CheckArrival(entry, tensor);
  if (!status.ok()) return Fail(std::move(status));
  const c10::NoGradGuard no_grad;
  if (KindOf(entry) == EntryKind::kFallback) return KeepFallback(entry, tensor);
  if (status = EnsureBegun(); !status.ok()) return Fail(std::move(status));
  status = Attempt([&] { return executor_->Deliver(entry, tensor); });
  if (!status.ok()) {
    return Fail(Annotate(status, absl::StrCat("; `", NameOf(entry), "` landed in part")));
  }
  Land(entry);
  return absl::OkStatus();
}

absl::Status ReloadSession::ReportDelivered(std::string_view name) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = CheckLocked(SessionEvent::kReport); !status.ok()) return status;
    if (plan_ == nullptr) return absl::InternalError("ReportDelivered before Begin");
    const std::optional<std::int32_t> entry = plan_->plan().Find(name);
    if (!entry.has_value()) {
      return Fail(absl::InvalidArgumentError(absl::StrCat(
          "`", std::string(name), "` was reported as delivered but was not declared")));
    }
    if (has_landed(*entry) || open_.contains(*entry)) {
      return Fail(absl::InvalidArgumentError(
          absl::StrCat("`", std::string(name), "` was delivered twice in one update")));
    }
    if (!plan_->HasPlace(*entry)) {
      return Fail(absl::InvalidArgumentError(
          absl::StrCat("`", std::string(name),
                       "` has no destination that an engine could have "
                       "written; send the whole tensor to `load_planned`")));
    }
    plan_->is_reported = true;
    reported_.push_back(*entry);
    if (staging_ != nullptr) staging_->WroteElsewhere(*entry);
    Land(*entry);
    return absl::OkStatus();
  });
}

absl::Status ReloadSession::KeepDestinations(Destinations& destinations) {
  if (undo_ == nullptr) return absl::OkStatus();
  const BoundPlan& plan = *destinations.plan;
  for (const std::int32_t entry : plan.handed_out.Entries(destinations.num_kept)) {
    for (const WriteItem& item : plan.plan().writes_of(entry)) {
      const at::Tensor& storage = plan.targets->storages()[static_cast<std::size_t>(item.target)];
      if (absl::Status status = undo_->KeepWhole(storage); !status.ok()) return status;
    }
    ++destinations.num_kept;
  }
  return absl::OkStatus();
}

absl::Status ReloadSession::HandOut(std::shared_ptr<const BoundPlan> plan) {
  return Guarded([&]() -> absl::Status {
    return state_ == SessionState::kActive ? AddDestinations(std::move(plan)) : absl::OkStatus();
  });
}

absl::Status ReloadSession::AddDestinations(std::shared_ptr<const BoundPlan> plan) {
  auto known = std::ranges::find(destinations_, plan, &Destinations::plan);
  if (known == destinations_.end()) {
    known = destinations_.insert(known, {std::move(plan)});
  }
  absl::Status status = KeepDestinations(*known);
  return status.ok() ? status : Fail(std::move(status));
}

absl::Status ReloadSession::BeforeHook(std::span<const LiveTarget> current) {
  return Guarded([&]() -> absl::Status {
    if (undo_ == nullptr || state_ != SessionState::kActive) return absl::OkStatus();
    const c10::NoGradGuard no_grad;
    for (const LiveTarget& target : current) {
      if (!target.tensor.has_storage()) continue;
      absl::Status status = undo_->KeepWhole(target.tensor);
      if (!status.ok()) return Fail(std::move(status));
    }
    return absl::OkStatus();
  });
}

EntryKind ReloadSession::KindOf(std::int32_t entry) const {
  return plan_->plan().entries()[static_cast<std::size_t>(entry)].kind;
}

const std::string& ReloadSession::NameOf(std::int32_t entry) const {
  return plan_->plan().sources()[static_cast<std::size_t>(entry)].name;
}

void ReloadSession::Land(std::int32_t entry) {
  landed_[static_cast<std::size_t>(entry)] = true;
  arrived_.push_back(entry);
}

void ReloadSession::Clear() {
  required_.clear();
  undo_.reset();
  destinations_.clear();
  plan_.reset();
  executor_.reset();
  staging_.reset();
  staging_spec_.reset();
  collection_.reset();
  open_.clear();
  landed_.clear();
  arrived_.clear();
  overwritten_.clear();
  reported_.clear();
  trusted_.clear();
  error_.clear();
  begun_ = call_taken_ = call_ended_ = call_done_ = prepared_ = completed_ = false;
  layers_overwrote_ = failed_after_write_ = false;
  call_written_.clear();
  call_nbytes_ = 0;
}

}  // namespace loadplan
