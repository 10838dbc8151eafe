// ReloadSession, what an update leaves that did not end well, and what is told of it.
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "lifecycle/annotate.h"
#include "lifecycle/listed.h"
#include "lifecycle/reload_session.h"

namespace loadplan {
namespace {

double Now() {
  const auto since_epoch = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since_epoch).count();
}

// What an engine may have written: that it reports at times does not say when it writes.
WrittenBytes OfDestinations(const BoundPlan& plan) {
  WrittenBytes written;
  for (const std::int32_t entry : plan.handed_out.Entries()) {
    for (const WriteItem& item : plan.plan().writes_of(entry)) written.Add(item);
  }
  return written;
}

}  // namespace

absl::Status ReloadSession::Abort() {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = CheckLocked(SessionEvent::kAbort); !status.ok()) return status;
    if (executor_ != nullptr) (void)Attempt([&] { return executor_->Flush(); });
    if (undo_ != nullptr) {
      if (absl::Status status = PutBack(); !status.ok()) return FailDamaged(std::move(status), {});
    } else if (WroteLocked()) {
      EnterFailed(absl::StrCat("the update was aborted after its first write; ", LandedText()), {});
      return absl::OkStatus();
    }
    EndUnchanged("");
    return absl::OkStatus();
  });
}

absl::Status ReloadSession::HookFailed(const std::string& error,
                                       std::span<const LiveTarget> current,
                                       std::shared_ptr<const BoundPlan> known) {
  const std::lock_guard lock(mutex_);
  if (plan_ == nullptr) plan_ = std::move(known);
  return Fail(absl::FailedPreconditionError(error), current);
}

void ReloadSession::LeftInLoadFormat(std::span<const LiveTarget> targets) {
  const std::lock_guard lock(mutex_);
  if (state_ == SessionState::kFailed) undefined_.AddTold(targets, /*is_readable=*/true);
}

absl::Status ReloadSession::CheckEvent(SessionEvent event) const {
  const std::lock_guard lock(mutex_);
  return CheckLocked(event);
}

absl::Status ReloadSession::CheckLocked(SessionEvent event) const {
  absl::Status status = CheckTransition(state_, event);
  if (status.ok() && state_ == SessionState::kActive) {
    if (completed_) status = CheckWhileFinishing(event);
    if (IsCalling()) status = CheckWhileCalling(event);
  }
  if (status.ok() || error_.empty() || state_ != SessionState::kFailed) return status;
  return Annotate(status, absl::StrCat(" (it failed with: ", error_, ")"));
}

bool ReloadSession::MayHaveWritten() const {
  const std::lock_guard lock(mutex_);
  return state_ == SessionState::kActive ? WroteLocked() : failed_after_write_;
}

// What a later update has to bring after a hook: the load format of layers whose kernel tensors may
// have been overwritten, or all that the plan writes.
void ReloadSession::AddPlanned(WrittenBytes& written, bool of_processed_layers) const {
  const WrittenBytes all = WrittenBytes::OfPlan(plan_->plan());
  for (StorageId s = 0; s < static_cast<StorageId>(plan_->targets->storages().size()); ++s) {
    if (of_processed_layers && !staging_->WasTaken(s)) continue;
    for (const StridedLayout& region : all.Of(s)) written.Add(s, region);
  }
}

bool ReloadSession::WroteLocked() const {
  const bool call_may_write = IsCalling() && staging_ == nullptr;
  if (layers_overwrote_ || call_may_write || !Written(/*live_only=*/true).empty()) return true;
  return std::ranges::any_of(destinations_, [](const Destinations& destinations) {
    return !destinations.plan->handed_out.Entries().empty();
  });
}

WrittenBytes ReloadSession::Written(bool live_only) const {
  WrittenBytes written;
  if (plan_ == nullptr) return written;
  const LoadPlan& plan = plan_->plan();
  if (live_only && layers_overwrote_) AddPlanned(written, /*of_processed_layers=*/true);
  const auto counts = [&](StorageId storage) { return !live_only || !IsStaged(storage); };
  if (executor_ != nullptr) {
    executor_->ForEachBegun([&](const WriteItem& item) {
      if (counts(item.target)) written.Add(item);
    });
  }
  for (const Names& names : {reported_, trusted_}) {
    for (const std::int32_t entry : names) {
      for (const WriteItem& item : plan.writes_of(entry)) written.Add(item);
    }
  }
  for (const TargetRegion& region : call_written_) {
    if (counts(region.storage)) written.Add(region.storage, region.layout);
  }
  return written;
}

