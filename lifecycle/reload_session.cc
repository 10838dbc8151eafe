#include "lifecycle/reload_session.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <exception>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lifecycle/arrival.h"
#include "lifecycle/update_checks.h"

namespace loadplan {
namespace {

constexpr std::size_t kNamesInMessage = 10;

double Now() {
  const auto since_epoch = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since_epoch).count();
}

// "`a`, `b` and 7 more".
template <typename NameOf>
std::string Quoted(std::span<const std::int32_t> entries, NameOf name_of) {
  const std::span<const std::int32_t> shown =
      entries.first(std::min(entries.size(), kNamesInMessage));
  std::string text = absl::StrJoin(shown, ", ", [&](std::string* out, std::int32_t entry) {
    absl::StrAppend(out, "`", name_of(entry), "`");
  });
  if (entries.size() > shown.size()) {
    absl::StrAppend(&text, " and ", entries.size() - shown.size(), " more");
  }
  return text;
}

absl::Status Annotate(const absl::Status& status, const std::string& suffix) {
  return absl::Status(status.code(), absl::StrCat(status.message(), suffix));
}

}  // namespace

absl::Status ReloadSession::Start(std::vector<std::string> required) {
  const std::lock_guard lock(mutex_);
  absl::Status status = CheckTransition(state_, SessionEvent::kStart);
  if (!status.ok()) return status;
  Clear();
  required_ = std::move(required);
  Enter(SessionState::kActive);
  return absl::OkStatus();
}

absl::Status ReloadSession::Begin(std::shared_ptr<const BoundPlan> plan,
                                  std::span<const LiveTarget> current) {
  const std::lock_guard lock(mutex_);
  absl::Status status = CheckTransition(state_, SessionEvent::kLoad);
  if (!status.ok()) {
    return error_.empty() ? status
                          : Annotate(status, absl::StrCat(" (it failed with: ", error_, ")"));
  }
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
  if (plan->plan().has_fallbacks()) {
    const auto& storages = plan->targets->storages();
    // Where no target has memory (meta), checkpoint tensors keep to the CPU.
    const bool has_memory = !storages.empty() && !storages.front().is_meta();
    collection_ = std::make_unique<EagerCollection>(
        plan->plan(), has_memory ? storages.front().device() : at::Device(at::kCPU));
  }
  executor_ = std::make_unique<PlanExecutor>(plan->traced, plan->targets);
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

absl::StatusOr<std::int32_t> ReloadSession::CheckArrival(std::string_view name,
                                                         const at::Tensor& tensor) const {
  const std::optional<std::int32_t> entry = plan_->plan().Find(name);
  if (!entry.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("`", std::string(name),
                     "` arrived but was not declared when the plan was made; declare it and plan "
                     "again, or do not send it"));
  }
  if (has_landed(*entry)) {
    return absl::InvalidArgumentError(
        absl::StrCat("`", std::string(name), "` arrived twice in one update; send each name once"));
  }
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
  wrote_ = wrote_ || !plan_->plan().programs().empty();
  return executor_->Begin();
}

absl::Status ReloadSession::DeliverLocked(std::string_view name, const at::Tensor& tensor) {
  absl::Status status = CheckTransition(state_, SessionEvent::kLoad);
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
    wrote_ = wrote_ || KindOf(*entry) != EntryKind::kUnneeded;
    if (status = executor_->Deliver(*entry, tensor); !status.ok()) {
      return Fail(Annotate(status, absl::StrCat("; `", std::string(name), "` landed in part")));
    }
  }
  Land(*entry);
  return absl::OkStatus();
}

