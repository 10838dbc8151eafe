// LayoutSnapshot: where the targets lay when a plan was made, so that an update can be
// refused when one of them is somewhere else.
#ifndef LOADPLAN_LIFECYCLE_LAYOUT_SNAPSHOT_H_
#define LOADPLAN_LIFECYCLE_LAYOUT_SNAPSHOT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "backend/target_set.h"
#include "geometry/export.h"

namespace loadplan {

// Storage, address and geometry of one target. Holds the storage weakly: its address cannot be
// taken by another storage, but its memory can go.
struct TargetLayout {
  std::string name;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  std::uintptr_t address = 0;  // of the storage
  std::size_t storage_nbytes = 0;
  std::int64_t storage_offset = 0;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  at::ScalarType dtype = at::ScalarType::Byte;
  at::Device device = at::kCPU;
  at::Tensor mirror;  // of one: it has no name by which a host shows it; else undefined
};

class LOADPLAN_API LayoutSnapshot {
 public:
  // Reads only metadata, of any device.
  static LayoutSnapshot Of(std::span<const LiveTarget> targets);

  // OK where `current` shows every name of the snapshot as it was. Else FailedPrecondition with
  // the first difference in words: the target is gone, or moved, or has another shape, strides,
  // offset, dtype or device (expected, got). Names that only `current` has do not matter.
  // Mirrors are looked at themselves: nobody but the plan may be left that holds one.
  absl::Status Check(std::span<const LiveTarget> current) const;

 private:
  std::vector<TargetLayout> layouts_;
};

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_LAYOUT_SNAPSHOT_H_
