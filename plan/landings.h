// Landings: the writes of a plan as boxes on both sides, for people who look at it.
#ifndef LOADPLAN_PLAN_LANDINGS_H_
#define LOADPLAN_PLAN_LANDINGS_H_

#include <cstdint>
#include <vector>

#include "geometry/box.h"
#include "geometry/export.h"
#include "geometry/strided_layout.h"
#include "geometry/strided_map.h"
#include "plan/load_plan.h"

namespace loadplan {

// One write. `from` is in elements of the checkpoint tensor, `to` in elements of the target;
// what `map` pairs in another order (a transpose) is equal as a whole.
struct Landing {
  std::int32_t target = -1;  // of the names that show these bytes, the first
  Origin origin;
  std::vector<Box> from;  // empty where no checkpoint tensor's bytes are copied
  std::vector<Box> to;
  // Whether `to` and `from` are single boxes that hold more than what is meant: the exact ones
  // are too many to show, or the target is no row-major tensor.
  bool is_hull = false;
  // How elements of `from` are arranged otherwise in `to`.
  bool is_transposed = false;
  bool is_reversed = false;
  bool is_repeated = false;
};

// Every write of the plan: those of names in declared order, then constants, live bytes and
// results of operators.
LOADPLAN_API std::vector<Landing> LandingsOf(const LoadPlan& plan);

// The bytes that a map reads, as a layout: a flip reads what it reads without flipping, a
// broadcast what it reads once.
StridedLayout FromLayout(const StridedMap& map);

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_LANDINGS_H_
