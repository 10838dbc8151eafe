// FileShards: this rank's share of what several ranks read together from files.
//
// Ranks of a node that need the same files read disjoint ranges, each byte once, and exchange what
// they read like shards; see ReaderTable and Note [Schedule]. A share is read when its first part
// is asked for, some of those after it are read ahead, and its memory is freed with its last part.
#ifndef LOADPLAN_TRANSFER_FILE_SHARDS_H_
#define LOADPLAN_TRANSFER_FILE_SHARDS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "plan/load_plan.h"
#include "transfer/checkpoint_files.h"
#include "transfer/range_reader.h"
#include "transfer/schedule.h"
#include "transfer/shard_set.h"

namespace loadplan {

class FileShards : public ShardSource {
 public:
  // Reads headers. InvalidArgument where a name that `plan` needs is in no file, where a file holds
  // one with another shape or dtype than declared or, unless `skips_undeclared`, one that `plan`
  // does not know; errors of CheckpointFiles::Open.
  static absl::StatusOr<std::unique_ptr<FileShards>> Open(std::span<const std::string> paths,
                                                          const LoadPlan& plan,
                                                          bool skips_undeclared = false);

  // Which shares `rank` reads: those of `table` that its `messages` ask for.
  void Assign(const GeometryTable& table, const Schedule& schedule,
              std::span<const Message> messages, std::int32_t rank);

  absl::StatusOr<LocalBytes> Find(std::string_view name, std::int32_t rank,
                                  const Box& box) override;
  // As CheckpointFiles has it.
  std::string Description() const { return files_.Description(); }
  // Bytes asked of the files so far.
  Index nbytes_read() const { return reader_.nbytes_read(); }

 private:
  struct Share {
    Box box;
    std::int32_t tensor = 0;  // into files_.tensors()
    Index itemsize = 1;
    std::int64_t num_uses = 0;  // parts still to be asked for
    at::Tensor bytes;           // the box, packed
    std::shared_ptr<ReadGroup> group;
  };

  explicit FileShards(CheckpointFiles files) : files_(std::move(files)), reader_({}) {}
  void Submit(Share& share);
  std::size_t* FindShare(std::string_view name, const Box& box);

  CheckpointFiles files_;
  absl::flat_hash_map<std::string, std::int32_t> tensor_of_;
  absl::flat_hash_map<std::string, std::vector<std::size_t>> shares_of_;
  std::vector<Share> shares_;   // in the order in which they are asked for first
  std::size_t next_ahead_ = 0;  // the first that was not submitted
  Index ahead_nbytes_ = 0;      // submitted and not freed
  // Last, so that its threads are gone before the memory they write to.
  RangeReader reader_;
};

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_FILE_SHARDS_H_
