// StagingBuffers: host memory that files are read into, used again and again.
#ifndef LOADPLAN_TRANSFER_STAGING_BUFFERS_H_
#define LOADPLAN_TRANSFER_STAGING_BUFFERS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "geometry/index.h"
#include "lifecycle/copy_device.h"

namespace loadplan {

// With `pins_memory` what a GPU reads without a copy in between. With `copies` (see Note [Batched
// copies]) a buffer goes to that device whole, in one copy that nobody waits for, and batches
// scatter it there: a row of a matrix is no transfer of its own.
class StagingBuffers {
 public:
  // Buffers that are not pinned lie in large pages: a disk has few places to write to. Free ones go
  // where new ones would be more than `most` bytes with them.
  StagingBuffers(bool pins_memory, std::optional<CopyDevice> copies, Index most)
      : pins_memory_(pins_memory), copies_(copies), most_(most) {}

  bool pins_memory() const { return pins_memory_; }
  bool goes_to_device() const { return copies_.has_value(); }

  // At least `nbytes` bytes, from the start of a page on, that nothing reads any more; waits for
  // the device where it still does.
  at::Tensor Take(Index nbytes);
  // The bytes of `buffer` where they are copied from: the buffer itself, or its copy on the device,
  // on the current stream. Internal: the device has no room.
  absl::StatusOr<at::Tensor> Readable(const at::Tensor& buffer) const;
  // Of what was taken, when all that reads it is done or on the current stream.
  void GiveBack(at::Tensor buffer);

 private:
  struct Buffer {
    at::Tensor bytes;
    std::optional<c10::Event> read;  // fires when the device has read it
  };

  const bool pins_memory_;
  const std::optional<CopyDevice> copies_;
  const Index most_;
  Index nbytes_ = 0;  // of all buffers
  std::vector<Buffer> free_;
};

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_STAGING_BUFFERS_H_
