// StoreThread: calls of a c10d store that come back.
#ifndef LOADPLAN_TRANSFER_STORE_THREAD_H_
#define LOADPLAN_TRANSFER_STORE_THREAD_H_

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>

#include "absl/status/status.h"

namespace loadplan {

// A store that lives in a process which was stopped, or on a machine that is gone, answers nobody,
// and its clients wait without end. So a thread makes all calls of it, and others wait for the
// thread no longer than they mean to.
//
// A call may be made, or end, after the one who wanted it is gone: it owns what it touches.
//
//   StoreThread thread(store);
//   auto count = std::make_shared<std::int64_t>();
//   thread.Do(std::chrono::seconds(5), [=](c10d::Store& store) { *count = store.add("key", 1); });
class StoreThread {
 public:
  using Call = std::function<void(c10d::Store&)>;

  explicit StoreThread(c10::intrusive_ptr<c10d::Store> store);
  // Waits a moment for a call that is under way, then leaves the thread to it.
  ~StoreThread();
  StoreThread(const StoreThread&) = delete;
  StoreThread& operator=(const StoreThread&) = delete;

  // Not in the constructor: a thread that cannot be had is an error like others.
  absl::Status Begin();

  // What `call` raises, as a status. DeadlineExceeded where it has not ended after `timeout`; it
  // may be made later then, or be under way. Without a thread the caller makes it, and waits.
  absl::Status Do(std::chrono::milliseconds timeout, Call call);

  // Makes `call` now and then until Rest, or until it gives false.
  using Look = std::function<bool(c10d::Store&)>;
  absl::Status Repeat(std::chrono::milliseconds interval, Look look);
  // `look` does not begin after this.
  void Rest();

 private:
  struct Shared;
  static void Run(const std::shared_ptr<Shared>& shared);

  const std::shared_ptr<Shared> shared_;
  bool has_begun_ = false;
};

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_STORE_THREAD_H_
