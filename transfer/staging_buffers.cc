#include "transfer/staging_buffers.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lifecycle/attempt.h"
#include "lifecycle/byte_copy.h"

namespace loadplan {

at::Tensor StagingBuffers::Take(Index nbytes) {
  const auto found = std::ranges::find_if(free_, [&](const Buffer& buffer) {
    return static_cast<Index>(buffer.bytes.nbytes()) >= nbytes;
  });
  Buffer buffer;
  if (found != free_.end()) {
    buffer = std::move(*found);
    free_.erase(found);
  } else {
    if (!free_.empty()) free_.pop_back();  // too small: a larger one takes its place
    const auto options = at::TensorOptions().dtype(at::kByte).pinned_memory(pins_memory_);
    buffer.bytes = at::empty({nbytes}, options);
  }
  if (buffer.read.has_value()) buffer.read->synchronize();
  return std::move(buffer.bytes);
}

absl::StatusOr<at::Tensor> StagingBuffers::Readable(const at::Tensor& buffer) const {
  if (!copies_.has_value()) return buffer;
  return Attempt([&]() -> absl::StatusOr<at::Tensor> {
    const at::Tensor there = NewBytes(buffer.numel(), copies_->device);
    return there.copy_(buffer, /*non_blocking=*/true);
  });
}

void StagingBuffers::GiveBack(at::Tensor buffer) {
  Buffer given{std::move(buffer), std::nullopt};
  if (copies_.has_value() && !copies_->device.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(copies_->device.type());
    given.read.emplace(copies_->device.type());
    given.read->record(guard.getStream(copies_->device));
  }
  free_.push_back(std::move(given));
}

}  // namespace loadplan
