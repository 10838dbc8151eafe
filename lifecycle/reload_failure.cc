// ReloadSession, what an update leaves that did not end well, and what is told of it.
#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lifecycle/annotate.h"
#include "lifecycle/reload_session.h"

namespace loadplan {
namespace {

constexpr std::size_t kNamesInMessage = 10;

double Now() {
  const auto since_epoch = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since_epoch).count();
}

}  // namespace

absl::Status ReloadSession::Abort() {
  const std::lock_guard lock(mutex_);
  absl::Status status = CheckEvent(SessionEvent::kAbort);
  if (!status.ok()) return status;
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

absl::Status ReloadSession::CheckEvent(SessionEvent event) const {
  absl::Status status = CheckTransition(state_, event);
  if (status.ok() || error_.empty()) return status;
  return Annotate(status, absl::StrCat(" (it failed with: ", error_, ")"));
}

// "`a`, `b` and 7 more".
std::string ReloadSession::Quoted(std::span<const std::int32_t> entries) const {
  const std::span<const std::int32_t> shown =
      entries.first(std::min(entries.size(), kNamesInMessage));
  std::string text = absl::StrJoin(shown, ", ", [&](std::string* out, std::int32_t entry) {
    absl::StrAppend(out, "`", NameOf(entry), "`");
  });
  if (entries.size() > shown.size()) {
    absl::StrAppend(&text, " and ", entries.size() - shown.size(), " more");
  }
  return text;
}

std::string ReloadSession::LandedText() const {
  if (arrived_.empty()) return "nothing had landed";
  const bool waits = collection_ != nullptr && collection_->size() > 0 && !eager_called_;
  const char* verb = waits ? " had arrived: " : " had landed: ";
  return absl::StrCat(arrived_.size(), " of ", landed_.size(), " names", verb, Quoted(arrived_));
}

absl::Status ReloadSession::Fail(absl::Status status) {
  status = Annotate(status, absl::StrCat("; ", LandedText(),
                                         wrote_ ? "; the weights are undefined until a complete "
                                                  "new update"
                                                : ""));
  error_ = std::string(status.message());
  if (wrote_) MarkUndefined();
  executor_.reset();
  staging_.reset();
  collection_.reset();
  open_.clear();
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

double ReloadSession::SecondsSince(double then) { return Now() - then; }

}  // namespace loadplan
