// LoadPlan: which bytes of which checkpoint tensor land where in live memory.
// Immutable once built; no torch, no pointers, so that it can be saved: what is added to it
// goes into plan files too (plan/plan_file.h).
#ifndef LOADPLAN_PLAN_LOAD_PLAN_H_
#define LOADPLAN_PLAN_LOAD_PLAN_H_

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "geometry/box.h"
#include "geometry/export.h"
#include "geometry/view_to_box.h"
#include "plan/dtype.h"
#include "plan/records.h"

namespace loadplan {

// A checkpoint tensor as declared: `ParamMeta` in Python.
struct LOADPLAN_API SourceTensor {
  std::string name;
  DimVector shape;
  DType dtype;
  StorageId storage = -1;  // in the log

  Index nbytes() const;  // of the whole tensor
};

// One name of a live tensor. Several names may lie in one storage: `storage`
// is what is written, the layout says which of its bytes this name shows.
struct TargetTensor {
  std::string name;
  StorageId storage = -1;
  StridedLayout layout;  // in bytes of the storage
  DType dtype;
  // No target that anybody declared: the loader writes it, and it outlives the load.
  bool is_mirror = false;
};

enum class EntryKind : std::uint8_t { kDirect, kDerived, kFallback, kUnneeded };
LOADPLAN_API LOADPLAN_API std::string_view ToString(EntryKind kind);  // "direct", "derived", ...

// Where the bytes of a write come from.
enum class OriginKind : std::uint8_t {
  kCheckpoint,  // index: into sources
  kConstant,    // index: into the backend's captured tensors
  kLiveBefore,  // index: a target StorageId, read before the update writes anything
  kValue,       // index: into LoadPlan::programs, `output` says which result
};
struct Origin {
  OriginKind kind = OriginKind::kCheckpoint;
  std::int32_t index = -1;
  std::int32_t output = 0;

  friend bool operator==(const Origin&, const Origin&) = default;
};

// A planned copy. `map.to()` lies in live storage `target` (or in the dense input
// buffer of a program), `map.from()` in the origin's bytes. `casts` is empty for
// a copy of bytes; else the dtypes that an item goes through, first to last
// (two or more).
struct WriteItem {
  Origin origin;
  StorageId target = -1;
  StridedMap map;
  std::vector<CastStep> casts;
};

// `checkpoint 0 -> storage 4: 0 + ():() x 8 <- 16 + ():() x 8`, with
// `, cast float32 -> bfloat16` behind it where items are converted; `-> input` where the
// target is a program's input.
LOADPLAN_API std::string ToString(const WriteItem& item);
LOADPLAN_API std::ostream& operator<<(std::ostream& stream, const WriteItem& item);

// `cast float32 -> bfloat16 -> float32`.
LOADPLAN_API std::string CastText(const std::vector<CastStep>& casts);

// One input of a program: bytes gathered into a buffer that is laid out like the
// tensor the operator saw (`layout`, gaps included), offset 0.
struct ProgramInput {
  StridedLayout layout;
  DType dtype;
  std::vector<WriteItem> pieces;  // target = -1
};

// An operator to run again. Programs are in an order in which each comes after
// those it reads.
struct Program {
  NodeId node = -1;  // the backend's key
  std::string op;
  std::vector<ProgramInput> inputs;
  std::vector<std::int32_t> names;  // every source it needs, transitively; sorted
};

struct PlanEntry {
  EntryKind kind = EntryKind::kUnneeded;
  // Fallback: why. Unneeded: why, where it is not obvious. Derived: what computes it.
  std::string reason;
  std::uint32_t first_write = 0;  // into LoadPlan::writes(): the copies of this name's own
  std::uint32_t num_writes = 0;   // bytes (casts included)
};

// Two names that write one byte, and how many bytes they share in that storage.
struct NameOverlap {
  std::int32_t first = 0;  // sources, declared order
  std::int32_t second = 0;
  StorageId storage = -1;
  Index nbytes = 0;
};

// Bytes of a target that the plan does not write.
struct UncoveredTarget {
  std::int32_t target = 0;  // into targets()
  Index nbytes = 0;         // uncovered
  Index total_nbytes = 0;
};

// Live bytes that the plan never writes and whose value steered the trace: an expert
// map, a mask. Another value means another plan.
struct Premise {
  StorageId storage = -1;
  StridedLayout layout;
};

enum class OverlapPolicy : std::uint8_t { kFallback, kLastWins, kError };

// Moved, never copied: names are found through views into the plan itself.
class LOADPLAN_API LoadPlan {
 public:
  LoadPlan() = default;
  LoadPlan(LoadPlan&&) = default;
  LoadPlan& operator=(LoadPlan&&) = default;
  LoadPlan(const LoadPlan&) = delete;
  LoadPlan& operator=(const LoadPlan&) = delete;

