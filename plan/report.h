// The report of a plan: what people read before they trust it.
#ifndef LOADPLAN_PLAN_REPORT_H_
#define LOADPLAN_PLAN_REPORT_H_

#include <string>

#include "plan/load_plan.h"

namespace loadplan {

// Example, for a plan of three names:
//
//   load plan: 3 names, 96 bytes; reads 64 bytes
//     direct           1 name            32 bytes read of 32 bytes
//     derived          1 name            32 bytes read of 32 bytes
//     fallback         1 name             0 bytes read of 32 bytes
//   fallbacks
//     1 name: `aten::item`: a branch read its value (loader.py:12)
//       c
//   ...
//
// Reasons that differ only in numbers and names between backticks are one line, the
// most frequent first; the text shown is that of the first such name.
std::string MakeReport(const LoadPlan& plan);

// `12 bytes`, `3.5 KiB`, `2.0 GiB`.
std::string FormatNbytes(Index nbytes);

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_REPORT_H_
