#include "lifecycle/layout_snapshot.h"

#include <string_view>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lifecycle/mapped_memory.h"

namespace loadplan {
namespace {

// Not data_ptr(), which raises for storages that hold no memory.
std::uintptr_t AddressOf(const at::Tensor& tensor) {
  const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  return reinterpret_cast<std::uintptr_t>(
      const_cast<c10::StorageImpl*>(storage)->_mutable_data_ptr_no_checks().get());
}

std::string Text(std::span<const std::int64_t> values) {
  return absl::StrCat("[", absl::StrJoin(values, ", "), "]");
}

absl::Status Differs(const std::string& name, std::string_view what, const std::string& expected,
                     const std::string& got) {
  return absl::FailedPreconditionError(
      absl::StrCat("`", name, "` has changed since the plan was made: expected ", std::string(what),
                   " ", expected, ", got ", got, "; put it back or make a new plan"));
}

absl::Status Compare(const TargetLayout& was, const at::Tensor& now) {
  if (was.dtype != now.scalar_type()) {
    return Differs(was.name, "dtype", c10::toString(was.dtype), c10::toString(now.scalar_type()));
  }
  if (was.device != now.device()) {
    return Differs(was.name, "device", was.device.str(), now.device().str());
  }
  if (now.sizes() != at::IntArrayRef(was.sizes)) {
    return Differs(was.name, "shape", Text(was.sizes), Text(now.sizes()));
  }
  if (now.strides() != at::IntArrayRef(was.strides)) {
    return Differs(was.name, "strides", Text(was.strides), Text(now.strides()));
  }
  const c10::StorageImpl* storage = now.storage().unsafeGetStorageImpl();
  const bool same_storage = was.storage._unsafe_get_target() == storage;
  const bool has_moved = !same_storage || was.address != AddressOf(now);
  if (was.storage_nbytes > 0 && was.address != 0 &&
      (AddressOf(now) == 0 || !(has_moved || IsMapped(now)))) {
    return absl::FailedPreconditionError(
        absl::StrCat("`", was.name,
                     "` has no memory, which it had when the plan was made; wake the "
                     "engine so that it lies where it lay, or make a new plan"));
  }
  if (has_moved) {
    return absl::FailedPreconditionError(absl::StrCat(
        "`", was.name, "` has moved since the plan was made: ",
        same_storage ? "its storage has another address" : "it lies in another storage",
        "; copy into the old tensor instead of replacing it, or make a new plan"));
  }
  if (was.storage_offset != now.storage_offset()) {
    return Differs(was.name, "storage offset", absl::StrCat(was.storage_offset),
                   absl::StrCat(now.storage_offset()));
  }
  if (was.storage_nbytes != storage->nbytes()) {
    return Differs(was.name, "a storage of", absl::StrCat(was.storage_nbytes, " bytes"),
                   absl::StrCat(storage->nbytes(), " bytes"));
  }
  return absl::OkStatus();
}

// Of a mirror's storage: by its tensor, and by the one that a TargetSet makes of it.
constexpr std::size_t kOwnReferences = 2;

absl::Status CheckMirror(const TargetLayout& layout) {
  if (layout.mirror.storage().use_count() <= kOwnReferences) {
    return absl::FailedPreconditionError(
        absl::StrCat("`", layout.name,
                     "`, which is no target and which the loader wrote when the plan was made, no "
                     "longer exists; plan again"));
  }
  return Compare(layout, layout.mirror);
}

}  // namespace

LayoutSnapshot LayoutSnapshot::Of(std::span<const LiveTarget> targets) {
  LayoutSnapshot snapshot;
  snapshot.layouts_.reserve(targets.size());
  for (const LiveTarget& target : targets) {
    const at::Tensor& tensor = target.tensor;
    snapshot.layouts_.push_back(TargetLayout{
        target.name,
        c10::weak_intrusive_ptr<c10::StorageImpl>(tensor.storage().getWeakStorageImpl()),
        AddressOf(tensor), tensor.storage().nbytes(), tensor.storage_offset(), tensor.sizes().vec(),
        tensor.strides().vec(), tensor.scalar_type(), tensor.device(),
        target.is_mirror ? tensor : at::Tensor()});
  }
  return snapshot;
}

absl::Status LayoutSnapshot::Check(std::span<const LiveTarget> current) const {
  absl::flat_hash_map<std::string_view, const at::Tensor*> by_name;
  by_name.reserve(current.size());
  for (const LiveTarget& target : current) by_name.emplace(target.name, &target.tensor);
  for (const TargetLayout& layout : layouts_) {
    if (layout.mirror.defined()) {
      if (absl::Status status = CheckMirror(layout); !status.ok()) return status;
      continue;
    }
    const auto found = by_name.find(layout.name);
    if (found == by_name.end()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "`", layout.name, "` is planned but no longer a target; put it back or make a new plan"));
    }
    if (!found->second->has_storage()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "`", layout.name, "` no longer has a storage; put it back or make a new plan"));
    }
    if (absl::Status status = Compare(layout, *found->second); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace loadplan
