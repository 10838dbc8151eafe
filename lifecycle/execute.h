// PlanExecutor: one update by plan. Bytes arrive name by name in any order and land where the
// plan says; what the plan computes is computed as soon as its last input is there.
#ifndef LOADPLAN_LIFECYCLE_EXECUTE_H_
#define LOADPLAN_LIFECYCLE_EXECUTE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "backend/target_set.h"
#include "backend/traced_plan.h"
#include "lifecycle/byte_copy.h"
#include "lifecycle/copy_device.h"
#include "lifecycle/copy_queue.h"
#include "lifecycle/entry_parts.h"
#include "lifecycle/layer_staging.h"
#include "lifecycle/placed_part.h"
#include "lifecycle/undo_log.h"

namespace loadplan {

// Note [What an update holds]
//
//   p.copy_(a * b)      `a` arrives in bucket 1, `b` in bucket 2
//
// Nothing that arrives is kept: a sender may reuse its buffer as soon as a call returns. Bytes
// that a program waits for are gathered, piece by piece, into a buffer of exactly the layout
// that its operator reads; it is freed when the operator has run. Live bytes that the plan
// reads as they were before the update are gathered before the first write.
class PlanExecutor {
 public:
  // With `staging`, which must outlive the executor, bytes of staged targets go there, and their
  // constants with them.
  PlanExecutor(std::shared_ptr<const TracedPlan> traced, std::shared_ptr<const TargetSet> targets,
               LayerStaging* staging = nullptr);

  // Keeps in `undo`, which must outlive the executor, the bytes of each region before they are
  // written. Null: nothing is kept. Call before Begin.
  void KeepIn(UndoLog* undo) { undo_ = undo; }
  // Plain copies into targets wait for Flush, and run together; on a device that is for many, only
  // those between BeginBatch and Flush. Call before Begin.
  void BatchOn(const CopyDevice& device, std::shared_ptr<DevicePlan> plan);
  void BeginBatch() { in_batch_ = true; }
  // Gathers the live bytes and constants that are read later, and runs the programs that
  // wait for no name. Call once, before the first Deliver.
  absl::Status Begin();
  // Lands `tensor`, the whole of source `entry` as declared, and runs what waited for it last.
  // Its own bytes only: constants wait for Finish. Each source once.
  absl::Status Deliver(std::int32_t entry, const at::Tensor& tensor);

  // The same, part by part. See Note [Parts] in lifecycle/entry_parts.h.
  //
  // Lands those bytes of source `entry` that `held` has: `to` are bytes of the row-major checkpoint
  // tensor, `from` bytes of `from`. Parts of one entry share no byte and come in any order; bytes
  // that the plan does not need are left alone. InvalidArgument, with nothing written: bytes
  // outside the tensor, bytes that came before.
  absl::Status DeliverPart(std::int32_t entry, const StridedMap& held, const ByteSide& from);
  // Where the bytes of such a part go, for a caller that writes them itself and then says so:
  // nullopt where they are no plain copies between memory of the host.
  absl::StatusOr<std::optional<PlacedPart>> PlacesOf(std::int32_t entry, const StridedMap& held);
  // Whether PlacesOf is likely to have an answer for every part of `entry`.
  bool HasPlaces(std::int32_t entry) const;
  absl::Status DeliveredPart(std::int32_t entry, const StridedMap& held, const PlacedPart& placed);
  // Where bytes `bytes` of the row-major checkpoint tensor go, where that is as they are to one
  // contiguous place and nowhere else. A caller that has written them there says so.
  absl::StatusOr<std::optional<ByteSide>> InPlace(std::int32_t entry, ByteRange bytes);
  absl::Status DeliveredInPlace(std::int32_t entry, ByteRange bytes);
  // All that the plan needs of `entry` is there: runs what waited for it last. Instead of
  // Deliver. FailedPrecondition, naming the tensor, where bytes are missing.
  absl::Status Complete(std::int32_t entry);

  // Writes constants and copies of live bytes; of the latter those for layers were written first.
  absl::Status Finish();

  // Starts what waits; until then no sender may use memory again that it has handed over. Where
  // nothing is batched there is nothing to do.
  absl::Status Flush();
  // Before bytes of `from` are read at once: where they are live, what waits is started first.
  absl::Status BeforeRead(const ByteSide& from);

  // Bytes of targets written so far.
  Index written_nbytes() const { return written_nbytes_; }
  // Items of the plan whose targets have been written, maybe in part; staged ones too.
  void ForEachBegun(absl::FunctionRef<void(const WriteItem& item)> f) const;
  // Whether these are all that the plan writes.
  bool HasBegunAll() const;
  // Null where nothing is batched.
  const CopyQueue* queue() const { return queue_.get(); }

