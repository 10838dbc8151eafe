// The last steps of BuildLoadPlan: what does not fall back becomes the plan.
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "plan/builder_steps.h"
#include "plan/coverage.h"

namespace loadplan {
namespace {

// Whether one target shows the whole storage, so that counting bytes is enough.
bool ShowsWhole(const TargetTensor& target, Index storage_nbytes) {
  return target.layout.byte_offset() == 0 && target.layout.nbytes() == storage_nbytes &&
         IsContiguous(target.layout);
}

}  // namespace

const std::string& LoadPlanBuilder::target_name(StorageId id) const {
  return plan_.targets_[static_cast<size_t>(target_of_storage_[static_cast<size_t>(id)])].name;
}

bool LoadPlanBuilder::IsMirror(StorageId id) const {
  const std::int32_t target = target_of_storage_[static_cast<size_t>(id)];
  return plan_.targets_[static_cast<size_t>(target)].is_mirror;
}

Origin LoadPlanBuilder::OriginOf(StorageId id) const {
  const StorageRecord& record = storage(id);
  switch (record.kind) {
    case StorageKind::kTarget:
      return {OriginKind::kLiveBefore, id, 0};
    case StorageKind::kValue:
      return {OriginKind::kValue, program_of_node_[static_cast<size_t>(record.ref)], record.output};
    case StorageKind::kScratch:
    case StorageKind::kConstant:
      return {OriginKind::kConstant, record.ref, 0};
    case StorageKind::kCheckpoint:
    case StorageKind::kTemporary:
      break;
  }
  return {OriginKind::kCheckpoint, record.ref, 0};
}

bool LoadPlanBuilder::IsNoWrite(StorageId target, const Piece& piece) const {
  if (storage(piece.storage).kind == StorageKind::kTemporary) return true;
  if (piece.storage != target || piece.map.is_cast()) return false;
  const StridedMap map = Coalesce(piece.map);
  return map.to() == map.from();
}

// Bytes of targets that neither the plan nor a fallback name writes. Must run while
// the records still hold their maps.
void LoadPlanBuilder::CheckCoverage() {
  const auto storage_of = [this](std::int32_t target) {
    return plan_.targets_[static_cast<size_t>(target)].storage;
  };
  // Targets and states by storage. Most storages are a checkpoint's and have neither.
  std::vector<std::int32_t> order(plan_.targets_.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int32_t a, std::int32_t b) { return storage_of(a) < storage_of(b); });
  auto state = states_.begin();
  for (size_t begin = 0, end = 0; begin < order.size(); begin = end) {
    const StorageId id = storage_of(order[begin]);
    while (state != states_.end() && state->storage < id) ++state;
    const bool is_written = state != states_.end() && state->storage == id;
    std::vector<StridedLayout> layouts;
    bool is_whole = false;
    for (; end < order.size() && storage_of(order[end]) == id; ++end) {
      const TargetTensor& target = plan_.targets_[static_cast<size_t>(order[end])];
      layouts.push_back(target.layout);
      is_whole |= ShowsWhole(target, storage(id).nbytes);
    }
    // Nobody has asked for the bytes of a mirror.
    if (plan_.targets_[static_cast<size_t>(order[begin])].is_mirror) continue;
    if (is_written && is_whole && WrittenNbytes(id, state->state) == storage(id).nbytes) continue;
    std::vector<StridedLayout> regions;
    if (is_written) regions = WrittenRegions(id, state->state);
    const std::vector<Index> untouched = UntouchedNbytes(layouts, regions);
    for (size_t i = 0; i < layouts.size(); ++i) {
      if (untouched[i] == 0) continue;
      const absl::StatusOr<Index> total = DistinctNbytes(layouts[i]);
      plan_.uncovered_.push_back(
          {order[begin + i], untouched[i], total.ok() ? *total : layouts[i].nbytes()});
    }
  }
  std::sort(plan_.uncovered_.begin(), plan_.uncovered_.end(),
            [](const UncoveredTarget& a, const UncoveredTarget& b) { return a.target < b.target; });
}

