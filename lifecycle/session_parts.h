// What a reload session keeps of the names of an update.
#ifndef LOADPLAN_LIFECYCLE_SESSION_PARTS_H_
#define LOADPLAN_LIFECYCLE_SESSION_PARTS_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "lifecycle/bound_plan.h"
#include "lifecycle/entry_parts.h"

namespace loadplan {

// A fallback name that arrives in parts is put together; of all others the executor takes care.
struct OpenParts {
  at::Tensor whole;
  HeldBytes held;
  Index nbytes = 0;          // landed
  std::int64_t arrival = 0;  // EagerCollection::NextArrival when it was begun
};

// A plan that gave destinations; of an atomic update the old bytes behind the first `num_kept` of
// them are kept.
struct Destinations {
  std::shared_ptr<const BoundPlan> plan;
  std::size_t num_kept = 0;
};

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_SESSION_PARTS_H_
