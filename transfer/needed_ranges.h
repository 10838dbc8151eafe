// Which bytes of a checkpoint tensor a plan needs, as ranges to read.
#ifndef LOADPLAN_TRANSFER_NEEDED_RANGES_H_
#define LOADPLAN_TRANSFER_NEEDED_RANGES_H_

#include <cstdint>
#include <vector>

#include "geometry/export.h"
#include "geometry/index.h"
#include "plan/load_plan.h"

namespace loadplan {

// What it costs to read: bytes of a gap may be cheaper to read than to step over.
struct ReadCost {
  double seconds_per_read = 0;
  double bytes_per_second = 1;

  // The gap that costs as much as one more read.
  Index gap() const { return static_cast<Index>(seconds_per_read * bytes_per_second); }
};

// Disjoint ranges of the row-major bytes of source `entry`, ascending, that hold all that the plan
// needs of it: everything of a fallback, nothing of an unneeded name. Ranges with at most `gap`
// bytes between them are one; but two with kApartNbytes or more each stay two, because each may be
// read straight to where it goes.
//
// Example: columns 2..6 of a 3x8 uint8 tensor; gap 3: [2, 6) [10, 14) [18, 22); gap 4: [2, 22).
LOADPLAN_API std::vector<ByteRange> NeededRanges(const LoadPlan& plan, std::int32_t entry,
                                                 Index gap);

inline constexpr Index kApartNbytes = Index{1} << 18;

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_NEEDED_RANGES_H_
