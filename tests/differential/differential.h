// One program both ways: eagerly on real tensors, and traced, planned and executed by plan.
#ifndef LOADPLAN_TESTS_DIFFERENTIAL_DIFFERENTIAL_H_
#define LOADPLAN_TESTS_DIFFERENTIAL_DIFFERENTIAL_H_

#include <cstdint>
#include <string>

#include "plan/load_plan.h"
#include "tests/differential/random_program.h"

namespace loadplan::testing {

struct Outcome {
  enum Kind {
    kPlanned,   // executed by plan, every byte equal
    kFallback,  // some names go through the loader, called beside the plan; every byte equal
    kRefused,   // no plan; nothing was written
    kInvalid,   // eager torch raises
    kFailed,    // a byte differs, or something raised that must not
  };
  Kind kind = kPlanned;
  std::string detail;  // why refused, a fallback's reason, what differs
  int num_names = 0;
  int num_direct = 0;
  int num_derived = 0;
  bool on_meta = false;    // the loader was traced over meta targets
  bool from_file = false;  // the plan was written, read and bound anew before it was used
};

// `seed` draws the values and the order of arrival. Runs two updates through one plan with
// fresh values; what the plan says it does not read arrives as other values the second time. Half
// of the plans are saved and loaded before. One in six is traced over meta targets.
Outcome RunBothWays(const Program& program, OverlapPolicy overlaps, std::uint64_t seed);

// Drops statements for as long as the outcome stays kFailed.
Program Shrink(Program program, OverlapPolicy overlaps, std::uint64_t seed);

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_DIFFERENTIAL_DIFFERENTIAL_H_
