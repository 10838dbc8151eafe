#include "transfer/peer_group.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "lifecycle/annotate.h"
#include "lifecycle/attempt.h"
#include "lifecycle/byte_copy.h"

namespace loadplan {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kWatchInterval{200};
constexpr milliseconds kPatience{1000};  // after which a rank asks whether its peer is there
constexpr milliseconds kTellTime{5000};  // for telling the others: they have time-outs of their own
constexpr int kTag = 0x10ad;         // one for each pair of ranks: it keeps their messages in order
constexpr int kProbeTag = kTag + 1;  // of receives that nobody answers

std::string Seconds(milliseconds time) {
  return absl::StrFormat("%.3g s", static_cast<double>(time.count()) / 1000);
}

// One device, by its index: NCCL keeps a communicator for each, and posts no batch on two of them.
at::Device DeviceOf(const c10d::ProcessGroup& group) {
  const std::vector<c10::Device> devices = group.getDeviceTypes();
  const bool has_cpu =
      std::ranges::any_of(devices, [](const c10::Device& d) { return d.is_cpu(); });
  if (has_cpu || devices.empty()) return at::kCPU;
  at::Device device = devices.front();
  if (const auto bound = group.getBoundDeviceId(); bound.has_value()) return *bound;
  // Otherwise the current one; without a driver there is none.
  (void)Attempt([&] { device = c10::impl::VirtualGuardImpl(device.type()).getDevice(); });
  return device;
}

const char* NameOf(std::int64_t call) {
  if (call == static_cast<std::int64_t>(GroupCall::kUpdate)) return "updates";
  if (call == static_cast<std::int64_t>(GroupCall::kBroadcast)) return "broadcasts";
  return "schedules";
}

// Ends the wait of the thread that waits for it, or the next one.
void Wake(c10d::Work& work) {
  (void)Attempt("abort", [&] { work.abort(); });
}

std::optional<std::string> ReadFailure(c10d::Store& store, const std::string& exchange) {
  const std::string key = exchange + "/failed";
  if (!store.check({key})) return std::nullopt;
  const std::vector<std::uint8_t> text = store.get(key);
  return std::string(text.begin(), text.end());
}

// What failed first in the exchange: `mine`, unless another rank has said so before. Of ranks that
// fail at once one comes first, and all hear of that one. Stores have `add`, not all have more.
std::string SetFailure(c10d::Store& store, const std::string& exchange, const std::string& mine) {
  const std::string key = exchange + "/failed";
  if (store.add(exchange + "/failures", 1) > 1) {
    // The first says it in a moment, unless it is gone.
    (void)Attempt([&] { store.wait({key}, kPatience); });
    if (std::optional<std::string> theirs = ReadFailure(store, exchange)) return *std::move(theirs);
  }
  store.set(key, std::vector<std::uint8_t>(mine.begin(), mine.end()));
  return mine;
}

}  // namespace

// What the thread of the store and that of the exchange share. It lives as long as either.
struct PeerGroup::Watched {
  struct Waiting {
    WorkPtr work;
    Clock::time_point since;
  };

  Watched(std::string its_key, bool is_patient) : key(std::move(its_key)), asks(!is_patient) {}

  // A look at the store: whether to go on looking.
  bool Look(c10d::Store& store);
  void Abort(const std::string& reason);
  absl::Status Interrupted() {
    const std::lock_guard lock(mutex);
    return interrupted.empty() ? absl::OkStatus() : absl::AbortedError(interrupted);
  }

  const std::string key;
  const bool asks;  // works that wait for long are woken to ask
  std::atomic<std::int64_t> progress{0};
  std::int64_t noted = 0;

  std::mutex mutex;
  bool stop = false;
  std::string interrupted;     // why works were aborted
  std::list<Waiting> waiting;  // to be aborted
};

bool PeerGroup::Watched::Look(c10d::Store& store) {
  if (asks) {
    const std::lock_guard lock(mutex);
    const Clock::time_point now = Clock::now();
    for (Waiting& item : waiting) {
      if (now - item.since < kPatience) continue;
      item.since = now;
      Wake(*item.work);
    }
  }
  std::optional<std::string> failure;
  const absl::Status status = Attempt("the store of the process group is gone", [&] {
    if (const std::int64_t now = progress; now != noted) {
      store.add(key + "/progress", 1);
      noted = now;
    }
    failure = ReadFailure(store, key);
  });
  if (!status.ok()) failure = std::string(status.message());
  if (failure.has_value()) Abort(*failure);
  return !failure.has_value();
}

