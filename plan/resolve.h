// SymbolicMemory: what the bytes of a storage were at a time of the pass, in terms
// of initial bytes. See Note [Symbolic memory] in plan/records.h.
#ifndef LOADPLAN_PLAN_RESOLVE_H_
#define LOADPLAN_PLAN_RESOLVE_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "geometry/strided_map.h"
#include "plan/dtype.h"
#include "plan/records.h"
#include "plan/write_index.h"

namespace loadplan {

// The bytes `map.to()` of whatever was read are copies of the *initial* bytes
// `map.from()` of `storage`: a checkpoint tensor, a constant, live memory before
// the update, a node's output, or (kTemporary) nothing at all. `casts` is empty, or
// the dtypes that each item goes through, first to last.
struct Piece {
  StorageId storage = -1;
  StridedMap map;
  std::vector<CastStep> casts;
};

// Example: after copy 0 `q -> tmp[0:8]` and copy 1 `k -> tmp[8:16]`, reading
// `tmp[4:12]` at time 2 gives two pieces: bytes 4..7 of q and 0..3 of k; at time
// 1 bytes 4..7 of q and four bytes that tmp was born with.
class SymbolicMemory {
 public:
  // `log` must outlive the object and be well formed (see ValidateLog).
  explicit SymbolicMemory(const RecordLog& log);

  // Times of the copies into `storage` that write anything, ascending.
  std::span<const std::int32_t> WritesInto(StorageId storage) const;
  // Whether a copy before `time` wrote into `storage`: if not, its bytes are initial.
  bool WasWritten(StorageId storage, Index time) const;
  // Whether the copy record writes no byte of its destination twice.
  bool WritesOnce(Index time) const;

  // Follows the bytes `map.from()` of `storage`, as they were at `time`, to
  // initial bytes. The pieces' `to` sides are disjoint and cover `map.to()`.
  // `casts`: what the reader itself converts (empty: nothing).
  //
  // Errors, each a reason for a fallback: ResourceExhausted where the geometry is
  // too irregular, FailedPrecondition where an item of a cast would be cut, where
  // two casts meet in different dtypes, or where a write on the way writes a byte
  // twice.
  absl::StatusOr<std::vector<Piece>> Resolve(StorageId storage, const StridedMap& map,
                                             const std::vector<CastStep>& casts, Index time) const;

  // Checkpoint tensors (indices into sources, sorted) that may stand behind
  // `range` of `storage` at `time`: an over-approximation that cannot fail.
  std::vector<std::int32_t> NamesBehind(StorageId storage, ByteRange range, Index time) const;

  // Index over the writes into `storage`, made on first use.
  const WriteIndex& IndexOf(StorageId storage) const;

 private:
  struct Reading;  // a part of a read that is still to be resolved

  absl::Status Step(Reading reading, std::vector<Reading>& pending,
                    std::vector<Piece>& pieces) const;

  const RecordLog& log_;
  std::vector<std::int32_t> first_write_;  // per storage, into writes_; one more at the end
  std::vector<std::int32_t> writes_;
  mutable std::vector<std::unique_ptr<WriteIndex>> indices_;  // per storage
  mutable std::vector<std::int8_t> writes_once_;              // per copy; -1: not known yet
  mutable Index work_left_;  // pieces that may still be made, over all reads
};

// The bytes of `layout` moved so that its first byte has offset 0, each paired with
// itself in place: how an operator's input buffer is filled. One map where the layout
// touches no byte twice (stride 0 aside), else several. Errors as in Compose.
absl::StatusOr<std::vector<StridedMap>> BufferMaps(const StridedLayout& layout);

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_RESOLVE_H_
