// CopyDevice: where batches of copies are run, and what a plan keeps there.
#ifndef LOADPLAN_LIFECYCLE_COPY_DEVICE_H_
#define LOADPLAN_LIFECYCLE_COPY_DEVICE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "backend/target_set.h"
#include "cuda/copy_engine.h"
#include "geometry/index.h"
#include "plan/load_plan.h"
#include "plan/plan_copies.h"

namespace loadplan {

// An engine and one device that it serves.
struct CopyDevice {
  const CopyEngine* engine = nullptr;
  at::Device device = at::kCPU;
  // Only calls that land many names make batches; what comes alone is copied at once.
  bool is_for_many = false;

  // The current stream, as the engine wants it.
  void* stream() const;

  friend bool operator==(const CopyDevice&, const CopyDevice&) = default;
};

// Note [Batched copies]
//
//   LOADPLAN_CUDA_BATCH   unset, "", 0    one `copy_` for each write: the default. The host
//                                         has batches where one call lands many names
//                         1               writes into the CUDA device of the first target in
//                         batches reference       the same on the CPU, by the code of the kernel:
//                         for tests
//
// Of a call that lands names, all writes whose source and target lie on that device are put on its
// current stream together, before the call returns; a sender on that stream may then reuse its
// memory, as after `copy_`. Casts of several steps and those that the engine does not make bit by
// bit as torch does (lifecycle/cast_check.h), constants, results of programs, staged layers and
// bytes from elsewhere go on as they do without it. So does everything while the stream is being
// captured.
//
// What is copied one by one is on the same stream. It comes after the batch that waits where it
// reads or writes what that batch writes; otherwise nothing tells the order.
//
// nullopt: no batches. FailedPrecondition: they are asked for, targets are on a CUDA device, and
// libloadplan_cuda.so cannot be used; says why. InvalidArgument: another value of the variable.
absl::StatusOr<std::optional<CopyDevice>> ChooseCopyDevice(const TargetSet& targets);
// The same for a value of the variable.
absl::StatusOr<std::optional<CopyDevice>> ChooseCopyDevice(const TargetSet& targets,
                                                           std::string_view wanted);

// The host, where no device was chosen; nullopt where no target lies there. See Note [Copies on the
// host] in lifecycle/host_copies.h.
std::optional<CopyDevice> HostCopyDevice(const TargetSet& targets);

// libloadplan_cuda.so, opened when it is first asked for: beside this library, or where
// LOADPLAN_CUDA_LIBRARY says. NotFound: it is not there or cannot be opened; FailedPrecondition:
// it was built with another libloadplan.so.
absl::StatusOr<const CopyEngine*> CudaCopyEngine();
// The same of the library at `path`.
absl::StatusOr<const CopyEngine*> OpenCopyEngine(const std::string& path);

// What a device keeps of a plan: its jobs.
struct DevicePlan {
  DevicePlan(const LoadPlan& plan, std::vector<std::uint64_t> addresses,
             PlanCopies::HasCast has_cast)
      : copies(plan.writes(), std::move(addresses), has_cast) {}

  PlanCopies copies;
  // The memory of targets: sorted, disjoint.
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
  // copies.jobs() on the device; undefined until a batch needs them. 144 bytes a job.
  at::Tensor jobs;
};

// Made when an update first asks, used by those after it. One update at a time uses it.
class DevicePlanCache {
 public:
  // `plan` must outlive what is returned. Made anew where targets lie elsewhere than before.
  std::shared_ptr<DevicePlan> Get(const LoadPlan& plan, const TargetSet& targets,
                                  const CopyDevice& device);

 private:
  std::mutex mutex_;
  std::shared_ptr<DevicePlan> plan_;
  CopyDevice device_;
};

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_COPY_DEVICE_H_
