#include "lifecycle/session_state.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace loadplan {
namespace {

struct Transition {
  SessionState state;
  SessionEvent event;
  std::string_view refusal;  // empty: allowed
};

constexpr Transition kTransitions[] = {
    {SessionState::kIdle, SessionEvent::kStart, ""},
    {SessionState::kIdle, SessionEvent::kLoad,
     "`load_planned` needs an active reload; call `start_reload` first"},
    {SessionState::kIdle, SessionEvent::kPlan,
     "`plan_loads` needs an active reload of this model; call it between `start_reload` and "
     "`finish_reload`"},
    {SessionState::kIdle, SessionEvent::kReport,
     "`delivered` needs an active reload; call `start_reload` first"},
    {SessionState::kIdle, SessionEvent::kFinish,
     "`finish_reload` has nothing to finish; call `start_reload` first"},
    {SessionState::kIdle, SessionEvent::kAbort,
     "`abort_reload` has nothing to abort: no reload is active"},
    {SessionState::kActive, SessionEvent::kStart,
     "`start_reload` was called before; end the active reload with `finish_reload` or "
     "`abort_reload` first"},
    {SessionState::kActive, SessionEvent::kPlan, ""},
    {SessionState::kActive, SessionEvent::kLoad, ""},
    {SessionState::kActive, SessionEvent::kReport, ""},
    {SessionState::kActive, SessionEvent::kFinish, ""},
    {SessionState::kActive, SessionEvent::kAbort, ""},
    {SessionState::kFailed, SessionEvent::kStart, ""},
    {SessionState::kFailed, SessionEvent::kLoad,
     "`load_planned` cannot go on after a failure; call `start_reload` and send a complete update"},
    {SessionState::kFailed, SessionEvent::kPlan,
     "`plan_loads` needs an active reload of this model, and the last one failed; call "
     "`start_reload` first"},
    {SessionState::kFailed, SessionEvent::kReport,
     "`delivered` cannot go on after a failure; call `start_reload` and send a complete update"},
    {SessionState::kFailed, SessionEvent::kFinish,
     "`finish_reload` cannot finish a failed update; call `start_reload` and send a complete "
     "update"},
    {SessionState::kFailed, SessionEvent::kAbort,
     "`abort_reload` cannot undo a failed update; call `start_reload` and send a complete update"},
};

}  // namespace

std::string_view ToString(SessionState state) {
  switch (state) {
    case SessionState::kIdle:
      return "idle";
    case SessionState::kActive:
      return "active";
    case SessionState::kFailed:
      return "failed";
  }
  return "unknown";
}

std::string_view ToString(SessionEvent event) {
  switch (event) {
    case SessionEvent::kStart:
      return "start_reload";
    case SessionEvent::kLoad:
      return "load_planned";
    case SessionEvent::kPlan:
      return "plan_loads";
    case SessionEvent::kReport:
      return "delivered";
    case SessionEvent::kFinish:
      return "finish_reload";
    case SessionEvent::kAbort:
      return "abort_reload";
  }
  return "unknown";
}

absl::Status CheckTransition(SessionState state, SessionEvent event) {
  for (const Transition& transition : kTransitions) {
    if (transition.state != state || transition.event != event) continue;
    if (transition.refusal.empty()) return absl::OkStatus();
    return absl::FailedPreconditionError(std::string(transition.refusal));
  }
  return absl::InternalError("a session event without a transition");
}

absl::Status CheckWhileFinishing(SessionEvent event) {
  if (event == SessionEvent::kFinish || event == SessionEvent::kAbort) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("`", std::string(ToString(event)),
                   "` was called while `finish_reload` runs the hooks of this update; call it "
                   "after that"));
}

absl::Status CheckWhileCalling(SessionEvent event) {
  // A call that never comes back must not keep the session for ever.
  if (event == SessionEvent::kAbort || event == SessionEvent::kPlan) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("`", std::string(ToString(event)),
                   "` was called while `load_weights` runs with the fallback names of this update; "
                   "call it after that"));
}

}  // namespace loadplan
