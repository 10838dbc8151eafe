// The steps of BuildLoadPlan. Internal to plan/load_plan_builder.cc (resolving, and who falls
// back) and plan/builder_emit.cc (what is left becomes the plan).
#ifndef LOADPLAN_PLAN_BUILDER_STEPS_H_
#define LOADPLAN_PLAN_BUILDER_STEPS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "plan/fallback.h"
#include "plan/load_plan_builder.h"
#include "plan/node_table.h"
#include "plan/resolve.h"
#include "plan/target_state.h"

namespace loadplan {

// One build, in the order of its member functions: resolve, decide what falls back,
// emit the rest.
class LoadPlanBuilder {
 public:
  explicit LoadPlanBuilder(BuildInput input);

  absl::StatusOr<LoadPlan> Build();

 private:
  struct StorageState {
    StorageId storage;
    TargetState state;
  };
  // Where a checkpoint piece of the plan is held until it is emitted.
  struct PieceRef {
    std::int32_t entry = -1;
    std::int32_t time = -1;
    std::int32_t piece = 0;  // in `held`; 0 for a plain copy
    StorageId target = -1;
    TargetWrite* held = nullptr;  // nullptr: a plain copy, the record itself
  };

  absl::Status CheckNames();
  absl::Status CheckTargets();
  absl::Status ResolveTargets();
  absl::Status NoteRefusals();
  absl::Status NoteStates();
  absl::Status NoteWrite(const TargetWrite& write, StorageId id);
  absl::Status NoteOverlaps();
  absl::Status LetEverythingFallBack(const std::string& reason);
  absl::StatusOr<std::vector<ReadRecord>> SteeringReads();
  absl::Status NoteAnsweredReads();
  absl::Status NoteExplored();
  absl::Status SettleFallbacks();
  absl::Status NoteFallbackCall();
  const std::vector<PassWrite>& LogWrites();
  std::vector<bool> KeptCopies() const;
  absl::Status CheckFallbackCall();
  absl::Status LetWritersFallBack(StorageId target, const StridedLayout& region,
                                  const std::string& reason, bool* found);
  absl::Status NoteLiveReads(StorageId target, const TargetWrite& write);

  // plan/builder_emit.cc
  void CheckCoverage();
  Index WrittenNbytes(StorageId target, const TargetState& state) const;
  std::vector<StridedLayout> WrittenRegions(StorageId target, const TargetState& state) const;
  // Whether the plan writes the record: else all of it goes through the loader, bytes
  // with no name behind them included.
  bool IsKept(const TargetWrite& write) const;
  void EmitPrograms();
  void EmitWrites();
  void EmitNameless(StorageId target, TargetWrite& write);
  static std::vector<PieceRef> ByEntry(const std::vector<PieceRef>& refs, size_t num_entries);
  void EmitOfEntries(const std::vector<PieceRef>& refs);
  void Classify();

  const StorageRecord& storage(StorageId id) const {
    return log_.storages[static_cast<size_t>(id)];
  }
  const std::string& target_name(StorageId id) const;
  bool IsMirror(StorageId id) const;
  Origin OriginOf(StorageId id) const;
  // Whether `piece` leaves `target` as it is: nobody's bytes, or live ones onto themselves.
  bool IsNoWrite(StorageId target, const Piece& piece) const;

  BuildInput input_;
  RecordLog& log_;
  LoadPlan plan_;
  std::vector<std::int32_t> target_of_storage_;  // the first target that shows it; -1
  std::optional<SymbolicMemory> memory_;
  std::optional<NodeTable> nodes_;
  std::optional<FallbackSet> fallbacks_;
  std::vector<StorageState> states_;
  std::vector<std::int32_t> program_of_node_;  // -1: not in the plan
  // For names of which nothing is left: who overwrote them.
  absl::flat_hash_map<std::int32_t, std::string> overwritten_;
  bool everything_falls_back_ = false;
  std::optional<std::vector<PassWrite>> log_writes_;
};

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_BUILDER_STEPS_H_
