// CopyQueue: writes of a plan that wait to be put on a device's stream together. See Note [Batched
// copies] in lifecycle/copy_device.h.
#ifndef LOADPLAN_LIFECYCLE_COPY_QUEUE_H_
#define LOADPLAN_LIFECYCLE_COPY_QUEUE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lifecycle/byte_copy.h"
#include "lifecycle/copy_device.h"

namespace loadplan {

class CopyQueue {
 public:
  CopyQueue(CopyDevice device, std::shared_ptr<DevicePlan> plan, const TargetSet& targets)
      : device_(device), plan_(std::move(plan)), targets_(targets) {}

  // Queues the copy of `map`, that of `item` or a part of it, and keeps the memory of `from` until
  // it is on the stream. False: the caller has to make it, after FlushBefore. Internal, as
  // CopyMapped says it, where the map reaches outside a storage.
  absl::StatusOr<bool> Add(const WriteItem& item, const StridedMap& map, const ByteSide& from);
  // Before a copy outside the queue from `from` into target `storage`.
  absl::Status FlushBefore(StorageId storage, const ByteSide& from);
  // Before bytes of `from` are read at once: they may be those that a copy which waits will write.
  absl::Status FlushBeforeRead(const ByteSide& from);
  // Puts what waits on the stream. Internal: the device refuses it; nothing waits any more then.
  absl::Status Flush();

  const CopyDevice& device() const { return device_; }
  bool empty() const { return items_.empty(); }
  // What was put on the stream so far.
  Index num_batches() const { return num_batches_; }
  Index num_copies() const { return num_copies_; }

 private:
  absl::StatusOr<bool> IsCapturing() const;
  bool IsLive(const ByteSide& from) const;
  bool Queue(const WriteItem& item, const StridedMap& map, const ByteSide& from,
             const PlanCopies::Jobs& jobs);
  // Whether the device makes the cast of `item`, if it has one.
  bool MayCast(const WriteItem& item) const;
  void Keep(const at::Tensor& tensor);
  const CopyJob& JobOf(const CopyItem& item) const;
  void Run();
  void RunSmall();
  void RunLarge();
  void RunOnHost();

  const CopyDevice device_;
  const std::shared_ptr<DevicePlan> plan_;
  const TargetSet& targets_;

  // Item jobs count on from those of the plan into extra_.
  std::vector<CopyItem> items_;
  std::vector<CopyJob> extra_;
  std::vector<at::Tensor> kept_;
  absl::flat_hash_set<StorageId> written_;  // targets
  StorageId last_written_ = -1;             // of these
  bool has_casts_ = false;
  Index nbytes_ = 0;
  Index num_batches_ = 0;
  Index num_copies_ = 0;
};

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_COPY_QUEUE_H_
