#include "transfer/store_thread.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "lifecycle/attempt.h"

namespace loadplan {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kLastWait{1000};

struct Request {
  StoreThread::Call call;
  bool is_done = false;
  absl::Status status;
};

}  // namespace

struct StoreThread::Shared {
  explicit Shared(c10::intrusive_ptr<c10d::Store> its) : store(std::move(its)) {}

  const c10::intrusive_ptr<c10d::Store> store;
  std::mutex mutex;
  std::condition_variable wanted;  // something to do
  std::condition_variable done;    // a request, or the thread
  std::deque<std::shared_ptr<Request>> requests;
  Look look;
  milliseconds interval{0};
  Clock::time_point next_look;
  bool stop = false;
  bool has_ended = false;
};

StoreThread::StoreThread(c10::intrusive_ptr<c10d::Store> store)
    : shared_(std::make_shared<Shared>(std::move(store))) {}

StoreThread::~StoreThread() {
  std::unique_lock lock(shared_->mutex);
  shared_->stop = true;
  shared_->wanted.notify_all();
  // It may be in a call that never ends. It needs nothing of this object.
  if (has_begun_) shared_->done.wait_for(lock, kLastWait, [&] { return shared_->has_ended; });
}

absl::Status StoreThread::Begin() {
  if (has_begun_) return absl::OkStatus();
  return Attempt("a thread for the store of the process group", [&] {
    std::thread([shared = shared_] { Run(shared); }).detach();
    has_begun_ = true;
  });
}

absl::Status StoreThread::Do(milliseconds timeout, Call call) {
  if (!Begin().ok()) return Attempt([&] { call(*shared_->store); });
  const auto request = std::make_shared<Request>(Request{std::move(call), false, {}});
  std::unique_lock lock(shared_->mutex);
  shared_->requests.push_back(request);
  shared_->wanted.notify_all();
  if (!shared_->done.wait_for(lock, timeout, [&] { return request->is_done; })) {
    return absl::DeadlineExceededError("the store of the process group does not answer");
  }
  return request->status;
}

absl::Status StoreThread::Repeat(milliseconds interval, Look look) {
  if (absl::Status status = Begin(); !status.ok()) return status;
  const std::lock_guard lock(shared_->mutex);
  shared_->look = std::move(look);
  shared_->interval = interval;
  shared_->next_look = Clock::now() + interval;
  shared_->wanted.notify_all();
  return absl::OkStatus();
}

void StoreThread::Rest() {
  const std::lock_guard lock(shared_->mutex);
  shared_->look = nullptr;
}

void StoreThread::Run(const std::shared_ptr<Shared>& shared) {
  std::unique_lock lock(shared->mutex);
  while (!shared->stop) {
    if (!shared->requests.empty()) {
      const std::shared_ptr<Request> request = std::move(shared->requests.front());
      shared->requests.pop_front();
      lock.unlock();
      absl::Status status = Attempt([&] { request->call(*shared->store); });
      request->call = nullptr;
      lock.lock();
      request->status = std::move(status);
      request->is_done = true;
      shared->done.notify_all();
    } else if (shared->look == nullptr) {
      shared->wanted.wait(lock);
    } else if (Clock::now() < shared->next_look) {
      shared->wanted.wait_until(lock, shared->next_look);
    } else {
      const Look look = shared->look;
      lock.unlock();
      const bool goes_on = look(*shared->store);
      lock.lock();
      shared->next_look = Clock::now() + shared->interval;
      if (!goes_on) shared->look = nullptr;
    }
  }
  shared->has_ended = true;
  shared->done.notify_all();
}

}  // namespace loadplan
