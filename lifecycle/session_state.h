// The states of a reload session and what may happen in each.
#ifndef LOADPLAN_LIFECYCLE_SESSION_STATE_H_
#define LOADPLAN_LIFECYCLE_SESSION_STATE_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"

namespace loadplan {

//             start            finish, abort before the first write
//    idle ------------> active ------------------------------------> idle
//                       |    ^
//      a bad arrival, a |    | start (only for a complete update)
//      failed write,    v    |
//      abort after one  failed
enum class SessionState : std::uint8_t { kIdle, kActive, kFailed };
enum class SessionEvent : std::uint8_t { kStart, kPlan, kLoad, kReport, kFinish, kAbort };

std::string_view ToString(SessionState state);  // "idle", "active", "failed"
std::string_view ToString(SessionEvent event);  // the public function: "start_reload", ...

// FailedPrecondition, with words of its own for each pair that is not allowed.
absl::Status CheckTransition(SessionState state, SessionEvent event);
// The same while every byte is there and hooks run: only to finish or to abort is allowed.
absl::Status CheckWhileFinishing(SessionEvent event);
// The same while the loader's call with the fallback names runs.
absl::Status CheckWhileCalling(SessionEvent event);

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_SESSION_STATE_H_
