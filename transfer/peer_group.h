// PeerGroup: a c10d process group as transfers use it. Errors are Status, waits are bounded, and a
// rank that fails takes the others out of theirs.
#ifndef LOADPLAN_TRANSFER_PEER_GROUP_H_
#define LOADPLAN_TRANSFER_PEER_GROUP_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "geometry/index.h"

namespace loadplan {

// Note [Failures in a group]
//
// Gloo wakes a rank whose peer died. It does not wake one whose peer is alive and has given up, and
// a message that is longer than the buffer it meets ends the receiving process. So:
//  - before the first message all ranks compare digests of what they are about to do, in headers of
//    one length whatever they do;
//  - a rank that fails says so under a key of the group's store, the first one wins;
//  - during an exchange a thread of each rank looks there five times a second, and aborts all
//    works that the rank waits for when somebody has;
//  - an exchange ends for everybody at once, when all have said that they are done.
// After a failure messages may be under way still: the group is not used again.

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Not for several threads at a time. All ranks of the group make the same calls in the same order.
class PeerGroup {
 public:
  PeerGroup(c10::intrusive_ptr<c10d::ProcessGroup> group, std::chrono::milliseconds timeout);
  ~PeerGroup();
  PeerGroup(const PeerGroup&) = delete;
  PeerGroup& operator=(const PeerGroup&) = delete;

  std::int32_t rank() const { return rank_; }
  std::int32_t size() const { return size_; }
  // Where tensors that are sent or received have to lie.
  at::Device device() const { return device_; }
  bool Reaches(const at::Tensor& tensor) const { return tensor.device().type() == device_.type(); }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // The same number of values from every rank: [rank][value].
  absl::StatusOr<std::vector<std::vector<std::int64_t>>> AllGather(
      std::span<const std::int64_t> own);
  // `nbytes` bytes of rank `root`, where `own` holds them. Between BeginWatch and EndWatch a
  // failure of any rank ends the wait.
  absl::StatusOr<std::string> Broadcast(const std::string& own, Index nbytes, std::int32_t root);

  // AllGather of `values`, kMaxConsulted at most, for ranks that may not be able to go on: where
  // some rank has a `problem`, every rank gets it (its own where it has one). `*key` is a name in
  // the store that all agree on and that no other consultation has. Ranks that consult one another
  // about different things get one another's values; those that a rank did not give are 0.
  static constexpr std::size_t kMaxConsulted = 16;
  absl::StatusOr<std::vector<std::vector<std::int64_t>>> Consult(
      std::span<const std::int64_t> values, const absl::Status& problem, std::string* key);

  // Several messages are in flight at a time, one order for each pair of ranks. `bytes` is a
  // contiguous byte tensor that stays as it is until the wait is over.
  absl::StatusOr<WorkPtr> Send(const at::Tensor& bytes, std::int32_t to);
  absl::StatusOr<WorkPtr> Receive(const at::Tensor& bytes, std::int32_t from);
  absl::Status Wait(const WorkPtr& work);
  // Between the two, messages are posted together where the backend can (NCCL): the works of Send
  // and Receive are null, and EndBatch gives the one for all. Null where it cannot.
  absl::Status BeginBatch();
  absl::StatusOr<WorkPtr> EndBatch();

  // From here on a failure of any rank ends the waits of this one. `key` names the exchange.
  void BeginWatch(const std::string& key);
  // Something got done: others who wait for the end may go on waiting.
  void NoteProgress() { ++progress_; }
  // Tells the others, and returns what failed first in the group: `status` or theirs.
  absl::Status Fail(const absl::Status& status);
  // Waits until every rank has come here; their failure if one fails instead.
  absl::Status AwaitAll();
  void EndWatch();

 private:
  // Of the next exchange of the group, whoever makes it: a number that was never used. On rank 0.
  std::int64_t NextNumber();
  void Watch();
  void Abort(const std::string& reason);
  absl::Status TellProblem(const std::string& key, std::int32_t first, const absl::Status& own);
  std::optional<std::string> ReadFailure(c10d::Store& store) const;
  absl::Status Interrupted() const;
  absl::Status AwaitCollective(c10d::Work& work);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::chrono::milliseconds timeout_;
  const std::int32_t rank_;
  const std::int32_t size_;
  at::Device device_ = at::kCPU;
  bool is_batch_ = false;

  c10::intrusive_ptr<c10d::Store> store_;
  // Of the watcher. A connection of its own where calls of another thread may wait in the store,
  // as NCCL's do when it connects; one connection may take seconds.
  c10::intrusive_ptr<c10d::Store> watched_store_;
  std::string key_;
  std::atomic<std::int64_t> progress_{0};
  mutable std::mutex mutex_;
  std::condition_variable stop_changed_;
  bool stop_ = false;
  std::string interrupted_;     // why works were aborted
  std::list<WorkPtr> waiting_;  // to be aborted
  std::thread watcher_;
};

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_PEER_GROUP_H_
