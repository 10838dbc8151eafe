// Premises: digests of the live bytes whose value steered the trace, and that the
// plan never writes (an expert map, a mask).
#ifndef LOADPLAN_LIFECYCLE_PREMISES_H_
#define LOADPLAN_LIFECYCLE_PREMISES_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "backend/target_set.h"
#include "backend/traced_plan.h"
#include "geometry/export.h"

namespace loadplan {

class LOADPLAN_API Premises {
 public:
  // Reads the bytes now.
  Premises(const TracedPlan& traced, const TargetSet& targets);
  // What they were when a plan was saved; parallel to LoadPlan::premises(). Without externals.
  explicit Premises(std::vector<std::uint64_t> digests) : digests_(std::move(digests)) {}

  // OK where they are what they were. Else FailedPrecondition, naming what changed: the
  // loader would do something else today.
  absl::Status Check(const TracedPlan& traced, const TargetSet& targets) const;

  const std::vector<std::uint64_t>& digests() const { return digests_; }

 private:
  std::vector<std::uint64_t> digests_;    // parallel to LoadPlan::premises()
  std::vector<std::uint64_t> externals_;  // parallel to TracedPlan::externals
};

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_PREMISES_H_