void PeerGroup::Watched::Abort(const std::string& reason) {
  const std::lock_guard lock(mutex);
  if (stop) return;
  interrupted = reason;
  for (const Waiting& item : waiting) Wake(*item.work);
}

PeerGroup::PeerGroup(c10::intrusive_ptr<c10d::ProcessGroup> group, milliseconds timeout)
    : group_(std::move(group)),
      timeout_(timeout),
      rank_(group_->getRank()),
      size_(group_->getSize()),
      device_(DeviceOf(*group_)),
      watched_(std::make_shared<Watched>("", /*is_patient=*/true)) {
  c10::intrusive_ptr<c10d::Store> store = group_->getStore();
  (void)Attempt([&] {
    is_gloo_ = group_->getBackend(device_.type())->getBackendName() == "gloo";
    // A connection of its own where calls of another thread may wait in the store, as NCCL's do
    // when it connects; one connection may take seconds.
    if (!device_.is_cpu()) store = store->clone();
  });
  store_.emplace(std::move(store));
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
  absl::Status status = Attempt([&]() -> absl::Status {
    c10d::AllgatherOptions gather;
    if (is_gloo_) gather.timeout = timeout_;  // NCCL's watchdog would end the process just then
    const WorkPtr work = group_->allgather(outputs, inputs, gather);
    if (!is_gloo_) return AwaitCollective(*work);
    work->wait();  // Gloo keeps to the time-out
    return absl::OkStatus();
  });
  if (!status.ok()) {
    // Which of the three, a rank that others woke does not know.
    return Prefixed(
        absl::StrCat("not all of the ", size_, " ranks came within ", Seconds(timeout_),
                     ", or one is gone, or the group failed before and has to be made anew: "),
        status);
  }
  std::vector<std::vector<std::int64_t>> result;
  for (const at::Tensor& output : outputs.front()) {
    const at::Tensor values = output.cpu();
    const auto* data = static_cast<const std::int64_t*>(values.const_data_ptr());
    result.emplace_back(data, data + count);
  }
  return result;
}

absl::StatusOr<std::vector<std::vector<std::int64_t>>> PeerGroup::Consult(
    std::span<const std::int64_t> values, const absl::Status& its_problem, std::string* key) {
  absl::Status problem = its_problem;
  if (problem.ok()) problem = store_->Begin();
  std::vector<std::int64_t> own = {problem.ok() ? 1 : 0, rank_ == 0 ? NextNumber() : 0};
  own.insert(own.end(), values.begin(), values.end());
  own.resize(2 + kMaxConsulted);
  absl::StatusOr<std::vector<std::vector<std::int64_t>>> all = AllGather(own);
  if (!all.ok()) {
    CloseConnections();  // ranks beyond those that wait for the missing one learn it by this
    return problem.ok() ? all.status() : problem;
  }
  std::int32_t first = -1;
  *key = absl::StrCat("loadplan/", all->front()[1]);
  for (std::int32_t r = size_; r-- > 0;) {
    std::vector<std::int64_t>& theirs = (*all)[static_cast<std::size_t>(r)];
    if (theirs[0] == 0) first = r;
    theirs.erase(theirs.begin(), theirs.begin() + 2);
  }
  if (first >= 0) return TellProblem(*key, first, problem);
  for (std::size_t r = 0; r < all->size(); ++r) {
    if ((*all)[r].front() == values.front()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", r, " ", NameOf((*all)[r].front()), " where rank ", rank_, " ",
                     NameOf(values.front()), "; all ranks have to make the same calls"));
  }
  return all;
}

// Keys of an earlier exchange, of this object or another one, are in the store still.
std::int64_t PeerGroup::NextNumber() { return Add("loadplan/exchanges", 1).value_or(0); }

absl::StatusOr<std::int64_t> PeerGroup::Add(const std::string& key, std::int64_t more) {
  const auto sum = std::make_shared<std::int64_t>(0);
  absl::Status status =
      store_->Do(timeout_, [=](c10d::Store& store) { *sum = store.add(key, more); });
  if (!status.ok()) return Prefixed("the store of the process group is gone: ", status);
  return *sum;
}

