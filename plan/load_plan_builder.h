// From the records of a pass to a LoadPlan.
#ifndef LOADPLAN_PLAN_LOAD_PLAN_BUILDER_H_
#define LOADPLAN_PLAN_LOAD_PLAN_BUILDER_H_

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "geometry/export.h"
#include "plan/load_plan.h"
#include "plan/pass_writes.h"
#include "plan/records.h"

namespace loadplan {

// What a call of the loader with the fallback names alone does, as far as a trace of
// it shows. See Note [Fallback calls] in plan/fallback.h.
struct FallbackCall {
  std::vector<ReadRecord> touched;  // bytes of targets that it writes or reads
  std::vector<ReadRecord> written;  // those of them that it writes
  std::string error;  // the loader raised this: it cannot be called with some names only
  std::vector<std::int32_t> names;  // that the trace of it was given
  // What it writes, in each round of exploring, or in the one trace of it where no name
  // had to be explored.
  std::vector<std::vector<PassWrite>> rounds;
};

// What the loader does with all names, those that were left out of the log included.
// See Note [Exploring] in plan/pass_writes.h.
struct Exploration {
  std::vector<std::vector<PassWrite>> rounds;  // what each of them writes
  std::string error;                           // no values satisfied the loader, which raised this
};

struct BuildInput {
  std::vector<SourceTensor> sources;  // declared order; names are unique
  std::vector<TargetTensor> targets;
  RecordLog log;  // of the last, complete pass
  OverlapPolicy overlaps = OverlapPolicy::kFallback;
  // Names that earlier passes gave up on, with the reason.
  std::vector<std::pair<std::int32_t, std::string>> fallbacks;
  ContentDigests digests;  // of the log
  // nullopt: no name was left out of the log, or nobody has looked.
  std::optional<Exploration> exploration;
  // Used only where a name falls back; nullopt: not traced (yet).
  std::optional<FallbackCall> fallback_call;
};

// Resolves every write into a target backwards to initial bytes, clips earlier
// writes by later ones, and classifies each name:
//
//  direct    all bytes it writes are plain copies of its own bytes
//  derived   some go through a cast or a program
//  fallback  given, refused, behind a node that cannot be replayed, behind
//            geometry that is too irregular, or in an overlap of names (kFallback)
//  unneeded  nothing of it reaches a target
//
// Two writes of one byte are an overlap of names unless every name behind the
// earlier one is also behind the later one (a read-back, a sum that contains it).
//
// Errors, all before anything could be written: InvalidArgument for a name declared twice,
// for kError with an overlap (names both, the target, the bytes); FailedPrecondition
// where a byte of a target would come from no name and nothing that can be
// replayed (names target and operator).
LOADPLAN_API absl::StatusOr<LoadPlan> BuildLoadPlan(BuildInput input);

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_LOAD_PLAN_BUILDER_H_
