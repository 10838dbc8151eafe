// ThreadSession: the session that a thread takes part in; the session counts its threads.
#ifndef LOADPLAN_BACKEND_THREAD_SESSION_H_
#define LOADPLAN_BACKEND_THREAD_SESSION_H_

#include <memory>
#include <utility>

#include "backend/trace_session.h"

namespace loadplan {

// For a thread_local: a thread that ends leaves its session.
class ThreadSession {
 public:
  ~ThreadSession() { Set(nullptr); }
  TraceSession* get() const { return session_.get(); }
  void Set(std::shared_ptr<TraceSession> session) {
    if (session_ != nullptr) session_->LeftByThread();
    session_ = std::move(session);
  }

 private:
  std::shared_ptr<TraceSession> session_;
};

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_THREAD_SESSION_H_