// Bytes that the writes of `state` leave, where they are disjoint; else -1.
Index LoadPlanBuilder::WrittenNbytes(StorageId target, const TargetState& state) const {
  if (!state.status.ok()) return -1;
  Index nbytes = state.plain_nbytes;
  for (const TargetWrite& write : state.writes) {
    if (!write.status.ok()) return -1;
    for (const Piece& piece : write.visible) {
      if (!IsNoWrite(target, piece)) nbytes += piece.map.nbytes();
    }
  }
  return nbytes;
}

std::vector<StridedLayout> LoadPlanBuilder::WrittenRegions(StorageId target,
                                                           const TargetState& state) const {
  std::vector<StridedLayout> regions;
  for (const PlainWrite& write : state.plain) {
    regions.push_back(log_.copies[static_cast<size_t>(write.time)].map.ToLayout());
  }
  for (const TargetWrite& write : state.writes) {
    for (const Piece& piece : write.visible) {
      if (piece.storage >= 0 && IsNoWrite(target, piece)) continue;
      regions.push_back(piece.map.ToLayout());
    }
  }
  return regions;
}

bool LoadPlanBuilder::IsKept(const TargetWrite& write) const {
  return !everything_falls_back_ && !fallbacks_->ContainsAnyOf(write.names);
}

// Programs of the values that are written, and of those that they need, in order.
void LoadPlanBuilder::EmitPrograms() {
  std::vector<bool> is_needed(log_.nodes.size());
  for (const StorageState& state : states_) {
    for (const TargetWrite& write : state.state.writes) {
      if (!IsKept(write)) continue;
      for (const Piece& piece : write.visible) {
        if (storage(piece.storage).kind != StorageKind::kValue) continue;
        is_needed[static_cast<size_t>(storage(piece.storage).ref)] = true;
      }
    }
  }
  for (size_t n = is_needed.size(); n-- > 0;) {
    if (!is_needed[n]) continue;
    for (const NodeId need : nodes_->Get(static_cast<NodeId>(n)).needs) {
      is_needed[static_cast<size_t>(need)] = true;
    }
  }
  for (size_t n = 0; n < is_needed.size(); ++n) {
    if (!is_needed[n]) continue;
    program_of_node_[n] = static_cast<std::int32_t>(plan_.programs_.size());
    const ResolvedNode& node = nodes_->Get(static_cast<NodeId>(n));
    const NodeRecord& record = log_.nodes[n];
    Program& program = plan_.programs_.emplace_back();
    program.node = static_cast<NodeId>(n);
    program.op = record.op;
    program.names = node.names;
    for (size_t i = 0; i < record.inputs.size(); ++i) {
      const StridedLayout& layout = record.inputs[i].layout;
      ProgramInput& input = program.inputs.emplace_back();
      input.dtype = record.inputs[i].dtype;
      input.layout = StridedLayout::Unchecked(/*byte_offset=*/0, layout.shape(),
                                              layout.byte_strides(), layout.itemsize());
      for (const Piece& piece : node.inputs[i]) {
        input.pieces.push_back(
            {OriginOf(piece.storage), /*target=*/-1, Coalesce(piece.map), piece.casts});
      }
    }
  }
  plan_.IndexProgramReads();
}

// `refs` by entry, time and piece: counted, for most names have one or none.
std::vector<LoadPlanBuilder::PieceRef> LoadPlanBuilder::ByEntry(const std::vector<PieceRef>& refs,
                                                                size_t num_entries) {
  std::vector<std::uint32_t> next(num_entries + 1);
  for (const PieceRef& ref : refs) ++next[static_cast<size_t>(ref.entry) + 1];
  for (size_t n = 1; n < next.size(); ++n) next[n] += next[n - 1];
  std::vector<PieceRef> sorted(refs.size());
  for (const PieceRef& ref : refs) sorted[next[static_cast<size_t>(ref.entry)]++] = ref;
  std::uint32_t begin = 0;
  for (size_t n = 0; n < num_entries; begin = next[n++]) {
    if (next[n] - begin < 2) continue;
    std::sort(sorted.begin() + begin, sorted.begin() + next[n],
              [](const PieceRef& a, const PieceRef& b) {
                return std::tie(a.time, a.piece) < std::tie(b.time, b.piece);
              });
  }
  return sorted;
}

