// What a reload session is told at its start, and what it tells.
#ifndef LOADPLAN_LIFECYCLE_SESSION_REPORT_H_
#define LOADPLAN_LIFECYCLE_SESSION_REPORT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lifecycle/bound_plan.h"
#include "lifecycle/session_state.h"
#include "lifecycle/undo_log.h"
#include "lifecycle/written_bytes.h"

namespace loadplan {

// Note [Atomic updates]
//
//   Keep       a region that the plan writes, just before its first byte is written
//   KeepWhole  every target before the fallback call, and what else it writes while it runs (a
//              mirror outside the targets); every target before a hook; the storages of
//              destinations that were handed out, at the start. What these write nobody can say in
//              regions
//   PutBack    on any failure and on Abort. The session is idle then, as before its start (or
//              failed, if an earlier update had failed)
struct StartOptions {
  // Patterns of target names (`*`, `?`, `[...]`) that the update must cover in full.
  std::vector<std::string> required;
  // Keep what is overwritten until the update has ended well.
  bool atomic = false;
  UndoOptions undo;
  // Plans of this model through whose destinations an engine may write without a word.
  std::vector<std::shared_ptr<const BoundPlan>> destinations;
};

// What an update did.
struct Receipt {
  std::vector<std::int32_t> entries;      // what arrived, in order: into LoadPlan::sources()
  std::shared_ptr<const BoundPlan> plan;  // null where nothing was loaded
  Index nbytes = 0;                       // written by plan, or given to the fallback call
  double seconds = 0;                     // since Start
  std::vector<TargetBytes> coverage;  // of every target, in their order: bytes that were written
  // Layerwise: the most that was staged, and held on the host for want of room, at one time.
  Index peak_staging_nbytes = 0;
  Index peak_held_nbytes = 0;

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const std::int32_t entry : entries) {
      names.push_back(plan->plan().sources()[static_cast<std::size_t>(entry)].name);
    }
    return names;
  }
};

// Layers that can be processed, with their load-format tensors, now real.
struct ReadyLayers {
  std::int32_t group = -1;
  std::vector<std::int32_t> layers;
  std::vector<LiveTarget> tensors;
};

// For people and for `loadplan.state`.
struct SessionReport {
  SessionState state = SessionState::kIdle;
  double since = 0;                 // seconds since 1970: when the state was entered
  std::vector<std::string> landed;  // names of the current or failed update
  // Bytes that failed updates have written, or may have, and no complete one since.
  std::vector<TargetBytes> undefined;
  // What failed it; also of an atomic update whose old bytes are back.
  std::string error;
};

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_SESSION_REPORT_H_
