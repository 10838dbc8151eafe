// ShardExchange: updates between the ranks of a process group, by one schedule.
//
//   auto exchange = ShardExchange::Connect(group, {.shards = shards, .plan = plan}, options);
//   exchange->Update(shards, session);      // again and again; nothing is planned any more
#ifndef LOADPLAN_TRANSFER_EXCHANGE_H_
#define LOADPLAN_TRANSFER_EXCHANGE_H_

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "geometry/export.h"
#include "lifecycle/reload_session.h"
#include "transfer/file_shards.h"
#include "transfer/peer_group.h"
#include "transfer/schedule.h"
#include "transfer/shard_set.h"

namespace loadplan {

struct ExchangeOptions {
  ScheduleOptions schedule;
  // How long to wait for a rank that gives no sign. Other ranks may raise a fraction of a second
  // later.
  std::chrono::milliseconds timeout{60000};
  // Bytes of messages that are posted and not finished; one message at least.
  Index max_bytes_in_flight = Index{256} << 20;
};

// What a rank brings: null where it holds no shards, or needs nothing.
struct ExchangeRoles {
  std::shared_ptr<ShardSet> shards;
  std::shared_ptr<const BoundPlan> plan;
  // In place of shards, and on all ranks: files that all of them can read. What is needed of them
  // is dealt out, each byte to one rank; for one update.
  std::shared_ptr<FileShards> files;
};

struct ExchangeReceipt {
  Index sent_nbytes = 0;
  Index received_nbytes = 0;
  Index in_place_nbytes = 0;  // of what was received
  Index copied_nbytes = 0;    // what this rank held itself
  std::int64_t num_messages = 0;
};

// One per rank; all ranks make the same calls in the same order. After an error every call gives it
// again, see Note [Failures in a group].
class LOADPLAN_API ShardExchange {
 public:
  // Tells the others what this rank holds and needs, and makes the schedule of all. Every rank gets
  // an error where one of them has one, and where Schedule::Make refuses. `problem`: why this rank
  // cannot take part; the others are told, and it is returned.
  static absl::StatusOr<std::unique_ptr<ShardExchange>> Connect(
      c10::intrusive_ptr<c10d::ProcessGroup> group, ExchangeRoles roles,
      const ExchangeOptions& options, const absl::Status& problem = absl::OkStatus());

  // One update: sends what others need of `shards`, and lands what they send in `session`, which
  // has begun with the plan that was connected. Shards have the geometry that they had then. On any
  // error on any rank: that error, on every rank within the time-out; the session has failed then.
  absl::StatusOr<ExchangeReceipt> Update(const std::shared_ptr<ShardSet>& shards,
                                         ReloadSession* session,
                                         const absl::Status& problem = absl::OkStatus());

  // Update in two steps, for hosts that do something with what has landed and may fail in it. After
  // Move every byte of this rank has come and gone; Settle tells the others that it is done, or
  // what its problem is, and waits for them. Both or neither, on all ranks.
  absl::Status Move(const std::shared_ptr<ShardSet>& shards, ReloadSession* session,
                    const absl::Status& problem = absl::OkStatus());
  absl::StatusOr<ExchangeReceipt> Settle(ReloadSession* session,
                                         const absl::Status& problem = absl::OkStatus());

  // Between the two.
  bool is_moved() const { return is_moved_; }
  // All ranks have heard of it.
  bool has_failed() const { return !failure_.ok(); }

  const Schedule& schedule() const { return schedule_; }

 private:
  class Run;  // of one update, exchange_run.cc

  ShardExchange(c10::intrusive_ptr<c10d::ProcessGroup> group, ExchangeRoles roles,
                const ExchangeOptions& options)
      : peers_(std::move(group), options.timeout), roles_(std::move(roles)), options_(options) {}
  absl::Status MakeSchedule(const absl::Status& problem);
  absl::Status DescribeOwn(std::shared_ptr<const GeometryTable>& held,
                           std::shared_ptr<const GeometryTable>& needed);
  absl::Status UseTables(std::vector<RankTables> ranks);
  absl::Status CheckRoles(const std::shared_ptr<ShardSet>& shards, ReloadSession* session) const;
  absl::Status Fail(const absl::Status& status, ReloadSession* session);

  PeerGroup peers_;
  ExchangeRoles roles_;
  ExchangeOptions options_;
  Schedule schedule_;
  std::int64_t digest_ = 0;                  // of the schedule, and of when it was made
  std::vector<Message> messages_;            // of this rank, in order
  std::vector<std::int32_t> num_parts_;      // that come to this rank, per name
  std::vector<std::int32_t> empty_entries_;  // of the plan
  std::int64_t num_updates_ = 0;
  bool is_moved_ = false;  // and not settled
  ExchangeReceipt receipt_;
  absl::Status failure_;
  std::vector<at::Tensor> staging_;  // free buffers of the largest message's size
  Index staging_nbytes_ = 0;
};

// Lands the shards of all ranks, all of which are in this process, in `session`, which has begun
// with `plan`. Refuses, before anything is written, what Schedule::Make refuses. Without
// `must_hold` names that have no shards are left to other calls.
LOADPLAN_API absl::Status LoadShards(const LoadPlan& plan, ShardSet& shards, ReloadSession& session,
                                     bool must_hold = true);

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_EXCHANGE_H_
