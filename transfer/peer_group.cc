#include "transfer/peer_group.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "lifecycle/attempt.h"
#include "lifecycle/byte_copy.h"

namespace loadplan {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kWatchInterval{200};
constexpr int kTag = 0x10ad;  // one for each pair of ranks: it keeps their messages in order

std::string Seconds(milliseconds time) {
  return absl::StrFormat("%.3g s", static_cast<double>(time.count()) / 1000);
}

at::Device DeviceOf(const c10d::ProcessGroup& group) {
  const std::vector<c10::Device> devices = group.getDeviceTypes();
  const bool has_cpu =
      std::ranges::any_of(devices, [](const c10::Device& d) { return d.is_cpu(); });
  return has_cpu || devices.empty() ? at::Device(at::kCPU) : devices.front();
}

}  // namespace

PeerGroup::PeerGroup(c10::intrusive_ptr<c10d::ProcessGroup> group, milliseconds timeout)
    : group_(std::move(group)),
      timeout_(timeout),
      rank_(group_->getRank()),
      size_(group_->getSize()),
      device_(DeviceOf(*group_)),
      store_(group_->getStore()),
      watched_store_(store_) {
  if (device_.is_cpu()) return;
  (void)Attempt([&] { watched_store_ = store_->clone(); });
}

PeerGroup::~PeerGroup() { EndWatch(); }

absl::StatusOr<std::vector<std::vector<std::int64_t>>> PeerGroup::AllGather(
    std::span<const std::int64_t> own) {
  const auto count = static_cast<std::int64_t>(own.size());
  const auto options = at::TensorOptions().dtype(at::kLong);
  at::Tensor mine = at::empty({count}, options);
  std::memcpy(mine.mutable_data_ptr(), own.data(), own.size_bytes());
  std::vector<at::Tensor> inputs = {mine.to(device_)};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (std::int32_t r = 0; r < size_; ++r) {
    outputs.front().push_back(at::empty({count}, options.device(device_)));
  }
  absl::Status status = Attempt(
      absl::StrCat("not all of the ", size_, " ranks came within ", Seconds(timeout_)), [&] {
        c10d::AllgatherOptions gather;
        gather.timeout = timeout_;
        group_->allgather(outputs, inputs, gather)->wait();
      });
  if (!status.ok()) return status;
  std::vector<std::vector<std::int64_t>> result;
  for (const at::Tensor& output : outputs.front()) {
    const at::Tensor values = output.cpu();
    const auto* data = static_cast<const std::int64_t*>(values.const_data_ptr());
    result.emplace_back(data, data + count);
  }
  return result;
}

absl::StatusOr<std::vector<std::vector<std::int64_t>>> PeerGroup::Consult(
    std::span<const std::int64_t> values, const absl::Status& problem, std::string* key) {
  std::vector<std::int64_t> own = {problem.ok() ? 1 : 0, rank_ == 0 ? NextNumber() : 0};
  own.insert(own.end(), values.begin(), values.end());
  own.resize(2 + kMaxConsulted);
  absl::StatusOr<std::vector<std::vector<std::int64_t>>> all = AllGather(own);
  if (!all.ok()) return problem.ok() ? all.status() : problem;
  std::int32_t first = -1;
  *key = absl::StrCat("loadplan/", all->front()[1]);
  for (std::int32_t r = size_; r-- > 0;) {
    std::vector<std::int64_t>& theirs = (*all)[static_cast<std::size_t>(r)];
    if (theirs[0] == 0) first = r;
    theirs.erase(theirs.begin(), theirs.begin() + 2);
  }
  if (first < 0) return all;
  return TellProblem(*key, first, problem);
}

// Keys of an earlier exchange, of this object or another one, are in the store still.
std::int64_t PeerGroup::NextNumber() {
  std::int64_t number = 0;
  (void)Attempt([&] { number = store_->add("loadplan/exchanges", 1); });
  return number;
}

