// Digests of what a log refers to by number: operators with their arguments, captured values.
#ifndef LOADPLAN_BACKEND_CONTENT_DIGESTS_H_
#define LOADPLAN_BACKEND_CONTENT_DIGESTS_H_

#include "backend/trace_session.h"
#include "plan/pass_writes.h"

namespace loadplan {

// Refers to `session`, whose pass has ended.
ContentDigests DigestsOf(const TraceSession& session);

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_CONTENT_DIGESTS_H_
