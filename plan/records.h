// What one traced pass leaves behind: storages, copies between them, operators
// that computed something. Plain data, no torch.
//
// Note [Symbolic memory]
//
//   tmp = torch.cat([q, k])          copy q -> storage 7, copy k -> storage 7
//   p.copy_(tmp[:4])                 copy storage 7 -> storage 2 (a target)
//
// Every tensor that took part in the pass is a byte range of a *storage*. A storage
// has initial bytes (its kind says whose) and a history: the copies into it, in the
// order of the pass. Nothing else ever changes it: an in-place operator is an
// operator with a fresh output (kValue, immutable) and a copy of that output over
// its argument. The bytes of a storage at a given time are therefore a pure
// function of the log, and a write is resolved by following its source backwards
// through histories until only initial bytes are left (plan/resolve.h).
#ifndef LOADPLAN_PLAN_RECORDS_H_
#define LOADPLAN_PLAN_RECORDS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "geometry/export.h"
#include "geometry/index.h"
#include "geometry/strided_layout.h"
#include "geometry/strided_map.h"
#include "plan/dtype.h"

namespace loadplan {

// Index into RecordLog::storages and RecordLog::nodes.
using StorageId = std::int32_t;
using NodeId = std::int32_t;

// Whose bytes a storage holds before its first copy record.
enum class StorageKind : std::uint8_t {
  kCheckpoint,  // the checkpoint tensor of that index (row-major, offset 0)
  kTarget,      // live memory that the plan may write: the bytes at the start of the update
  kTemporary,   // memory made during the pass: nobody's (uninitialised)
  kScratch,     // a real tensor that is no target: its bytes when the pass met it, a constant
  kConstant,    // a value captured during the pass (a fill pattern, a real tensor); immutable
  kValue,       // an output of an operator node; immutable, dense in the node's output strides
};

struct StorageRecord {
  StorageKind kind = StorageKind::kTemporary;
  Index nbytes = 0;
  // Checkpoint: index into BuildInput::sources. Value: the node. Constant and
  // scratch: index into the backend's table of captured tensors. Else -1.
  std::int32_t ref = -1;
  std::int32_t output = 0;  // Value: which output of the node
};

// `to` bytes become copies of `from` bytes, as the map pairs them. With two dtypes
// the map is a cast: each item is converted as `Tensor.copy_` converts (`scattered`: see
// CastStep).
struct CopyRecord {
  StorageId to = -1;
  StorageId from = -1;
  DType to_dtype;
  DType from_dtype;
  StridedMap map;
  bool scattered = false;

  // Empty where it is no cast.
  std::vector<CastStep> casts() const {
    if (!map.is_cast()) return {};
    return {from_dtype, CastStep(to_dtype, scattered)};
  }
};

// Something that was read: bytes of a storage as they were at `time`.
struct ReadRecord {
  StorageId storage = -1;
  StridedLayout layout;
  DType dtype;
};

// An operator that computed new values (or would have). `time` is the number of
// copy records before it: it read its inputs as those left them.
struct NodeRecord {
  std::string op;  // `aten::mul.Tensor`
  std::vector<ReadRecord> inputs;
  std::vector<StorageId> outputs;  // kValue storages
  Index time = 0;
  // Empty where the backend can run the operator again from the bytes of its
  // inputs; else why not. A name whose bytes reach a target through such a node
  // is a fallback with this reason.
  std::string not_replayable;
  // A real call may order the strides of its outputs otherwise than the trace saw.
  bool layout_is_unsure = false;
  // The bits of its outputs do not depend on the strides of its inputs.
  bool is_elementwise = false;
};

// A read that only real bytes could have answered (`item`, a branch, a data
// pointer). Every checkpoint tensor behind `inputs` is a fallback.
struct RefusalRecord {
  std::string op;
  std::string reason;  // one sentence, without the tensor's name
  std::string where;   // `file.py:123` of the loader; may be empty
  std::vector<ReadRecord> inputs;
  Index time = 0;
  // Where no name stands behind the inputs: whether every name goes through the loader. Else the
  // plan is refused.
  bool may_concern_all = false;
};

// A read that real bytes did answer: live memory that the pass had not written, or
// what was computed from it. The trace went on with that answer.
struct AnsweredRead {
  ReadRecord read;
  Index time = 0;
};

// One pass over `load_weights`. Copies are in program order; the index of a copy
// is its time.
struct RecordLog {
  std::vector<StorageRecord> storages;
  std::vector<CopyRecord> copies;
  std::vector<NodeRecord> nodes;
  std::vector<RefusalRecord> refusals;
  std::vector<AnsweredRead> answered;
};

// InvalidArgument with a sentence where an id of `log` is out of range, a map reaches
// outside its storage, dtypes and cast flag of a copy disagree, or a copy writes
// into a node's output.
LOADPLAN_API absl::Status ValidateLog(const RecordLog& log);

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_RECORDS_H_
