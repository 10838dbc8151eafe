// TargetSet: the live tensors that a loader may write, grouped by storage.
#ifndef LOADPLAN_BACKEND_TARGET_SET_H_
#define LOADPLAN_BACKEND_TARGET_SET_H_

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "geometry/export.h"
#include "plan/load_plan.h"
#include "plan/records.h"

namespace loadplan {

// A name of a live tensor. Targets are *storages*: two names over one storage are
// one target seen twice (a tied head, a view kept as a buffer).
struct LiveTarget {
  std::string name;
  at::Tensor tensor;
  bool is_mirror = false;  // see Note [Mirrors] in backend/mirrors.h
};

// Immutable. Storage ids are 0, 1, ... in the order in which the names first show
// a storage; they are the StorageIds of the targets in every log and plan made from it.
class LOADPLAN_API TargetSet {
 public:
  // InvalidArgument, naming the target: an undefined, sparse or quantised tensor, a
  // tensor without storage, a trace tensor, a name given twice.
  static absl::StatusOr<TargetSet> Create(std::vector<LiveTarget> targets);

  const std::vector<LiveTarget>& targets() const { return targets_; }
  // Parallel to targets(): layouts in bytes of the storage.
  const std::vector<TargetTensor>& target_tensors() const { return target_tensors_; }
  // One tensor per storage, through which its bytes are reached.
  const std::vector<at::Tensor>& storages() const { return storages_; }
  // The first name that shows a storage.
  const std::string& NameOf(StorageId storage) const;
  // -1 where `impl` is no target's storage.
  StorageId Find(const c10::StorageImpl* impl) const;

  // A view of a target storage with any layout and dtype. The offset and strides
  // (bytes) must be multiples of the dtype's size.
  at::Tensor View(StorageId storage, const StridedLayout& layout, at::ScalarType dtype) const;

 private:
  std::vector<LiveTarget> targets_;
  std::vector<TargetTensor> target_tensors_;
  std::vector<at::Tensor> storages_;
  std::vector<std::int32_t> first_name_;  // per storage, into targets_
  absl::flat_hash_map<const c10::StorageImpl*, StorageId> by_storage_;
};

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_TARGET_SET_H_
