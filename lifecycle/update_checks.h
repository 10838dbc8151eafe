// What a plan must be like for an update that is about to start.
#ifndef LOADPLAN_LIFECYCLE_UPDATE_CHECKS_H_
#define LOADPLAN_LIFECYCLE_UPDATE_CHECKS_H_

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "backend/traced_plan.h"
#include "lifecycle/written_bytes.h"
#include "plan/load_plan.h"

namespace loadplan {

// FailedPrecondition, naming the targets, where one that matches a pattern of `required` has bytes
// that nothing writes. InvalidArgument: a pattern that matches no target. Where no trace shows what
// the fallback names cover, bytes are not missed here: see CheckRequiredWritten.
absl::Status CheckRequired(const TracedPlan& traced, std::span<const std::string> required);
// The same for bytes that `written` does not hold.
absl::Status CheckRequiredWritten(std::span<const TargetTensor> targets,
                                  const WrittenBytes& written,
                                  std::span<const std::string> required);

// `partial` holds entries, sorted. InvalidArgument where a program has some but not all of its
// names among them.
absl::Status CheckWhole(const LoadPlan& plan, std::span<const std::int32_t> partial);

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_UPDATE_CHECKS_H_
