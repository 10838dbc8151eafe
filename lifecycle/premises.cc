#include "lifecycle/premises.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "backend/mode.h"

namespace loadplan {
namespace {

// Position-sensitive, eight bytes at a time; a premise is a few kilobytes.
std::uint64_t DigestOf(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.detach().cpu().contiguous();
  const auto* data = static_cast<const unsigned char*>(dense.const_data_ptr());
  std::uint64_t hash = 1469598103934665603ULL;
  std::size_t at = 0;
  const std::size_t nbytes = dense.nbytes();
  for (; at + 8 <= nbytes; at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + at, 8);
    hash = (hash ^ word) * 1099511628211ULL;
    hash ^= hash >> 29;
  }
  for (; at < nbytes; ++at) hash = (hash ^ data[at]) * 1099511628211ULL;
  return hash;
}

std::uint64_t DigestOf(const Premise& premise, const TargetSet& targets) {
  const at::Tensor& storage = targets.storages()[static_cast<std::size_t>(premise.storage)];
  if (storage.is_meta()) return 0;
  // As bytes: the layout's items become one more dimension.
  DimVector shape = premise.layout.shape();
  DimVector strides = premise.layout.byte_strides();
  shape.push_back(premise.layout.itemsize());
  strides.push_back(1);
  return DigestOf(targets.View(premise.storage,
                               StridedLayout::Unchecked(premise.layout.byte_offset(),
                                                        std::move(shape), std::move(strides), 1),
                               at::kByte));
}

// 0 where the memory is gone.
std::uint64_t DigestOf(const ExternalTensor& external) {
  const auto storage = external.storage.lock();
  if (storage == nullptr || storage->device().is_meta()) return 0;
  const auto nbytes = static_cast<int64_t>(storage->nbytes());
  return DigestOf(at::empty({0}, at::TensorOptions(at::kByte).device(storage->device()))
                      .set_(c10::Storage(storage), 0, {nbytes}, {1}));
}

absl::Status Changed(std::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat(
      std::string(what),
      ", which the loader read while the plan was made, has changed since; plan again"));
}

}  // namespace

Premises::Premises(const TracedPlan& traced, const TargetSet& targets) {
  const ModeOff mode_off;
  for (const Premise& premise : traced.plan.premises())
    digests_.push_back(DigestOf(premise, targets));
  for (const ExternalTensor& external : traced.externals) externals_.push_back(DigestOf(external));
}

absl::Status Premises::Check(const TracedPlan& traced, const TargetSet& targets) const {
  const ModeOff mode_off;
  for (std::size_t i = 0; i < digests_.size(); ++i) {
    const Premise& premise = traced.plan.premises()[i];
    if (DigestOf(premise, targets) != digests_[i]) {
      return Changed(absl::StrCat("`", targets.NameOf(premise.storage), "`"));
    }
  }
  for (std::size_t i = 0; i < externals_.size(); ++i) {
    if (DigestOf(traced.externals[i]) != externals_[i]) return Changed(traced.externals[i].what);
  }
  return absl::OkStatus();
}

}  // namespace loadplan