absl::Status PeerGroup::TellProblem(const std::string& key, std::int32_t first,
                                    const absl::Status& own) {
  absl::Status theirs = absl::AbortedError(absl::StrCat("rank ", first, " cannot take part"));
  (void)Attempt([&] {
    const std::string text(own.message());
    if (first == rank_) {
      store_->set(key + "/problem", std::vector<std::uint8_t>(text.begin(), text.end()));
      return;
    }
    store_->wait({key + "/problem"}, timeout_);
    const std::vector<std::uint8_t> read = store_->get(key + "/problem");
    theirs = absl::AbortedError(
        absl::StrCat("rank ", first, ": ", std::string(read.begin(), read.end())));
  });
  return own.ok() ? theirs : own;
}

// Gloo cannot abort a collective, so its wait is not waited in.
absl::Status PeerGroup::AwaitCollective(c10d::Work& work) {
  using std::chrono::microseconds;
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  for (microseconds pause{20}; !work.isCompleted();
       pause = std::min(2 * pause, microseconds{2000})) {
    if (absl::Status status = Interrupted(); !status.ok()) return status;
    if (std::chrono::steady_clock::now() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat("nothing came within ", Seconds(timeout_)));
    }
    std::this_thread::sleep_for(pause);
  }
  work.wait();
  return absl::OkStatus();
}

absl::StatusOr<std::string> PeerGroup::Broadcast(const std::string& own, Index nbytes,
                                                 std::int32_t root) {
  at::Tensor bytes = NewBytes(nbytes, at::kCPU);
  if (root == rank_) std::memcpy(bytes.mutable_data_ptr(), own.data(), own.size());
  std::vector<at::Tensor> tensors = {bytes.to(device_)};
  absl::Status status = Attempt(absl::StrCat("rank ", root, " did not describe its tensors"), [&] {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.timeout = timeout_;
    return AwaitCollective(*group_->broadcast(tensors, options));
  });
  if (!status.ok()) return status;
  bytes = tensors.front().cpu();
  return std::string(static_cast<const char*>(bytes.const_data_ptr()),
                     static_cast<std::size_t>(nbytes));
}

absl::StatusOr<WorkPtr> PeerGroup::Send(const at::Tensor& bytes, std::int32_t to) {
  WorkPtr work;
  absl::Status status = Attempt(absl::StrCat("sending to rank ", to), [&] {
    std::vector<at::Tensor> tensors = {bytes};
    work = group_->send(tensors, to, kTag);
  });
  if (!status.ok()) return status;
  return work;
}

absl::StatusOr<WorkPtr> PeerGroup::Receive(const at::Tensor& bytes, std::int32_t from) {
  WorkPtr work;
  absl::Status status = Attempt(absl::StrCat("receiving from rank ", from), [&] {
    std::vector<at::Tensor> tensors = {bytes};
    work = group_->recv(tensors, from, kTag);
  });
  if (!status.ok()) return status;
  return work;
}

absl::Status PeerGroup::BeginBatch() {
  return Attempt("posting messages", [&] {
    is_batch_ = group_->getBackend(device_.type())->supportsCoalescing();
    if (is_batch_) group_->startCoalescing(device_.type());
  });
}

absl::StatusOr<WorkPtr> PeerGroup::EndBatch() {
  WorkPtr work;
  if (!is_batch_) return work;
  is_batch_ = false;
  absl::Status status =
      Attempt("posting messages", [&] { work = group_->endCoalescing(device_.type()); });
  if (!status.ok()) return status;
  return work;
}

absl::Status PeerGroup::Wait(const WorkPtr& work) {
  if (work == nullptr) return absl::OkStatus();
  std::list<WorkPtr>::iterator place;
  {
    const std::lock_guard lock(mutex_);
    if (!interrupted_.empty()) return absl::AbortedError(interrupted_);
    place = waiting_.insert(waiting_.end(), work);
  }
  bool is_done = false;
  absl::Status status =
      Attempt("a message did not get through", [&] { is_done = work->wait(timeout_); });
  {
    const std::lock_guard lock(mutex_);
    waiting_.erase(place);
  }
  // Somebody else's failure says more than what it does to this rank.
  if (absl::Status interrupted = Interrupted(); !interrupted.ok()) return interrupted;
  if (!status.ok()) return status;
  return is_done ? absl::OkStatus() : absl::AbortedError("a message was aborted");
}