  const std::vector<SourceTensor>& sources() const { return sources_; }
  const std::vector<TargetTensor>& targets() const { return targets_; }
  // Without mirrors, which come last.
  std::span<const TargetTensor> declared_targets() const;
  const std::vector<PlanEntry>& entries() const { return entries_; }  // parallel to sources()
  // Whether there are names and each goes through the loader: one call of it with all of them.
  bool AllFallBack() const;
  // Index of a declared name; nullopt where it was not declared.
  std::optional<std::int32_t> Find(std::string_view name) const;

  // Copies of checkpoint bytes, grouped by entry, program order inside one.
  std::span<const WriteItem> writes() const { return writes_; }
  std::span<const WriteItem> writes_of(std::int32_t entry) const;
  // Writes with no checkpoint bytes of their own: constants, bytes that were live
  // before, results of programs. Disjoint from writes() and from one another.
  const std::vector<WriteItem>& constants() const { return constants_; }
  const std::vector<WriteItem>& live_copies() const { return live_copies_; }
  const std::vector<WriteItem>& value_writes() const { return value_writes_; }
  const std::vector<Program>& programs() const { return programs_; }
  const std::vector<NameOverlap>& overlaps() const { return overlaps_; }
  // What it was built with: under kFallback names that overlap go through the loader in
  // the order of their arrival, else in declared order.
  OverlapPolicy overlap_policy() const { return overlap_policy_; }
  const std::vector<UncoveredTarget>& uncovered() const { return uncovered_; }
  const std::vector<Premise>& premises() const { return premises_; }
  bool has_fallbacks() const;

  // Calls `f` with the map of every write, and of every piece of a program's input, that reads
  // `entry`; none of a fallback or unneeded name.
  void ForEachRead(std::int32_t entry, const std::function<void(const StridedMap&)>& f) const;
  // Boxes of `entry` that this rank reads, exact and disjoint (casts and inputs of
  // programs included; the covering elements where a view splits elements); the
  // whole tensor for a fallback; empty for an unneeded name.
  std::vector<Box> Reads(std::int32_t entry) const;
  Index ReadNbytes(std::int32_t entry) const;
  // The seed's get_boxes: what an engine sends. nullopt: nothing is needed. One whole
  // box where GetDest is nullopt.
  std::optional<std::vector<Box>> GetBoxes(std::int32_t entry) const;
  // The seed's get_dest, with the region in bytes of a live storage. Empty:
  // unneeded. nullopt: send the full tensor to load_planned (fallback, derived,
  // broadcast, stepped source, a region that the dtype cannot express, or one over bytes that
  // the plan reads as they were before the update).
  struct Dest {
    Box box;
    StorageId storage;
    StridedLayout region;
  };
  std::optional<std::vector<Dest>> GetDest(std::int32_t entry) const;

  // Counts, bytes, reasons grouped with counts (most frequent first, operator
  // named), overlaps, uncovered targets, seconds. For people.
  std::string Report() const;
  double trace_seconds = 0;  // filled in by the caller
  double build_seconds = 0;

 private:
  friend class LoadPlanBuilder;
  friend class PlanFileDecoder;

  // A piece of a program's input that is read from checkpoint tensor `entry`.
  struct ProgramRead {
    std::int32_t entry;
    std::int32_t program;
    std::int32_t input;
    std::int32_t piece;
  };
  // Fills program_reads_ from the programs.
  void IndexProgramReads();
  // Fills live_reads_ from the writes and programs.
  void IndexLiveReads();
  bool MeetsLiveRead(StorageId storage, ByteRange range) const;

  std::vector<SourceTensor> sources_;
  std::vector<TargetTensor> targets_;
  std::vector<PlanEntry> entries_;
  std::vector<WriteItem> writes_;
  std::vector<WriteItem> constants_;
  std::vector<WriteItem> live_copies_;
  std::vector<WriteItem> value_writes_;
  std::vector<Program> programs_;
  std::vector<ProgramRead> program_reads_;  // sorted by entry
  // Spans of live bytes that are read before the update writes anything.
  absl::flat_hash_map<StorageId, std::vector<ByteRange>> live_reads_;
  std::vector<NameOverlap> overlaps_;
  OverlapPolicy overlap_policy_ = OverlapPolicy::kFallback;
  std::vector<UncoveredTarget> uncovered_;
  std::vector<Premise> premises_;
  absl::flat_hash_map<std::string_view, std::int32_t> by_name_;  // views into sources_
};

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_LOAD_PLAN_H_