 private:
  // One piece of one input of a program.
  struct PieceRef {
    std::int32_t program = -1;
    std::int32_t input = -1;
    std::int32_t piece = -1;
  };
  struct ProgramState {
    std::vector<at::Tensor> inputs;  // buffers, made when the first piece comes
    std::size_t num_missing = 0;     // names
  };

  void IndexPrograms();
  const WriteItem& PieceOf(const PieceRef& ref) const;
  absl::Status Gather(const PieceRef& ref, const ByteSide& from);
  absl::Status GatherAll(const std::vector<PieceRef>& pieces, const ByteSide& from);
  // Call before any byte of `item` is written; again for a later part of it.
  absl::Status BeforeWrite(const WriteItem& item);
  // Into plan_.writes(); nullopt: it is none of those.
  std::optional<std::size_t> IndexOf(const WriteItem& item) const;
  absl::Status Write(const WriteItem& item, const ByteSide& from) {
    return Write(item, item.map, from);
  }
  // `map` stands for that of `item`.
  absl::Status Write(const WriteItem& item, const StridedMap& map, const ByteSide& from);
  absl::Status WriteLiveCopies(bool of_layers);
  // The buffer of a program's input, made when it is first asked for.
  ByteSide InputSide(const PieceRef& ref);
  // Calls `f(item, where it goes)` for everything that reads source `entry`; stops at an error.
  absl::Status ForEachReader(
      std::int32_t entry,
      absl::FunctionRef<absl::Status(const WriteItem& item, const PieceRef* piece)> f) const;
  // Whether `item` is a plain copy that nothing counts as it is written.
  bool HasPlace(const WriteItem& item, const PieceRef* piece) const;
  // Writes `map`, a part of that of `item`, to where the item goes.
  absl::Status Place(const WriteItem& item, const PieceRef* piece, const StridedMap& map,
                     const ByteSide& from);
  // What alone reads some bytes, as one contiguous run, and where in its side it puts them.
  struct SoleReader {
    const WriteItem* item;
    const PieceRef* piece;
    Index byte_offset;
  };
  std::optional<SoleReader> SoleReaderOf(std::int32_t entry, ByteRange bytes);
  EntryParts& PartsOf(std::int32_t entry);
  absl::Status LandCasts(std::int32_t entry, EntryParts& parts, const StridedMap& held,
                         const ByteSide& from);
  absl::Status Convert(std::int32_t entry, const ByteSide& from, Index shift);
  // One more name of these programs is there.
  absl::Status Arrived(std::int32_t entry);
  absl::Status RunReadyPrograms(std::vector<std::int32_t> candidates);
  absl::Status RunProgram(std::int32_t index);
  absl::Status Compute(std::int32_t index, std::vector<at::Tensor>& results);
  absl::Status UseResults(std::int32_t index, const std::vector<at::Tensor>& results);
  bool IsOfLayer(StorageId storage) const { return staging_ != nullptr && staging_->Owns(storage); }
  bool IsStaged(StorageId storage) const {
    return staging_ != nullptr && staging_->Stages(storage);
  }
  ByteSide TargetSide(StorageId storage) const;
  absl::Status WriteToTarget(const WriteItem& item, const StridedMap& map, const ByteSide& from);
  bool Batches() const { return queue_ != nullptr && (in_batch_ || !queue_->device().is_for_many); }

  const std::shared_ptr<const TracedPlan> traced_;
  const std::shared_ptr<const TargetSet> targets_;
  LayerStaging* const staging_;
  const LoadPlan& plan_;
  at::Device device_ = at::kCPU;  // of buffers: where eager would have run
  UndoLog* undo_ = nullptr;
  std::unique_ptr<CopyQueue> queue_;  // null where nothing is batched
  bool in_batch_ = false;
  Index written_nbytes_ = 0;
  std::vector<bool> begun_writes_;                      // parallel to plan_.writes()
  absl::flat_hash_set<const WriteItem*> begun_others_;  // constants and the like
  std::size_t num_begun_ = 0;                           // of both

  std::vector<ProgramState> programs_;
  absl::flat_hash_map<std::int32_t, std::vector<PieceRef>> pieces_of_source_;
  absl::flat_hash_map<std::int32_t, std::vector<PieceRef>> pieces_of_program_;
  std::vector<PieceRef> early_pieces_;  // of constants and live bytes
  absl::flat_hash_map<std::int32_t, std::vector<std::int32_t>> programs_of_source_;
  absl::flat_hash_map<std::int32_t, std::vector<std::int32_t>> writes_of_program_;
  absl::flat_hash_map<std::int32_t, EntryParts> parts_;  // of entries that come in parts
  std::vector<at::Tensor> live_bytes_;                   // packed, parallel to plan_.live_copies()
};

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_EXECUTE_H_