void PeerGroup::BeginWatch(const std::string& key) {
  EndWatch();
  // All ranks have left the exchange before this one.
  if (rank_ == 0 && !key_.empty()) {
    (void)Attempt([&] {
      for (const char* suffix : {"/done", "/left", "/progress"}) store_->deleteKey(key_ + suffix);
    });
  }
  const std::lock_guard lock(mutex_);
  key_ = key;
  interrupted_.clear();
  stop_ = false;
  watcher_ = std::thread([this] { Watch(); });
}

void PeerGroup::EndWatch() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stop_changed_.notify_all();
  if (watcher_.joinable()) watcher_.join();
}

void PeerGroup::Watch() {
  std::int64_t noted = progress_;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      if (stop_changed_.wait_for(lock, kWatchInterval, [this] { return stop_; })) return;
    }
    std::optional<std::string> failure;
    const absl::Status status = Attempt("the store of the process group is gone", [&] {
      if (const std::int64_t now = progress_; now != noted) {
        watched_store_->add(key_ + "/progress", 1);
        noted = now;
      }
      failure = ReadFailure(*watched_store_);
    });
    if (!status.ok()) failure = std::string(status.message());
    if (!failure.has_value()) continue;
    Abort(*failure);
    return;
  }
}

void PeerGroup::Abort(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (stop_) return;
  interrupted_ = reason;
  for (const WorkPtr& work : waiting_) {
    (void)Attempt("abort", [&] { work->abort(); });
  }
}

absl::Status PeerGroup::Interrupted() const {
  const std::lock_guard lock(mutex_);
  return interrupted_.empty() ? absl::OkStatus() : absl::AbortedError(interrupted_);
}

std::optional<std::string> PeerGroup::ReadFailure(c10d::Store& store) const {
  const std::string key = key_ + "/failed";
  if (!store.check({key})) return std::nullopt;
  const std::vector<std::uint8_t> text = store.get(key);
  return std::string(text.begin(), text.end());
}

absl::Status PeerGroup::Fail(const absl::Status& status) {
  if (absl::Status interrupted = Interrupted(); !interrupted.ok()) return interrupted;
  absl::Status first = status;
  (void)Attempt([&] {
    const std::string mine = absl::StrCat("rank ", rank_, ": ", std::string(status.message()));
    if (std::optional<std::string> theirs = ReadFailure(*store_)) {
      first = absl::AbortedError(*theirs);
    } else {
      store_->set(key_ + "/failed", std::vector<std::uint8_t>(mine.begin(), mine.end()));
    }
  });
  return first;
}

absl::Status PeerGroup::AwaitAll() {
  const std::string done = key_ + "/done";
  absl::Status status;
  absl::Status reached = Attempt("the store of the process group is gone", [&] {
    std::int64_t arrived = store_->add(done, 1);
    std::int64_t progress = 0;
    auto deadline = std::chrono::steady_clock::now() + timeout_;
    milliseconds pause{1};
    while (arrived < size_) {
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, milliseconds{50});
      if (status = Interrupted(); !status.ok()) return;
      arrived = store_->add(done, 0);
      if (const std::int64_t now = store_->add(key_ + "/progress", 0); now != progress) {
        progress = now;
        deadline = std::chrono::steady_clock::now() + timeout_;
      }
      if (arrived < size_ && std::chrono::steady_clock::now() > deadline) {
        status = absl::DeadlineExceededError(
            absl::StrCat(size_ - arrived, " of ", size_, " ranks had not finished ",
                         Seconds(timeout_), " after anything moved"));
        return;
      }
    }
    // The store usually lives in the process of rank 0, which may end now: it leaves last.
    const std::string left = key_ + "/left";
    if (rank_ != 0) {
      store_->add(left, 1);
      return;
    }
    const auto last = std::chrono::steady_clock::now() + std::min(timeout_, milliseconds{2000});
    while (store_->add(left, 0) < size_ - 1 && std::chrono::steady_clock::now() < last) {
      std::this_thread::sleep_for(milliseconds{1});
    }
  });
  return reached.ok() ? status : reached;
}

}  // namespace loadplan