absl::Status PeerGroup::TellProblem(const std::string& key, std::int32_t first,
                                    const absl::Status& own) {
  const std::string name = key + "/problem";
  const std::string text(own.message());
  if (first == rank_) {
    (void)store_->Do(timeout_, [=](c10d::Store& store) {
      store.set(name, std::vector<std::uint8_t>(text.begin(), text.end()));
    });
    return own;
  }
  const auto read = std::make_shared<std::vector<std::uint8_t>>();
  const absl::Status status = store_->Do(timeout_, [=, timeout = timeout_](c10d::Store& store) {
    store.wait({name}, timeout);
    *read = store.get(name);
  });
  if (!own.ok()) return own;
  return absl::AbortedError(
      status.ok() ? absl::StrCat("rank ", first, ": ", std::string(read->begin(), read->end()))
                  : absl::StrCat("rank ", first, " cannot take part"));
}

absl::Status PeerGroup::AwaitCollective(c10d::Work& work) {
  absl::Status status = PollCollective(work);
  // A GPU's stream would keep the kernel that waits for the others.
  if (!status.ok() && !is_gloo_) Wake(work);
  return status;
}

// Gloo cannot abort a collective, so its wait is not waited in.
absl::Status PeerGroup::PollCollective(c10d::Work& work) {
  using std::chrono::microseconds;
  const auto start = Clock::now();
  auto next_check = start + kPatience;
  for (microseconds pause{20}; !work.isCompleted();
       pause = std::min(2 * pause, microseconds{2000})) {
    if (absl::Status status = Interrupted(); !status.ok()) return status;
    const auto now = Clock::now();
    if (now - start > timeout_) {
      return absl::DeadlineExceededError(absl::StrCat("nothing came within ", Seconds(timeout_)));
    }
    if (now > next_check) {
      if (absl::Status status = CheckConnections(); !status.ok()) return status;
      next_check = Clock::now() + kPatience;
    }
    std::this_thread::sleep_for(pause);
  }
  work.wait();
  return absl::OkStatus();
}

