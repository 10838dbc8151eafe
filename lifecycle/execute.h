// PlanExecutor: one update by plan. Bytes arrive name by name in any order and land where the
// plan says; what the plan computes is computed as soon as its last input is there.
#ifndef LOADPLAN_LIFECYCLE_EXECUTE_H_
#define LOADPLAN_LIFECYCLE_EXECUTE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "backend/target_set.h"
#include "backend/traced_plan.h"
#include "lifecycle/byte_copy.h"
#include "lifecycle/layer_staging.h"
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
  // Gathers the live bytes and constants that are read later, and runs the programs that
  // wait for no name. Call once, before the first Deliver.
  absl::Status Begin();
  // Lands `tensor`, the whole of source `entry` as declared, and runs what waited for it last.
  // Its own bytes only: constants wait for Finish. Each source once.
  absl::Status Deliver(std::int32_t entry, const at::Tensor& tensor);
  // Writes constants and copies of live bytes.
  absl::Status Finish();

  // Bytes of targets written so far.
  Index written_nbytes() const { return written_nbytes_; }
  // Items of the plan whose targets have been written, maybe in part; staged ones too.
  const absl::flat_hash_set<const WriteItem*>& begun_writes() const { return begun_writes_; }

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
  absl::Status Write(const WriteItem& item, const ByteSide& from) {
    return Write(item, item.map, from);
  }
  // `map` stands for that of `item`.
  absl::Status Write(const WriteItem& item, const StridedMap& map, const ByteSide& from);
  absl::Status RunReadyPrograms(std::vector<std::int32_t> candidates);
  absl::Status RunProgram(std::int32_t index);
  absl::Status Compute(std::int32_t index, std::vector<at::Tensor>& results);
  absl::Status UseResults(std::int32_t index, const std::vector<at::Tensor>& results);
  bool IsOfLayer(StorageId storage) const { return staging_ != nullptr && staging_->Owns(storage); }
  bool IsStaged(StorageId storage) const {
    return staging_ != nullptr && staging_->Stages(storage);
  }
  ByteSide TargetSide(StorageId storage) const;

  const std::shared_ptr<const TracedPlan> traced_;
  const std::shared_ptr<const TargetSet> targets_;
  LayerStaging* const staging_;
  const LoadPlan& plan_;
  at::Device device_ = at::kCPU;  // of buffers: where eager would have run
  UndoLog* undo_ = nullptr;
  Index written_nbytes_ = 0;
  absl::flat_hash_set<const WriteItem*> begun_writes_;

  std::vector<ProgramState> programs_;
  absl::flat_hash_map<std::int32_t, std::vector<PieceRef>> pieces_of_source_;
  absl::flat_hash_map<std::int32_t, std::vector<PieceRef>> pieces_of_program_;
  std::vector<PieceRef> early_pieces_;  // of constants and live bytes
  absl::flat_hash_map<std::int32_t, std::vector<std::int32_t>> programs_of_source_;
  absl::flat_hash_map<std::int32_t, std::vector<std::int32_t>> writes_of_program_;
  std::vector<at::Tensor> live_bytes_;  // packed, parallel to plan_.live_copies()
};

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_EXECUTE_H_
