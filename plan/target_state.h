// What the copies of a pass leave in one target storage.
#ifndef LOADPLAN_PLAN_TARGET_STATE_H_
#define LOADPLAN_PLAN_TARGET_STATE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "plan/node_table.h"
#include "plan/records.h"
#include "plan/resolve.h"

namespace loadplan {

// A copy of a checkpoint view, cast or not, that no other copy meets: nearly all of a
// large model. Its only piece is the record itself.
struct PlainWrite {
  std::int32_t time = -1;
  std::int32_t name = -1;  // into sources
};

// Any other copy record into the storage.
struct TargetWrite {
  std::int32_t time = -1;
  std::vector<Piece> visible;       // what is left of it after later copies
  std::vector<std::int32_t> names;  // sources behind all it wrote, sorted
  bool reads_live = false;          // live-before bytes behind all it wrote
  bool is_overwritten_by_nothing_named = false;
  // Not OK: its bytes could not be followed or clipped. Then `names` is an
  // over-approximation and the one visible piece, of storage -1, says where it wrote.
  absl::Status status;
};

// An earlier and a later name that write `nbytes` common bytes, where the overlap rule
// of plan/load_plan_builder.h counts them.
struct NameMeeting {
  std::int32_t earlier = -1;
  std::int32_t later = -1;
  Index nbytes = 0;
};

struct TargetState {
  std::vector<TargetWrite> writes;    // by time
  std::vector<PlainWrite> plain;      // by time
  Index plain_nbytes = 0;             // that they write
  std::vector<NameMeeting> meetings;  // each pair of names once
  // One name of each of two writes that share bytes, whoever counts as behind them: a
  // call of the loader with one of them would write bytes that the plan writes for the
  // other.
  std::vector<std::pair<std::int32_t, std::int32_t>> neighbours;
  // Not OK: which bytes which copy leaves is not known.
  absl::Status status;
};

TargetState ResolveTarget(const RecordLog& log, const SymbolicMemory& memory, NodeTable& nodes,
                          StorageId target);

// Pairs (earlier, later) of positions in `times`, copies into one storage, that
// share a byte. `times` ascends. Errors as in Compose.
absl::StatusOr<std::vector<std::pair<std::int32_t, std::int32_t>>> MeetingCopies(
    const RecordLog& log, std::span<const std::int32_t> times);

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_TARGET_STATE_H_
