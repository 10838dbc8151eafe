// ReloadSession, the end of an update: is it complete, and what is written last.
#include <c10/core/GradMode.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "lifecycle/reload_session.h"
#include "lifecycle/update_checks.h"

namespace loadplan {

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
  absl::Status status = CheckEvent(SessionEvent::kFinish);
  if (!status.ok()) return status;
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
  if (!open_.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("`", NameOf(open_.begin()->first),
                     "` arrived in part; send the rest of it before `finish_reload`"));
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
    if (staging_ != nullptr) {
      if (status = staging_->CheckWhole(); !status.ok()) return status;
    }
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
        absl::StrCat(missing.size(), " planned name(s) did not arrive: ", Quoted(missing),
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
  absl::Status status = CheckEvent(SessionEvent::kFinish);
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
  if (staging_ != nullptr) {
    receipt.peak_staging_nbytes = staging_->peak_nbytes();
    receipt.peak_held_nbytes = staging_->peak_held_nbytes();
  }
  for (const std::int32_t entry : arrived_) receipt.names.push_back(NameOf(entry));
  receipt.seconds = SecondsSince(since_);
  undefined_.clear();
  Clear();
  Enter(SessionState::kIdle);
  return receipt;
}

}  // namespace loadplan
