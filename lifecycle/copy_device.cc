#include "lifecycle/copy_device.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lifecycle/host_copies.h"
#include "lifecycle/reference_copies.h"

namespace loadplan {
namespace {

constexpr char kVariable[] = "LOADPLAN_CUDA_BATCH";
constexpr char kLibrary[] = "libloadplan_cuda.so";

std::string LibraryPath() {
  if (const char* const path = std::getenv("LOADPLAN_CUDA_LIBRARY")) return path;
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&CudaCopyEngine), &info) == 0) return kLibrary;
  return (std::filesystem::path(info.dli_fname).parent_path() / kLibrary).string();
}

using Range = std::pair<std::uint64_t, std::uint64_t>;

Range RangeOf(const at::Tensor& tensor, bool is_written) {
  // Only mutable_data() separates a storage that shares its memory copy-on-write; what nobody
  // writes may go on sharing it.
  const c10::Storage& storage = tensor.storage();
  const void* const data = is_written ? storage.mutable_data() : storage.data();
  const auto start = reinterpret_cast<std::uint64_t>(data);
  return {start, start + storage.nbytes()};
}

}  // namespace

void* CopyDevice::stream() const {
  if (device.is_cpu()) return nullptr;
  const auto* const guard = c10::impl::getDeviceGuardImpl(device.type());
  return guard->getStreamNativeHandle(guard->getStream(device));
}

std::optional<CopyDevice> HostCopyDevice(const TargetSet& targets) {
  const bool has_some = std::ranges::any_of(
      targets.storages(), [](const at::Tensor& tensor) { return tensor.is_cpu(); });
  if (!has_some) return std::nullopt;
  return CopyDevice{&HostCopyEngine(), at::kCPU, /*is_for_many=*/true};
}

absl::StatusOr<const CopyEngine*> CudaCopyEngine() {
  static const absl::StatusOr<const CopyEngine*> engine = OpenCopyEngine(LibraryPath());
  return engine;
}

absl::StatusOr<const CopyEngine*> OpenCopyEngine(const std::string& path) {
  // Never closed: a device may still run its kernels when this library goes.
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return absl::NotFoundError(dlerror());
  const auto get = reinterpret_cast<GetCopyEngine>(dlsym(library, kGetCopyEngine));
  if (get == nullptr) return absl::NotFoundError(dlerror());
  const CopyEngine* const engine = get();
  if (engine->layout == kCopyEngineLayout) return engine;
  return absl::FailedPreconditionError(
      absl::StrCat("`", path, "` was built with another libloadplan.so"));
}

absl::StatusOr<std::optional<CopyDevice>> ChooseCopyDevice(const TargetSet& targets) {
  const char* const wanted = std::getenv(kVariable);
  return ChooseCopyDevice(targets, wanted == nullptr ? "" : wanted);
}

absl::StatusOr<std::optional<CopyDevice>> ChooseCopyDevice(const TargetSet& targets,
                                                           std::string_view wanted) {
  if (wanted.empty() || wanted == "0") return std::nullopt;
  const bool is_reference = wanted == "reference";
  if (!is_reference && wanted != "1") {
    return absl::InvalidArgumentError(
        absl::StrCat(kVariable, " is `", std::string(wanted), "`; expected 0, 1 or reference"));
  }
  const auto first = std::ranges::find_if(targets.storages(), [&](const at::Tensor& tensor) {
    return is_reference ? tensor.is_cpu() : tensor.is_cuda();
  });
  if (first == targets.storages().end()) return std::nullopt;
  if (is_reference) return CopyDevice{&ReferenceCopyEngine(), first->device()};
  const absl::StatusOr<const CopyEngine*> engine = CudaCopyEngine();
  if (engine.ok()) return CopyDevice{*engine, first->device()};
  return absl::FailedPreconditionError(
      absl::StrCat(kVariable, " is 1 and ", kLibrary,
                   " cannot be used: ", std::string(engine.status().message()),
                   "; build loadplan where there is an nvcc, or unset ", kVariable));
}

std::shared_ptr<DevicePlan> DevicePlanCache::Get(const LoadPlan& plan, const TargetSet& targets,
                                                 const CopyDevice& device) {
  std::vector<bool> is_written(targets.storages().size(), false);
  for (const WriteItem& item : plan.writes())
    is_written[static_cast<std::size_t>(item.target)] = true;
  std::vector<std::uint64_t> addresses(is_written.size(), 0);
  std::vector<std::pair<Range, std::size_t>> ranges;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    const at::Tensor& tensor = targets.storages()[i];
    if (tensor.device() != device.device || tensor.storage().nbytes() == 0) continue;
    ranges.emplace_back(RangeOf(tensor, is_written[i]), i);
    if (is_written[i]) addresses[i] = ranges.back().first.first;
  }
  std::ranges::sort(ranges);
  std::vector<Range> merged;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const Range& range = ranges[i].first;
    if (merged.empty() || merged.back().second <= range.first) {
      merged.push_back(range);
      continue;
    }
    // Two storages over one memory: what they share is written in the order of the plan only
    // where each write is a call of its own.
    merged.back().second = std::max(merged.back().second, range.second);
    addresses[ranges[i].second] = addresses[ranges[i - 1].second] = 0;
  }
  const std::lock_guard lock(mutex_);
  if (plan_ == nullptr || !(device_ == device) || plan_->copies.addresses() != addresses) {
    plan_ = std::make_shared<DevicePlan>(plan, std::move(addresses), device.engine->has_cast);
    plan_->ranges = std::move(merged);
    device_ = device;
  }
  return plan_;
}

}  // namespace loadplan