// Checkpoint pieces by entry and time; the rest as it comes.
void LoadPlanBuilder::EmitWrites() {
  std::vector<PieceRef> refs;
  refs.reserve(log_.copies.size());
  plan_.entries_.resize(plan_.sources_.size());
  for (auto& [target, state] : states_) {
    for (const auto& [time, name] : state.plain) {
      if (!fallbacks_->Contains(name)) refs.push_back({name, time, 0, target, nullptr});
    }
    for (TargetWrite& write : state.writes) {
      if (!IsKept(write)) continue;
      for (size_t k = 0; k < write.visible.size(); ++k) {
        const StorageRecord& origin = storage(write.visible[k].storage);
        if (origin.kind != StorageKind::kCheckpoint) continue;
        refs.push_back({origin.ref, write.time, static_cast<std::int32_t>(k), target, &write});
      }
      EmitNameless(target, write);
      if (!write.is_overwritten_by_nothing_named) continue;
      for (const std::int32_t name : write.names) overwritten_.emplace(name, "a constant");
    }
  }
  EmitOfEntries(ByEntry(refs, plan_.sources_.size()));
}

void LoadPlanBuilder::EmitNameless(StorageId target, TargetWrite& write) {
  for (Piece& piece : write.visible) {
    if (IsNoWrite(target, piece)) continue;
    const Origin origin = OriginOf(piece.storage);
    if (origin.kind == OriginKind::kCheckpoint) continue;
    std::vector<WriteItem>& items = origin.kind == OriginKind::kConstant     ? plan_.constants_
                                    : origin.kind == OriginKind::kLiveBefore ? plan_.live_copies_
                                                                             : plan_.value_writes_;
    items.push_back({origin, target, Coalesce(piece.map), std::move(piece.casts)});
  }
}

void LoadPlanBuilder::EmitOfEntries(const std::vector<PieceRef>& refs) {
  plan_.writes_.reserve(refs.size());
  for (const PieceRef& ref : refs) {
    PlanEntry& entry = plan_.entries_[static_cast<size_t>(ref.entry)];
    if (entry.num_writes++ == 0) {
      entry.first_write = static_cast<std::uint32_t>(plan_.writes_.size());
    }
    WriteItem& item = plan_.writes_.emplace_back();
    item.origin = {OriginKind::kCheckpoint, ref.entry, 0};
    item.target = ref.target;
    if (ref.held != nullptr) {
      Piece& piece = ref.held->visible[static_cast<size_t>(ref.piece)];
      item.map = Coalesce(piece.map);
      item.casts = std::move(piece.casts);
    } else {
      const CopyRecord& copy = log_.copies[static_cast<size_t>(ref.time)];
      item.map = Coalesce(copy.map);
      item.casts = copy.casts();
    }
    if (entry.kind == EntryKind::kUnneeded) entry.kind = EntryKind::kDirect;
    if (entry.kind == EntryKind::kDirect && !item.casts.empty()) {
      entry.kind = EntryKind::kDerived;
      entry.reason = CastText(item.casts);
    }
  }
}

// What the writes of an entry have not said: it falls back, a program reads it, or there
// are none.
void LoadPlanBuilder::Classify() {
  std::vector<std::int32_t> program_of_name(plan_.sources_.size(), -1);
  for (size_t p = plan_.programs_.size(); p-- > 0;) {
    for (const std::int32_t name : plan_.programs_[p].names) {
      program_of_name[static_cast<size_t>(name)] = static_cast<std::int32_t>(p);
    }
  }
  for (size_t n = 0; n < plan_.entries_.size(); ++n) {
    const auto name = static_cast<std::int32_t>(n);
    PlanEntry& entry = plan_.entries_[n];
    if (fallbacks_->Contains(name)) {
      entry.kind = EntryKind::kFallback;
      entry.reason = std::move(fallbacks_->reason(name));
      continue;
    }
    if (program_of_name[n] >= 0) {
      const Program& program = plan_.programs_[static_cast<size_t>(program_of_name[n])];
      entry.kind = EntryKind::kDerived;
      entry.reason = absl::StrCat("`", program.op, "` reads it");
      continue;
    }
    if (entry.num_writes > 0) continue;
    const auto found = overwritten_.find(name);
    if (found != overwritten_.end()) {
      entry.reason = absl::StrCat("every byte that it writes is overwritten by ", found->second);
    }
  }
}

}  // namespace loadplan