absl::Status PeerGroup::CheckConnections() {
  for (std::int32_t peer = 0; peer < size_; ++peer) {
    if (absl::Status status = CheckConnection(peer); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// Gloo fails a receive that has not begun when its connection is closed: one is kept for that.
absl::Status PeerGroup::CheckConnection(std::int32_t peer) {
  if (!is_gloo_ || peer < 0 || peer == rank_) return absl::OkStatus();
  return Attempt(absl::StrCat("rank ", peer, " is gone"), [&] {
    WorkPtr& probe = probes_[peer];
    if (probe == nullptr) {
      std::vector<at::Tensor> tensors = {NewBytes(1, device_)};
      probe = group_->recv(tensors, peer, kProbeTag);
    }
    Wake(*probe);
    probe->wait(timeout_);  // returns at once
  });
}

// A receive that times out closes all connections of its group.
void PeerGroup::CloseConnections() {
  if (!is_gloo_) return;
  for (std::int32_t peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    (void)Attempt([&] {
      std::vector<at::Tensor> tensors = {NewBytes(1, device_)};
      group_->recv(tensors, peer, kProbeTag)->wait(milliseconds{1});
    });
  }
}

absl::StatusOr<std::string> PeerGroup::Broadcast(const std::string& own, Index nbytes,
                                                 std::int32_t root) {
  at::Tensor bytes = NewBytes(nbytes, at::kCPU);
  if (root == rank_) std::memcpy(bytes.mutable_data_ptr(), own.data(), own.size());
  const at::Tensor sent = bytes.to(device_);
  absl::Status status = Broadcast(sent, root);
  if (!status.ok()) {
    return Prefixed(absl::StrCat("rank ", root, " did not describe its tensors: "), status);
  }
  bytes = sent.cpu();
  return std::string(static_cast<const char*>(bytes.const_data_ptr()),
                     static_cast<std::size_t>(nbytes));
}

absl::Status PeerGroup::Broadcast(const at::Tensor& tensor, std::int32_t root) {
  return Attempt([&] {
    std::vector<at::Tensor> tensors = {tensor};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    if (is_gloo_) options.timeout = timeout_;  // as in AllGather
    return AwaitCollective(*group_->broadcast(tensors, options));
  });
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

absl::Status PeerGroup::Wait(const WorkPtr& work, std::int32_t peer) {
  if (work == nullptr) return absl::OkStatus();
  const auto deadline = Clock::now() + timeout_;
  const std::shared_ptr<Watched> watched = watched_;
  while (true) {
    std::list<Watched::Waiting>::iterator place;
    {
      const std::lock_guard lock(watched->mutex);
      if (!watched->interrupted.empty()) return absl::AbortedError(watched->interrupted);
      place = watched->waiting.insert(watched->waiting.end(), {work, Clock::now()});
    }
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    bool is_done = false;
    absl::Status status = Attempt("a message did not get through",
                                  [&] { is_done = work->wait(std::max(left, milliseconds{1})); });
    {
      const std::lock_guard lock(watched->mutex);
      watched->waiting.erase(place);
    }
    if (status.ok() && is_done) return status;
    // Somebody else's failure says more than what it does to this rank.
    if (absl::Status interrupted = Interrupted(); !interrupted.ok()) return interrupted;
    if (Clock::now() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("nothing came within ", Seconds(timeout_)));
    }
    if (!status.ok()) return status;
    if (status = CheckConnection(peer); !status.ok()) return status;
  }
}

absl::Status PeerGroup::BeginWatch(const std::string& key) {
  EndWatch();
  // All ranks have left the exchange before this one.
  if (rank_ == 0 && !key_.empty()) {
    (void)store_->Do(timeout_, [earlier = key_](c10d::Store& store) {
      for (const char* suffix : {"/done", "/left", "/progress"}) store.deleteKey(earlier + suffix);
    });
  }
  key_ = key;
  watched_ = std::make_shared<Watched>(key, /*is_patient=*/!is_gloo_);
  return store_->Repeat(kWatchInterval,
                        [watched = watched_](c10d::Store& store) { return watched->Look(store); });
}

void PeerGroup::EndWatch() {
  store_->Rest();
  const std::lock_guard lock(watched_->mutex);
  watched_->stop = true;
}

void PeerGroup::NoteProgress() { ++watched_->progress; }

absl::Status PeerGroup::Interrupted() const { return watched_->Interrupted(); }

absl::Status PeerGroup::Fail(const absl::Status& status) {
  absl::Status first = Interrupted();
  if (first.ok()) {
    first = status;
    const std::string mine = absl::StrCat("rank ", rank_, ": ", std::string(status.message()));
    const auto told = std::make_shared<std::string>(mine);
    const absl::Status is_told =
        store_->Do(std::min(timeout_, kTellTime),
                   [=, key = key_](c10d::Store& store) { *told = SetFailure(store, key, mine); });
    if (is_told.ok() && *told != mine) first = absl::AbortedError(*told);
  }
  CloseConnections();
  return first;
}

absl::Status PeerGroup::AwaitAll() {
  const std::string done = key_ + "/done";
  absl::StatusOr<std::int64_t> arrived = Add(done, 1);
  if (!arrived.ok()) return arrived.status();
  std::int64_t progress = 0;
  auto deadline = Clock::now() + timeout_;
  auto next_check = Clock::now() + kPatience;
  for (milliseconds pause{1}; *arrived < size_; pause = std::min(2 * pause, milliseconds{50})) {
    std::this_thread::sleep_for(pause);
    if (absl::Status status = Interrupted(); !status.ok()) return status;
    const absl::StatusOr<std::int64_t> now = Add(key_ + "/progress", 0);
    if (!now.ok()) return now.status();
    if (*now != progress) {
      progress = *now;
      deadline = Clock::now() + timeout_;
    }
    absl::Status status;
    if (Clock::now() > next_check) {
      status = CheckConnections();
      next_check = Clock::now() + kPatience;
    }
    if (status.ok() && Clock::now() > deadline) {
      status = absl::DeadlineExceededError(
          absl::StrCat(size_ - *arrived, " of ", size_, " ranks had not finished ",
                       Seconds(timeout_), " after anything moved"));
    }
    // After these: whoever is gone may have seen the end.
    arrived = Add(done, 0);
    if (!arrived.ok()) return arrived.status();
    if (!status.ok() && *arrived < size_) return status;
  }
  // The store usually lives in the process of rank 0, which may end now: it leaves last.
  const std::string left = key_ + "/left";
  if (rank_ != 0) {
    (void)Add(left, 1);
    return absl::OkStatus();
  }
  const auto last = Clock::now() + std::min(timeout_, milliseconds{2000});
  while (Clock::now() < last && Add(left, 0).value_or(size_) < size_ - 1) {
    std::this_thread::sleep_for(milliseconds{1});
  }
  return absl::OkStatus();
}

}  // namespace loadplan
