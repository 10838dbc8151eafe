#include "backend/target_set.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "backend/convert.h"
#include "backend/mode.h"
#include "backend/trace_tensor.h"

namespace loadplan {
namespace {

absl::Status Check(const LiveTarget& target) {
  const auto error = [&target](const char* what) {
    return absl::InvalidArgumentError(
        absl::StrCat("target `", target.name, "` ", what, "; leave it out of the targets"));
  };
  if (!target.tensor.defined()) return error("is an undefined tensor");
  if (IsTraceTensor(target.tensor)) return error("is a trace tensor, not a live one");
  if (target.tensor.layout() != at::kStrided) return error("is sparse and has no strided memory");
  if (target.tensor.is_quantized()) return error("is a quantised tensor of torch.quantization");
  if (!target.tensor.has_storage()) return error("has no storage of its own");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TargetSet> TargetSet::Create(std::vector<LiveTarget> targets) {
  TargetSet set;
  absl::flat_hash_set<std::string> names;
  for (const LiveTarget& target : targets) {
    if (auto status = Check(target); !status.ok()) return status;
    if (!names.insert(target.name).second) {
      return absl::InvalidArgumentError(absl::StrCat("target `", target.name, "` is given twice"));
    }
    const auto next = static_cast<StorageId>(set.storages_.size());
    const auto [found, added] =
        set.by_storage_.emplace(target.tensor.storage().unsafeGetStorageImpl(), next);
    if (added) {
      set.storages_.push_back(target.tensor.detach());
      set.first_name_.push_back(static_cast<std::int32_t>(set.target_tensors_.size()));
    }
    set.target_tensors_.push_back({target.name, found->second, LayoutOf(target.tensor),
                                   ToDType(target.tensor.scalar_type()), target.is_mirror});
  }
  set.targets_ = std::move(targets);
  return set;
}

const std::string& TargetSet::NameOf(StorageId storage) const {
  const std::int32_t first = first_name_[static_cast<std::size_t>(storage)];
  return targets_[static_cast<std::size_t>(first)].name;
}

StorageId TargetSet::Find(const c10::StorageImpl* impl) const {
  const auto found = by_storage_.find(impl);
  return found == by_storage_.end() ? -1 : found->second;
}

at::Tensor TargetSet::View(StorageId storage, const StridedLayout& layout,
                           at::ScalarType dtype) const {
  const ModeOff mode_off;
  const at::Tensor& base = storages_[static_cast<std::size_t>(storage)];
  const auto itemsize = static_cast<Index>(c10::elementSize(dtype));
  DimVector strides = layout.byte_strides();
  for (Index& stride : strides) stride /= itemsize;
  return at::empty({0}, base.options().dtype(dtype))
      .set_(base.storage(), layout.byte_offset() / itemsize,
            at::IntArrayRef(layout.shape().data(), layout.shape().size()),
            at::IntArrayRef(strides.data(), strides.size()));
}

}  // namespace loadplan
