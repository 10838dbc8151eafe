#include "transfer/staging_buffers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lifecycle/attempt.h"
#include "lifecycle/byte_copy.h"

namespace loadplan {
namespace {

constexpr std::size_t kLargePage = std::size_t{2} << 20;
constexpr Index kUsual = Index{16} << 20;

// Undefined where there is no memory, or it is not worth it.
at::Tensor LargePages(Index nbytes) {
  if (nbytes < static_cast<Index>(kLargePage)) return {};
  const std::size_t size = (static_cast<std::size_t>(nbytes) + kLargePage - 1) & ~(kLargePage - 1);
  // One more, so that one starts in the first.
  void* const mapped =
      mmap(nullptr, size + kLargePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return {};
  const auto address = reinterpret_cast<std::uintptr_t>(mapped);
  auto* const start =
      static_cast<std::byte*>(mapped) + (kLargePage - address % kLargePage) % kLargePage;
  (void)madvise(start, size, MADV_HUGEPAGE);  // advice: small ones do as well
  return at::from_blob(
      start, {nbytes}, [mapped, size](void*) { munmap(mapped, size + kLargePage); }, at::kByte);
}

}  // namespace

at::Tensor StagingBuffers::Take(Index nbytes) {
  // The one that came back last, which is in a cache if any is.
  const auto found = std::find_if(free_.rbegin(), free_.rend(), [&](const Buffer& buffer) {
    return static_cast<Index>(buffer.bytes.nbytes()) >= nbytes;
  });
  Buffer buffer;
  if (found != free_.rend()) {
    buffer = std::move(*found);
    free_.erase(std::next(found).base());
  } else {
    // Pages that are not touched cost nothing, and the buffer will do for others.
    if (!pins_memory_) nbytes = std::max(nbytes, std::min(kUsual, most_ / 4));
    // Too small, all of them.
    while (!free_.empty() && nbytes_ + nbytes > most_) {
      nbytes_ -= static_cast<Index>(free_.back().bytes.nbytes());
      free_.pop_back();
    }
    if (!pins_memory_) buffer.bytes = LargePages(nbytes);
    if (!buffer.bytes.defined()) {
      const auto options = at::TensorOptions().dtype(at::kByte).pinned_memory(pins_memory_);
      buffer.bytes = at::empty({nbytes}, options);
    }
    nbytes_ += nbytes;
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