absl::Status ReloadSession::ReportDelivered(std::string_view name) {
  const std::lock_guard lock(mutex_);
  absl::Status status = CheckTransition(state_, SessionEvent::kLoad);
  if (!status.ok()) return status;
  if (plan_ == nullptr) return absl::InternalError("ReportDelivered before Begin");
  const std::optional<std::int32_t> entry = plan_->plan().Find(name);
  if (!entry.has_value()) {
    return Fail(absl::InvalidArgumentError(
        absl::StrCat("`", std::string(name), "` was reported as delivered but was not declared")));
  }
  if (has_landed(*entry)) {
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
  wrote_ = true;
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

absl::StatusOr<ReloadSession::Names> ReloadSession::PartialNames(
    const std::vector<std::string>& partial) const {
  Names names;
  for (const std::string& name : partial) {
    const std::optional<std::int32_t> entry = plan_->plan().Find(name);
    if (!entry.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("`partial` lists `", name, "`, which was not declared"));
    }
    names.push_back(*entry);
  }
  std::ranges::sort(names);
  return names;
}

ReloadSession::Names ReloadSession::Missing(const std::optional<Names>& partial) const {
  // Destinations were handed out and nothing is reported: what could have been written
  // through them may have been.
  const bool trusts_engine = plan_->gave_destinations && !reported_;
  const auto is_missing = [&](std::int32_t entry) {
    if (has_landed(entry)) return false;
    if (plan_->plan().entries()[static_cast<std::size_t>(entry)].kind == EntryKind::kUnneeded) {
      return false;
    }
    return !(trusts_engine && plan_->plan().GetDest(entry).has_value());
  };
  Names missing;
  if (partial.has_value()) {
    std::ranges::copy_if(*partial, std::back_inserter(missing), is_missing);
    return missing;
  }
  for (std::int32_t entry = 0; entry < static_cast<std::int32_t>(landed_.size()); ++entry) {
    if (is_missing(entry)) missing.push_back(entry);
  }
  return missing;
}

absl::Status ReloadSession::PrepareFinish(const std::optional<std::vector<std::string>>& partial,
                                          std::span<const LiveTarget> current) {
  const std::lock_guard lock(mutex_);
  absl::Status status = CheckTransition(state_, SessionEvent::kFinish);
  if (!status.ok()) {
    return error_.empty() ? status
                          : Annotate(status, absl::StrCat(" (it failed with: ", error_, ")"));
  }
  if (plan_ == nullptr) {
    if (!required_.empty() || !undefined_.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("nothing was loaded in this reload, but ",
                       required_.empty() ? "a failed update has to be made good"
                                         : absl::StrCat("`", required_.front(), "` is required"),
                       "; call `load_planned` before `finish_reload`"));
    }
    prepared_ = true;
    return absl::OkStatus();
  }
  std::optional<Names> selected;
  if (partial.has_value()) {
    if (!undefined_.empty()) {
      return absl::FailedPreconditionError(
          "`partial` after a failed update would leave weights undefined; send a complete update");
    }
    absl::StatusOr<Names> names = PartialNames(*partial);
    if (!names.ok()) return names.status();
    for (const std::int32_t entry : arrived_) {
      if (std::ranges::binary_search(*names, entry)) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "`", NameOf(entry), "` arrived but `partial` does not list it; list what was sent"));
    }
    if (status = CheckWhole(plan_->plan(), *names); !status.ok()) return status;
    if (collection_ != nullptr && collection_->size() > 0 && !AllFallbacksArrived()) {
      return absl::FailedPreconditionError(
          "`partial` lists some fallback names and not all: they go through the loader in one "
          "call; send "
          "all of them or none");
    }
    selected = std::move(*names);
  }
  const Names missing = Missing(selected);
  if (!missing.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(missing.size(), " planned name(s) did not arrive: ",
                     Quoted(missing, [&](std::int32_t entry) { return NameOf(entry); }),
                     "; send them, or name what was sent in `partial`; ", LandedText()));
  }
  if (!begun_ && executor_ != nullptr && plan_->gave_destinations &&
      PlanExecutor::ReadsLiveBytes(plan_->plan())) {
    return absl::FailedPreconditionError(
        "the plan reads live bytes before it writes them, and destinations were written without "
        "`load_planned`; load through `load_planned`");
  }
  if (!eager_called_) {
    if (status = plan_->layout.Check(current); !status.ok()) {
      return wrote_ ? Fail(status) : status;
    }
  }
  prepared_ = true;
  return absl::OkStatus();
}

