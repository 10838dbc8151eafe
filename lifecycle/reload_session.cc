#include "lifecycle/reload_session.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>

#include "absl/strings/str_cat.h"
#include "lifecycle/annotate.h"
#include "lifecycle/arrival.h"
#include "lifecycle/update_checks.h"

namespace loadplan {

absl::Status ReloadSession::Start(std::vector<std::string> required) {
  const std::lock_guard lock(mutex_);
  absl::Status status = CheckEvent(SessionEvent::kStart);
  if (!status.ok()) return status;
  Clear();
  required_ = std::move(required);
  Enter(SessionState::kActive);
  return absl::OkStatus();
}

absl::Status ReloadSession::Begin(std::shared_ptr<const BoundPlan> plan,
                                  std::span<const LiveTarget> current) {
  const std::lock_guard lock(mutex_);
  absl::Status status = CheckEvent(SessionEvent::kLoad);
  if (!status.ok()) return status;
  if (plan_ == plan) return absl::OkStatus();
  if (plan_ != nullptr) {
    return absl::FailedPreconditionError(
        "`load_planned` was called with another plan before in this reload; finish or abort it "
        "first");
  }
  if (status = plan->layout.Check(current); !status.ok()) return status;
  if (status = plan->premises.Check(*plan->traced, *plan->targets); !status.ok()) return status;
  if (status = CheckRequired(plan->plan(), required_); !status.ok()) return status;
  if (status = CheckUndefined(plan->plan(), undefined_); !status.ok()) return status;
  if (staging_spec_.has_value()) {
    absl::StatusOr<std::unique_ptr<LayerStaging>> staging =
        LayerStaging::Create(plan->traced, plan->targets, *staging_spec_);
    if (!staging.ok()) return staging.status();
    staging_ = *std::move(staging);
  }
  if (plan->plan().has_fallbacks()) {
    const auto& storages = plan->targets->storages();
    // Where no target has memory (meta), checkpoint tensors keep to the CPU.
    const bool has_memory = !storages.empty() && !storages.front().is_meta();
    at::Device device = has_memory ? storages.front().device() : at::Device(at::kCPU);
    if (staging_ != nullptr) device = staging_->device();
    collection_ = std::make_unique<EagerCollection>(plan->plan(), device);
  }
  executor_ = std::make_unique<PlanExecutor>(plan->traced, plan->targets, staging_.get());
  landed_.assign(plan->plan().sources().size(), false);
  plan_ = std::move(plan);
  return absl::OkStatus();
}

bool ReloadSession::HasPlan(const BoundPlan* plan) const {
  const std::lock_guard lock(mutex_);
  return state_ == SessionState::kActive && plan_ != nullptr &&
         (plan == nullptr || plan_.get() == plan);
}

absl::Status ReloadSession::Deliver(std::string_view name, const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  return DeliverLocked(name, tensor);
}

absl::Status ReloadSession::Deliver(std::span<const std::string> names,
                                    std::span<const at::Tensor> tensors) {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (absl::Status status = DeliverLocked(names[i], tensors[i]); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::int32_t> ReloadSession::FindArriving(std::string_view name) const {
  const std::optional<std::int32_t> entry = plan_->plan().Find(name);
  if (!entry.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("`", std::string(name),
                     "` arrived but was not declared when the plan was made; declare it and plan "
                     "again, or do not send it"));
  }
  if (has_landed(*entry) || open_.contains(*entry)) {
    return absl::InvalidArgumentError(
        absl::StrCat("`", std::string(name), "` arrived twice in one update; send each name once"));
  }
  return *entry;
}

absl::StatusOr<std::int32_t> ReloadSession::CheckArrival(std::string_view name,
                                                         const at::Tensor& tensor) const {
  const absl::StatusOr<std::int32_t> entry = FindArriving(name);
  if (!entry.ok()) return entry;
  const bool needs_memory =
      plan_->plan().entries()[static_cast<std::size_t>(*entry)].kind != EntryKind::kUnneeded;
  absl::Status status = CheckDeclared(plan_->plan().sources()[static_cast<std::size_t>(*entry)],
                                      tensor, needs_memory);
  if (!status.ok()) return status;
  return *entry;
}

absl::Status ReloadSession::EnsureBegun() {
  if (begun_ || executor_ == nullptr) return absl::OkStatus();
  begun_ = true;
  // Programs that wait for no name write at once.
  wrote_ = wrote_ || (staging_ == nullptr && !plan_->plan().programs().empty());
  return executor_->Begin();
}

absl::Status ReloadSession::DeliverLocked(std::string_view name, const at::Tensor& tensor) {
  absl::Status status = CheckEvent(SessionEvent::kLoad);
  if (!status.ok()) return status;
  if (plan_ == nullptr) return absl::InternalError("Deliver before Begin");
  absl::StatusOr<std::int32_t> entry = CheckArrival(name, tensor);
  if (!entry.ok()) return Fail(entry.status());
  const c10::NoGradGuard no_grad;
  if (KindOf(*entry) == EntryKind::kFallback) {
    try {
      collection_->Add(*entry, tensor);
    } catch (const std::exception& error) {
      return Fail(absl::InternalError(
          absl::StrCat("`", std::string(name), "` could not be kept: ", error.what())));
    }
    eager_nbytes_ += static_cast<Index>(tensor.nbytes());
  } else {
    if (status = EnsureBegun(); !status.ok()) return Fail(status);
    wrote_ = wrote_ || WritesLive(*entry);
    if (status = executor_->Deliver(*entry, tensor); !status.ok()) {
      return Fail(Annotate(status, absl::StrCat("; `", std::string(name), "` landed in part")));
    }
  }
  Land(*entry);
  return absl::OkStatus();
}

absl::Status ReloadSession::ReportDelivered(std::string_view name) {
  const std::lock_guard lock(mutex_);
  absl::Status status = CheckEvent(SessionEvent::kLoad);
  if (!status.ok()) return status;
  if (plan_ == nullptr) return absl::InternalError("ReportDelivered before Begin");
  const std::optional<std::int32_t> entry = plan_->plan().Find(name);
  if (!entry.has_value()) {
    return Fail(absl::InvalidArgumentError(
        absl::StrCat("`", std::string(name), "` was reported as delivered but was not declared")));
  }
  if (has_landed(*entry) || open_.contains(*entry)) {
    return Fail(absl::InvalidArgumentError(
        absl::StrCat("`", std::string(name), "` was delivered twice in one update")));
  }
  if (!plan_->plan().GetDest(*entry).has_value()) {
    return Fail(absl::InvalidArgumentError(
        absl::StrCat("`", std::string(name),
                     "` has no destination that an engine could have "
                     "written; send the whole tensor to `load_planned`")));
  }
  reported_ = true;
  wrote_ = true;
  Land(*entry);
  return absl::OkStatus();
}

bool ReloadSession::AllFallbacksArrived() const {
  const auto& entries = plan_->plan().entries();
  return collection_->size() == static_cast<std::size_t>(std::ranges::count(
                                    entries, EntryKind::kFallback, &PlanEntry::kind));
}

bool ReloadSession::EagerReady() const {
  const std::lock_guard lock(mutex_);
  if (state_ != SessionState::kActive || collection_ == nullptr || eager_called_) return false;
  return AllFallbacksArrived();
}

bool ReloadSession::NeedsEagerCall() const {
  const std::lock_guard lock(mutex_);
  return state_ == SessionState::kActive && collection_ != nullptr && !eager_called_ &&
         collection_->size() > 0;
}

std::vector<std::pair<std::string, at::Tensor>> ReloadSession::TakeEagerCall() {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<std::string, at::Tensor>> call;
  if (collection_ == nullptr || eager_called_) return call;
  eager_called_ = true;
  wrote_ = wrote_ || staging_ == nullptr;
  if (absl::Status status = EnsureBegun(); !status.ok()) return call;
  for (auto& [entry, tensor] : collection_->Take()) {
    call.emplace_back(NameOf(entry), std::move(tensor));
  }
  return call;
}

absl::Status ReloadSession::EagerDone(const std::string& error,
                                      std::span<const LiveTarget> current) {
  const std::lock_guard lock(mutex_);
  if (!error.empty()) {
    return Fail(absl::FailedPreconditionError(absl::StrCat(
        "`load_weights`, called with the fallback names of the plan, raised ", error)));
  }
  absl::Status status = plan_->layout.Check(current);
  return status.ok() ? status : Fail(status);
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
  plan_.reset();
  executor_.reset();
  staging_.reset();
  staging_spec_.reset();
  collection_.reset();
  open_.clear();
  landed_.clear();
  arrived_.clear();
  error_.clear();
  begun_ = wrote_ = reported_ = eager_called_ = prepared_ = false;
  eager_nbytes_ = 0;
}

}  // namespace loadplan
