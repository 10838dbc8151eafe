#include "lifecycle/copy_queue.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "geometry/copy_jobs.h"
#include "lifecycle/attempt.h"
#include "lifecycle/cast_check.h"

namespace loadplan {
namespace {

// Tiles are counted in 32 bits; a batch is cut long before.
constexpr Index kMaxBatchNbytes = Index{1} << 40;

std::uint64_t AddressOf(const ByteSide& side) {
  return reinterpret_cast<std::uint64_t>(side.tensor.storage().data()) +
         static_cast<std::uint64_t>(side.byte_offset);
}

// Whether `map` is that of `item`, read from somewhere else.
bool IsShifted(const StridedMap& map, const WriteItem& item) {
  return map.shape() == item.map.shape() && map.to() == item.map.to() &&
         map.from().itemsize == item.map.from().itemsize &&
         map.from().byte_strides == item.map.from().byte_strides;
}

at::Tensor NewOn(at::Device device, int64_t nbytes) {
  return at::empty({nbytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

at::Tensor HostBytes(std::size_t nbytes, at::Device device) {
  const auto options = at::TensorOptions().dtype(at::kByte).pinned_memory(device.is_cuda());
  return at::empty({static_cast<int64_t>(nbytes)}, options);
}

}  // namespace

absl::StatusOr<bool> CopyQueue::Add(const WriteItem& item, const StridedMap& map,
                                    const ByteSide& from) {
  const PlanCopies::Jobs jobs = plan_->copies.JobsOf(item);
  if (jobs.count == 0 || from.tensor.device() != device_.device || IsLive(from)) return false;
  if (map.empty()) return true;
  const ByteSide to =
      ByteSide::OfStorage(targets_.storages()[static_cast<std::size_t>(item.target)]);
  if (absl::Status status = CheckReach(map, to, from); !status.ok()) return status;
  if (items_.empty()) {
    const absl::StatusOr<bool> is_capturing = IsCapturing();
    if (!is_capturing.ok() || *is_capturing) return is_capturing.ok() ? false : is_capturing;
  }
  if (!MayCast(item)) return false;
  if (jobs.is_alone || nbytes_ > kMaxBatchNbytes) {
    if (absl::Status status = Flush(); !status.ok()) return status;
  }
  if (!Queue(item, map, from, jobs)) return false;
  Keep(from.tensor);
  if (item.target != last_written_) written_.insert(last_written_ = item.target);
  nbytes_ += map.nbytes();
  ++num_copies_;
  if (jobs.is_alone) {
    if (absl::Status status = Flush(); !status.ok()) return status;
  }
  return true;
}

bool CopyQueue::Queue(const WriteItem& item, const StridedMap& map, const ByteSide& from,
                      const PlanCopies::Jobs& jobs) {
  std::uint64_t address = AddressOf(from);
  const auto num_planned = static_cast<std::uint32_t>(plan_->copies.jobs().size());
  auto first = static_cast<std::uint32_t>(num_planned + extra_.size());
  std::uint32_t count = jobs.count;
  const CopyCast cast = CastOf(item);
  const bool is_shifted = IsShifted(map, item);
  if (is_shifted) {
    address += static_cast<std::uint64_t>(map.from().byte_offset - item.map.from().byte_offset);
  }
  // A device reads items of a cast at multiples of their size.
  if (!cast.is_none() && address % static_cast<std::uint64_t>(map.from().itemsize) != 0) {
    return false;
  }
  if (is_shifted) {
    first = jobs.first;
  } else {
    const std::uint64_t to = plan_->copies.addresses()[static_cast<std::size_t>(item.target)];
    if (!AppendCopyJobs(map, to, kMaxJobsOfWrite, &extra_, cast)) return false;
    count = static_cast<std::uint32_t>(num_planned + extra_.size()) - first;
  }
  for (std::uint32_t job = first; job < first + count; ++job) items_.push_back({address, job, 0});
  has_casts_ = has_casts_ || !cast.is_none();
  return true;
}

bool CopyQueue::MayCast(const WriteItem& item) const {
  const CopyCast cast = CastOf(item);
  return cast.is_none() || CastsAsTorch(device_, cast);
}

absl::StatusOr<bool> CopyQueue::IsCapturing() const {
  return Attempt([&]() -> absl::StatusOr<bool> {
    // The default stream of a device has no name of its own: it is that of the current one.
    c10::OptionalDeviceGuard guard;
    if (!device_.device.is_cpu()) guard.reset_device(device_.device);
    return device_.engine->is_capturing(device_.stream());
  });
}

// What arrives may be a live tensor: then the order of copies counts.
bool CopyQueue::IsLive(const ByteSide& from) const {
  const auto start = reinterpret_cast<std::uint64_t>(from.tensor.storage().data());
  const std::uint64_t stop = start + from.tensor.storage().nbytes();
  const auto& ranges = plan_->ranges;
  const auto next =
      std::ranges::upper_bound(ranges, start, {}, [](const auto& r) { return r.second; });
  return next != ranges.end() && next->first < stop;
}

void CopyQueue::Keep(const at::Tensor& tensor) {
  if (kept_.empty() || !kept_.back().is_same(tensor)) kept_.push_back(tensor);
}

absl::Status CopyQueue::FlushBefore(StorageId storage, const ByteSide& from) {
  if (items_.empty() || !(written_.contains(storage) || IsLive(from))) return absl::OkStatus();
  return Flush();
}

absl::Status CopyQueue::FlushBeforeRead(const ByteSide& from) {
  return items_.empty() || !IsLive(from) ? absl::OkStatus() : Flush();
}

absl::Status CopyQueue::Flush() {
  if (items_.empty()) return absl::OkStatus();
  const absl::Status status = Attempt([&] {
    Run();
    ++num_batches_;
  });
  items_.clear();
  extra_.clear();
  kept_.clear();
  written_.clear();
  last_written_ = -1;
  has_casts_ = false;
  nbytes_ = 0;
  return status;
}

const CopyJob& CopyQueue::JobOf(const CopyItem& item) const {
  const std::span<const CopyJob> planned = plan_->copies.jobs();
  return item.job < planned.size() ? planned[item.job] : extra_[item.job - planned.size()];
}

void CopyQueue::Run() {
  if (device_.is_for_many) return RunOnHost();
  c10::OptionalDeviceGuard guard;
  if (!device_.device.is_cpu()) guard.reset_device(device_.device);
  if (items_.size() <= kSmallCopyBatch) {
    RunSmall();
  } else {
    RunLarge();
  }
}

// The engine of the host reads jobs and items where they lie.
void CopyQueue::RunOnHost() {
  const std::span<const CopyJob> planned = plan_->copies.jobs();
  CopyBatch batch;
  batch.planned = planned.data();
  batch.extra = extra_.data();
  batch.items = items_.data();
  batch.num_planned = static_cast<std::uint32_t>(planned.size());
  batch.num_items = static_cast<std::uint32_t>(items_.size());
  batch.num_tiles = NumberTiles(planned, extra_, items_);
  batch.has_casts = has_casts_;
  const char* const error = device_.engine->run(batch, device_.stream());
  TORCH_CHECK(error == nullptr, "a batch of copies could not be started: ", error);
}

void CopyQueue::RunSmall() {
  SmallCopyBatch batch;
  batch.num_items = static_cast<std::uint32_t>(items_.size());
  for (std::uint32_t i = 0; i < batch.num_items; ++i) {
    batch.jobs[i] = JobOf(items_[i]);
    batch.items[i] = {items_[i].from, i, 0};
  }
  batch.num_tiles = NumberTiles({}, batch.jobs, std::span(batch.items).first(batch.num_items));
  batch.has_casts = has_casts_;
  const char* const error = device_.engine->run_small(batch, device_.stream());
  TORCH_CHECK(error == nullptr, "a batch of copies could not be started: ", error);
}

void CopyQueue::RunLarge() {
  const std::span<const CopyJob> planned = plan_->copies.jobs();
  if (!plan_->jobs.defined()) {
    const at::Tensor host = HostBytes(planned.size_bytes(), device_.device);
    std::memcpy(host.mutable_data_ptr(), planned.data(), planned.size_bytes());
    // Blocks, once for a plan: the next update may run on another stream.
    plan_->jobs = NewOn(device_.device, host.numel()).copy_(host);
  }
  CopyBatch batch;
  batch.num_planned = static_cast<std::uint32_t>(planned.size());
  batch.num_items = static_cast<std::uint32_t>(items_.size());
  batch.num_tiles = NumberTiles(planned, extra_, items_);
  batch.has_casts = has_casts_;
  // Jobs first: their size is a multiple of what items need.
  const std::size_t extra_nbytes = std::span(extra_).size_bytes();
  const std::size_t items_nbytes = std::span(items_).size_bytes();
  const at::Tensor host = HostBytes(extra_nbytes + items_nbytes, device_.device);
  auto* const bytes = static_cast<std::byte*>(host.mutable_data_ptr());
  if (extra_nbytes > 0) std::memcpy(bytes, extra_.data(), extra_nbytes);
  std::memcpy(bytes + extra_nbytes, items_.data(), items_nbytes);
  // From pinned memory, which torch gives to nobody else before this has come to its end.
  const at::Tensor there = NewOn(device_.device, host.numel());
  there.copy_(host, /*non_blocking=*/true);
  const auto* const base = static_cast<const std::byte*>(there.const_data_ptr());
  batch.planned = static_cast<const CopyJob*>(plan_->jobs.const_data_ptr());
  batch.extra = reinterpret_cast<const CopyJob*>(base);
  batch.items = reinterpret_cast<const CopyItem*>(base + extra_nbytes);
  const char* const error = device_.engine->run(batch, device_.stream());
  TORCH_CHECK(error == nullptr, "a batch of copies could not be started: ", error);
  if (!device_.device.is_cpu()) {
    // The plan's jobs were made on some stream and are used on any.
    const c10::impl::VirtualGuardImpl guard(device_.device.type());
    guard.recordDataPtrOnStream(plan_->jobs.storage().data_ptr(), guard.getStream(device_.device));
  }
}

}  // namespace loadplan