absl::StatusOr<Receipt> ReloadSession::Finish() {
  const std::lock_guard lock(mutex_);
  absl::Status status = CheckTransition(state_, SessionEvent::kFinish);
  if (!status.ok()) return status;
  if (!prepared_) return absl::InternalError("Finish before PrepareFinish");
  if (collection_ != nullptr && collection_->size() > 0 && !eager_called_) {
    return absl::FailedPreconditionError(
        "the call of load_weights with the fallback names has not been made");
  }
  Receipt receipt;
  if (executor_ != nullptr) {
    const c10::NoGradGuard no_grad;
    if (status = EnsureBegun(); !status.ok()) return Fail(status);
    wrote_ = true;
    if (status = executor_->Finish(); !status.ok()) return Fail(status);
    receipt.nbytes = executor_->written_nbytes();
  }
  receipt.nbytes += eager_nbytes_;
  for (const std::int32_t entry : arrived_) receipt.names.push_back(NameOf(entry));
  receipt.seconds = Now() - since_;
  undefined_.clear();
  Clear();
  Enter(SessionState::kIdle);
  return receipt;
}

absl::Status ReloadSession::Abort() {
  const std::lock_guard lock(mutex_);
  absl::Status status = CheckTransition(state_, SessionEvent::kAbort);
  if (!status.ok()) {
    return error_.empty() ? status
                          : Annotate(status, absl::StrCat(" (it failed with: ", error_, ")"));
  }
  if (wrote_) {
    MarkUndefined();
    error_ = absl::StrCat("the update was aborted after its first write; ", LandedText());
    Enter(SessionState::kFailed);
    return absl::OkStatus();
  }
  Clear();
  // An update that failed before this one is still to be made good.
  Enter(undefined_.empty() ? SessionState::kIdle : SessionState::kFailed);
  if (!undefined_.empty()) error_ = "an earlier update failed and was not made good";
  return absl::OkStatus();
}

SessionReport ReloadSession::report() const {
  const std::lock_guard lock(mutex_);
  SessionReport report;
  report.state = state_;
  report.since = since_;
  report.error = error_;
  for (const std::int32_t entry : arrived_) report.landed.push_back(NameOf(entry));
  for (const auto& [name, uncovered] : undefined_) report.undefined.push_back(name);
  std::ranges::sort(report.undefined);
  return report;
}

const std::string& ReloadSession::NameOf(std::int32_t entry) const {
  return plan_->plan().sources()[static_cast<std::size_t>(entry)].name;
}

void ReloadSession::Land(std::int32_t entry) {
  landed_[static_cast<std::size_t>(entry)] = true;
  arrived_.push_back(entry);
}

std::string ReloadSession::LandedText() const {
  if (arrived_.empty()) return "nothing had landed";
  const bool waits = collection_ != nullptr && collection_->size() > 0 && !eager_called_;
  const char* verb = waits ? " had arrived: " : " had landed: ";
  return absl::StrCat(arrived_.size(), " of ", landed_.size(), " names", verb,
                      Quoted(arrived_, [&](std::int32_t entry) { return NameOf(entry); }));
}

absl::Status ReloadSession::Fail(absl::Status status) {
  status = Annotate(status, absl::StrCat("; ", LandedText(),
                                         wrote_ ? "; the weights are undefined until a complete "
                                                  "new update"
                                                : ""));
  error_ = std::string(status.message());
  if (wrote_) MarkUndefined();
  executor_.reset();
  collection_.reset();
  Enter(SessionState::kFailed);
  return status;
}

void ReloadSession::MarkUndefined() {
  const LoadPlan& plan = plan_->plan();
  std::vector<Index> uncovered(plan.targets().size(), 0);
  for (const UncoveredTarget& item : plan.uncovered()) {
    uncovered[static_cast<std::size_t>(item.target)] = item.nbytes;
  }
  for (std::size_t i = 0; i < plan.targets().size(); ++i) {
    const TargetTensor& target = plan.targets()[i];
    // What only a fallback writes is not among the plan's bytes: assume all of it.
    const Index left = plan.has_fallbacks() ? 0 : uncovered[i];
    if (left == target.layout.nbytes()) continue;
    const auto [entry, is_new] = undefined_.emplace(target.name, left);
    if (!is_new) entry->second = std::min(entry->second, left);
  }
}

void ReloadSession::Enter(SessionState state) {
  state_ = state;
  since_ = Now();
}

void ReloadSession::Clear() {
  required_.clear();
  plan_.reset();
  executor_.reset();
  collection_.reset();
  landed_.clear();
  arrived_.clear();
  error_.clear();
  begun_ = wrote_ = reported_ = eager_called_ = prepared_ = false;
  eager_nbytes_ = 0;
}

}  // namespace loadplan
