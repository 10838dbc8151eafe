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

absl::Status ReloadSession::CheckPartial(const Names& partial) const {
  if (!undefined_.empty()) {
    return absl::FailedPreconditionError(
        "`partial` after a failed update would leave weights undefined; send a complete update");
  }
  for (const std::int32_t entry : arrived_) {
    if (std::ranges::binary_search(partial, entry)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "`", NameOf(entry), "` arrived but `partial` does not list it; list what was sent"));
  }
  if (absl::Status status = CheckWhole(plan_->plan(), partial); !status.ok()) return status;
  if (staging_ != nullptr) {
    if (absl::Status status = staging_->CheckWhole(); !status.ok()) return status;
  }
  if (collection_ != nullptr && collection_->size() > 0 && !AllFallbacksArrived()) {
    return absl::FailedPreconditionError(
        "`partial` lists some fallback names and not all: they go through the loader in one "
        "call; send all of them or none");
  }
  return absl::OkStatus();
}

// Destinations were handed out to an engine that reports nothing: what it could have written
// through them may have been. Not where names that have a place came as tensors: then destinations
// were only looked at.
ReloadSession::Names ReloadSession::Trusted(const std::optional<Names>& among) const {
  Names trusted;
  const auto has_place = [&](std::int32_t entry) {
    return KindOf(entry) == EntryKind::kDirect && plan_->HasPlace(entry);
  };
  if (plan_->is_reported || std::ranges::any_of(arrived_, has_place)) return trusted;
  for (std::int32_t entry = 0; entry < static_cast<std::int32_t>(landed_.size()); ++entry) {
    if (among.has_value() && !std::ranges::binary_search(*among, entry)) continue;
    if (has_place(entry) && plan_->handed_out.Has(entry)) trusted.push_back(entry);
  }
  return trusted;
}

ReloadSession::Names ReloadSession::Missing(const std::optional<Names>& partial,
                                            const Names& trusted) const {
  Names missing;
  for (std::int32_t entry = 0; entry < static_cast<std::int32_t>(landed_.size()); ++entry) {
    if (partial.has_value() && !std::ranges::binary_search(*partial, entry)) continue;
    if (has_landed(entry) || KindOf(entry) == EntryKind::kUnneeded) continue;
    if (!std::ranges::binary_search(trusted, entry)) missing.push_back(entry);
  }
  return missing;
}

absl::Status ReloadSession::PrepareFinish(const std::optional<std::vector<std::string>>& partial,
                                          std::span<const LiveTarget> current) {
  return Guarded([&]() -> absl::Status {
    absl::Status status = CheckLocked(SessionEvent::kFinish);
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
      absl::StatusOr<Names> names = PartialNames(*partial);
      if (!names.ok()) return names.status();
      if (status = CheckPartial(*names); !status.ok()) return status;
      selected = std::move(*names);
    }
    Names trusted = Trusted(selected);
    const Names missing = Missing(selected, trusted);
    if (!missing.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat(missing.size(), " planned name(s) did not arrive: ", Quoted(missing),
                       "; send them, or name what was sent in `partial`; ", LandedText()));
    }
    if (status = plan_->layout.Check(current); !status.ok()) {
      return WroteLocked() ? Fail(std::move(status)) : status;
    }
    // A caller may ask again.
    for (const std::int32_t entry : trusted) {
      const bool is_new = !std::ranges::binary_search(trusted_, entry);
      if (is_new && staging_ != nullptr) staging_->WroteElsewhere(entry);
    }
    trusted_ = std::move(trusted);
    prepared_ = true;
    return absl::OkStatus();
  });
}

absl::Status ReloadSession::CompleteLocked() {
  if (absl::Status status = CheckLocked(SessionEvent::kFinish); !status.ok()) return status;
  if (!prepared_) return absl::InternalError("Complete before PrepareFinish");
  if (collection_ != nullptr && !call_done_ && (call_taken_ || collection_->size() > 0)) {
    return absl::FailedPreconditionError(
        "the call of load_weights with the fallback names has not been made");
  }
  if (executor_ != nullptr) {
    const c10::NoGradGuard no_grad;
    if (absl::Status status = EnsureBegun(); !status.ok()) return Fail(std::move(status));
    if (absl::Status status = executor_->Finish(); !status.ok()) return Fail(std::move(status));
  }
  completed_ = true;
  return absl::OkStatus();
}

absl::Status ReloadSession::Complete() {
  return Guarded(
      [&]() -> absl::Status { return completed_ ? absl::OkStatus() : CompleteLocked(); });
}

absl::StatusOr<Receipt> ReloadSession::Finish() {
  return Guarded([&]() -> absl::StatusOr<Receipt> {
    if (!completed_) {
      if (absl::Status status = CompleteLocked(); !status.ok()) return status;
    }
    Receipt receipt;
    if (plan_ != nullptr) {
      receipt.nbytes = executor_->written_nbytes() + call_nbytes_;
      for (const std::int32_t entry : reported_) {
        for (const WriteItem& item : plan_->plan().writes_of(entry)) {
          receipt.nbytes += item.map.nbytes();
        }
      }
      const bool is_as_planned = executor_->HasBegunAll() && call_written_.empty();
      receipt.coverage =
          is_as_planned ? plan_->WholeCoverage()
                        : Written(/*live_only=*/false).PerTarget(plan_->plan().declared_targets());
    }
    if (staging_ != nullptr) {
      receipt.peak_staging_nbytes = staging_->peak_nbytes();
      receipt.peak_held_nbytes = staging_->peak_held_nbytes();
    }
    receipt.entries = std::move(arrived_);
    receipt.plan = plan_;
    receipt.seconds = SecondsSince(since_);
    undefined_.Clear();
    Clear();
    Enter(SessionState::kIdle);
    return receipt;
  });
}

}  // namespace loadplan
