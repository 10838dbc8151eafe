// PeerGroup: a c10d process group as transfers use it. Errors are Status, waits are bounded, and a
// rank that fails takes the others out of theirs.
#ifndef LOADPLAN_TRANSFER_PEER_GROUP_H_
#define LOADPLAN_TRANSFER_PEER_GROUP_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "geometry/index.h"
#include "transfer/store_thread.h"

namespace loadplan {

// Note [Failures in a group]
//
// Gloo wakes a rank whose peer died before it began to answer, and no other: not one that is half
// way through a message, not one whose peer is alive and has given up. A message that is longer
// than the buffer it meets ends the receiving process. So:
//  - before the first message all ranks compare digests of what they are about to do, in headers of
//    one length whatever they do;
//  - a rank that fails says so under a key of the group's store, the first one wins;
//  - during an exchange a thread of each rank looks there five times a second, and aborts all
//    works that the rank waits for when somebody has;
//  - a rank that waits for a second asks whether the connection is there still;
//  - an exchange ends for everybody at once, when all have said that they are done;
//  - the store may be gone or stopped itself: see StoreThread.
// After a failure messages may be under way still: the group is not used again. Gloo goes on with
// them, at the expense of a processor, and the group's destructor would wait until they time out;
// so a rank that fails closes its connections.

// What a rank is about to do: the first value that ranks consult one another with. That of
// scheduling changes with the encoding and the order of messages.
enum class GroupCall : std::int64_t { kSchedule = 2, kUpdate = -1, kBroadcast = -2 };

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
  bool Reaches(const at::Tensor& tensor) const {
    return device_.is_cpu() ? tensor.is_cpu() : tensor.device() == device_;
  }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // The same number of values from every rank: [rank][value].
  absl::StatusOr<std::vector<std::vector<std::int64_t>>> AllGather(
      std::span<const std::int64_t> own);
  // `nbytes` bytes of rank `root`, where `own` holds them. Between BeginWatch and EndWatch a
  // failure of any rank ends the wait.
  absl::StatusOr<std::string> Broadcast(const std::string& own, Index nbytes, std::int32_t root);
  // Likewise the bytes of `tensor`, which is contiguous and lies on device().
  absl::Status Broadcast(const at::Tensor& tensor, std::int32_t root);

  // AllGather of `values`, kMaxConsulted at most, for ranks that may not be able to go on: where
  // some rank has a `problem`, every rank gets it (its own where it has one). `*key` is a name in
  // the store that all agree on and that no other consultation has. Ranks that consult one another
  // about different things get one another's values; those that a rank did not give are 0.
  // FailedPrecondition where some rank makes another call.
  static constexpr std::size_t kMaxConsulted = 16;
  absl::StatusOr<std::vector<std::vector<std::int64_t>>> Consult(
      std::span<const std::int64_t> values, const absl::Status& problem, std::string* key);

  // Several messages are in flight at a time, one order for each pair of ranks. `bytes` is a
  // contiguous byte tensor that stays as it is until the wait is over.
  absl::StatusOr<WorkPtr> Send(const at::Tensor& bytes, std::int32_t to);
  absl::StatusOr<WorkPtr> Receive(const at::Tensor& bytes, std::int32_t from);
  // `peer`: whom it is from or for; -1 where there are several.
  absl::Status Wait(const WorkPtr& work, std::int32_t peer);
  // Between the two, messages are posted together where the backend can (NCCL): the works of Send
  // and Receive are null, and EndBatch gives the one for all. Null where it cannot.
  absl::Status BeginBatch();
  absl::StatusOr<WorkPtr> EndBatch();

  // From here on a failure of any rank ends the waits of this one. `key` names the exchange.
  absl::Status BeginWatch(const std::string& key);
  // Something got done: others who wait for the end may go on waiting.
  void NoteProgress();
  // Tells the others, and returns what failed first in the group: `status` or theirs. Closes the
  // connections.
  absl::Status Fail(const absl::Status& status);
  // Waits until every rank has come here; their failure if one fails instead.
  absl::Status AwaitAll();
  void EndWatch();

 private:
  struct Watched;

  // A number that no exchange of the group has had, whoever makes it. On rank 0.
  std::int64_t NextNumber();
  absl::Status TellProblem(const std::string& key, std::int32_t first, const absl::Status& own);
  absl::Status Interrupted() const;
  absl::Status AwaitCollective(c10d::Work& work);
  absl::Status PollCollective(c10d::Work& work);
  absl::Status CheckConnections();
  absl::Status CheckConnection(std::int32_t peer);
  void CloseConnections();
  // `count` of the store under `key`, `more` added to it.
  absl::StatusOr<std::int64_t> Add(const std::string& key, std::int64_t more);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::chrono::milliseconds timeout_;
  const std::int32_t rank_;
  const std::int32_t size_;
  at::Device device_ = at::kCPU;
  bool is_gloo_ = false;
  bool is_batch_ = false;

  std::optional<StoreThread> store_;
  std::string key_;
  std::shared_ptr<Watched> watched_;        // of this exchange
  std::map<std::int32_t, WorkPtr> probes_;  // see CheckConnection
};

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_PEER_GROUP_H_