SessionReport ReloadSession::report() const {
  const std::lock_guard lock(mutex_);
  SessionReport report;
  report.state = state_;
  report.since = since_;
  report.error = error_;
  for (const std::int32_t entry : Landed()) report.landed.push_back(NameOf(entry));
  report.undefined = undefined_.targets();
  return report;
}

ReloadSession::Names ReloadSession::Landed() const {
  Names landed;
  std::ranges::copy_if(arrived_, std::back_inserter(landed), [&](std::int32_t entry) {
    return call_done_ || KindOf(entry) != EntryKind::kFallback;
  });
  return landed;
}

std::string ReloadSession::Quoted(std::span<const std::int32_t> entries) const {
  return Listed(entries,
                [this](std::int32_t entry) { return absl::StrCat("`", NameOf(entry), "`"); });
}

std::string ReloadSession::LandedText() const {
  const Names landed = Landed();
  std::string text = landed.empty() ? "nothing had landed"
                                    : absl::StrCat(landed.size(), " of ", landed_.size(),
                                                   " names had landed: ", Quoted(landed));
  if (landed.size() == arrived_.size()) return text;
  Names waiting;
  std::ranges::copy_if(arrived_, std::back_inserter(waiting),
                       [&](std::int32_t entry) { return KindOf(entry) == EntryKind::kFallback; });
  absl::StrAppend(&text, "; ", waiting.size(), " of ", landed_.size(),
                  " names had arrived for load_weights: ", Quoted(waiting));
  return text;
}

absl::Status ReloadSession::Fail(absl::Status status, std::span<const LiveTarget> whole) {
  // What is said to have landed has landed, and nothing comes after the old bytes are back.
  if (executor_ != nullptr) (void)Attempt([&] { return executor_->Flush(); });
  status = Annotate(status, absl::StrCat("; ", LandedText()));
  if (undo_ == nullptr) return FailDamaged(std::move(status), whole);
  const bool wrote = !undo_->empty();
  if (absl::Status back = PutBack(); !back.ok()) {
    return FailDamaged(Annotate(status, absl::StrCat("; ", std::string(back.message()))), whole);
  }
  status = Annotate(status, wrote ? "; the old bytes are back" : "; nothing was written");
  status =
      Annotate(status, undefined_.empty() ? ", and the model is idle as before"
                                          : ", and an earlier failure has still to be made good");
  EndUnchanged(std::string(status.message()));
  return status;
}

absl::Status ReloadSession::PutBack() {
  const c10::NoGradGuard no_grad;
  absl::Status status = undo_->PutBack();
  if (status.ok()) return status;
  return Annotate(status, "; the old bytes could not all be put back");
}

// Without old bytes.
absl::Status ReloadSession::FailDamaged(absl::Status status, std::span<const LiveTarget> whole) {
  const bool wrote = WroteLocked() || !whole.empty();
  status = Annotate(status, wrote ? "; the weights are undefined until a complete new update"
                                  : "; no byte of the model was written");
  EnterFailed(std::string(status.message()), whole);
  return status;
}

void ReloadSession::EnterFailed(std::string error, std::span<const LiveTarget> whole) {
  error_ = std::move(error);
  failed_after_write_ = WroteLocked() || !whole.empty();
  if (failed_after_write_) MarkUndefined(whole);
  executor_.reset();
  staging_.reset();
  collection_.reset();
  undo_.reset();
  open_.clear();
  Enter(SessionState::kFailed);
}

// As if the session had never started.
void ReloadSession::EndUnchanged(std::string error) {
  Clear();
  error_ = std::move(error);
  Enter(undefined_.empty() ? SessionState::kIdle : SessionState::kFailed);
  if (!undefined_.empty() && error_.empty()) {
    error_ = "an earlier update failed and was not made good";
  }
}

void ReloadSession::MarkUndefined(std::span<const LiveTarget> whole) {
  if (plan_ != nullptr) {
    WrittenBytes written = Written(/*live_only=*/true);
    // A call that never came back.
    if (IsCalling() && staging_ == nullptr) {
      written.AddWhole(plan_->plan().declared_targets());
    }
    if (!whole.empty()) AddPlanned(written, /*of_processed_layers=*/false);
    undefined_.Add(plan_->plan().declared_targets(), written);
  }
  for (const auto& [plan, num_kept] : destinations_) {
    undefined_.Add(plan->plan().declared_targets(), OfDestinations(*plan));
  }
  undefined_.AddTold(overwritten_);
  undefined_.AddTold(whole);
}

void ReloadSession::Enter(SessionState state) {
  state_ = state;
  since_ = Now();
}

double ReloadSession::SecondsSince(double then) { return Now() - then; }

}  // namespace loadplan
