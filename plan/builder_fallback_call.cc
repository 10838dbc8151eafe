// The steps of BuildLoadPlan that keep plan and fallback call apart. See Note [Fallback
// calls] in plan/fallback.h.
#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "geometry/overlap.h"
#include "plan/builder_steps.h"

namespace loadplan {
namespace {

// The bytes that the map copies; the range that holds them where it reads backwards.
StridedLayout FromRegion(const StridedMap& map) {
  const MapSide& from = map.from();
  if (std::ranges::all_of(from.byte_strides, [](Index stride) { return stride >= 0; })) {
    return StridedLayout::Unchecked(from.byte_offset, map.shape(), from.byte_strides,
                                    from.itemsize);
  }
  const ByteRange span = map.FromSpan();
  return StridedLayout::Unchecked(span.start, {span.nbytes()}, {1}, 1);
}

}  // namespace

// Every name that writes into `region` of `target` falls back; `found` tells whether
// anything is written there.
absl::Status LoadPlanBuilder::LetWritersFallBack(StorageId target, const StridedLayout& region,
                                                 const std::string& reason, bool* found) {
  for (const auto& [id, state] : states_) {
    if (id != target) continue;
    for (const PlainWrite& write : state.plain) {
      const CopyRecord& copy = log_.copies[static_cast<size_t>(write.time)];
      if (!MayShareBytes(copy.map.ToLayout(), region)) continue;
      *found = true;
      fallbacks_->Add(write.name, reason);
    }
    for (const TargetWrite& write : state.writes) {
      const bool meets = std::ranges::any_of(write.visible, [&](const Piece& piece) {
        return (piece.storage < 0 || !IsNoWrite(target, piece)) &&
               MayShareBytes(piece.map.ToLayout(), region);
      });
      if (!meets) continue;
      *found = true;
      // The call repeats a constant of its own; which of the two is last is not known here.
      if (write.names.empty()) return LetEverythingFallBack(reason);
      fallbacks_->AddAll(write.names, reason);
    }
  }
  return absl::OkStatus();
}

// Live regions, with nothing written over them, behind the reads that real bytes
// answered. Errors as in SymbolicMemory::Resolve.
absl::StatusOr<std::vector<ReadRecord>> LoadPlanBuilder::SteeringReads() {
  std::vector<AnsweredRead> pending(log_.answered);
  std::vector<ReadRecord> live;
  std::vector<bool> is_seen(log_.nodes.size());
  while (!pending.empty()) {
    const AnsweredRead next = std::move(pending.back());
    pending.pop_back();
    absl::StatusOr<std::vector<StridedMap>> maps = BufferMaps(next.read.layout);
    if (!maps.ok()) return maps.status();
    for (const StridedMap& map : *maps) {
      absl::StatusOr<std::vector<Piece>> pieces =
          memory_->Resolve(next.read.storage, map, /*casts=*/{}, next.time);
      if (!pieces.ok()) return pieces.status();
      for (const Piece& piece : *pieces) {
        const StorageRecord& origin = storage(piece.storage);
        if (origin.kind == StorageKind::kTarget) {
          live.push_back({piece.storage, FromRegion(piece.map), next.read.dtype});
        }
        if (origin.kind != StorageKind::kValue) continue;
        if (is_seen[static_cast<size_t>(origin.ref)]) continue;
        is_seen[static_cast<size_t>(origin.ref)] = true;
        const NodeRecord& node = log_.nodes[static_cast<size_t>(origin.ref)];
        for (const ReadRecord& input : node.inputs) pending.push_back({input, node.time});
      }
    }
  }
  return live;
}

// Live bytes that steered the trace: a premise where nothing writes them; else the names
// that do go through the loader, which looks again. What its call writes is no premise either:
// each update changes it.
absl::Status LoadPlanBuilder::NoteAnsweredReads() {
  absl::StatusOr<std::vector<ReadRecord>> reads = SteeringReads();
  if (!reads.ok()) return LetEverythingFallBack(UnfollowedReadReason(reads.status()));
  for (ReadRecord& read : *reads) {
    bool is_written = false;
    absl::Status status = LetWritersFallBack(read.storage, read.layout,
                                             SteersReason(target_name(read.storage)), &is_written);
    if (!status.ok()) return status;
    if (!is_written && input_.fallback_call.has_value()) {
      is_written =
          std::ranges::any_of(input_.fallback_call->written, [&read](const ReadRecord& write) {
            return write.storage == read.storage && MayShareBytes(write.layout, read.layout);
          });
    }
    if (!is_written) plan_.premises_.push_back({read.storage, std::move(read.layout)});
  }
  return absl::OkStatus();
}

const std::vector<PassWrite>& LoadPlanBuilder::LogWrites() {
  if (!log_writes_) log_writes_ = WritesOfPass(log_, *memory_, *nodes_, input_.digests);
  return *log_writes_;
}

// Names that the loader treats otherwise when those are there that were left out of the log.
// What is written then with only those behind it, or none, is left to CheckFallbackCall.
absl::Status LoadPlanBuilder::NoteExplored() {
  if (!input_.exploration.has_value() || fallbacks_->empty()) return absl::OkStatus();
  if (input_.exploration->rounds.empty()) {
    return LetEverythingFallBack(NotExploredReason(input_.exploration->error));
  }
  for (const std::vector<PassWrite>& round : input_.exploration->rounds) {
    WriteBag of_log(LogWrites());
    for (const PassWrite& write : round) {
      if (!of_log.Take(write) || !write.is_exact)
        fallbacks_->AddAll(write.names, std::string(kTreatedOtherwiseReason));
    }
    WriteBag of_round(round);
    for (const PassWrite& write : LogWrites()) {
      if (of_round.Take(write)) continue;
      if (write.names.empty()) return LetEverythingFallBack(std::string(kNamelessOtherwise));
      fallbacks_->AddAll(write.names, std::string(kTreatedOtherwiseReason));
    }
    for (const auto& [earlier, later] : OtherwiseOrdered(LogWrites(), LastWrites(round))) {
      const std::string reason(kOtherOrderReason);
      const PassWrite& one = LogWrites()[static_cast<size_t>(earlier)];
      const PassWrite& other = LogWrites()[static_cast<size_t>(later)];
      if (one.names.empty() && other.names.empty()) return LetEverythingFallBack(reason);
      fallbacks_->AddAll(one.names, reason);
      fallbacks_->AddAll(other.names, reason);
    }
  }
  return absl::OkStatus();
}

absl::Status LoadPlanBuilder::NoteFallbackCall() {
  if (fallbacks_->empty() || everything_falls_back_ || !input_.fallback_call.has_value()) {
    return absl::OkStatus();
  }
  const FallbackCall& call = *input_.fallback_call;
  if (!call.error.empty()) {
    return LetEverythingFallBack(
        absl::StrCat("load_weights cannot be called with some names only: ", call.error));
  }
  for (const ReadRecord& touched : call.touched) {
    bool found = false;
    absl::Status status = LetWritersFallBack(
        touched.storage, touched.layout, CalledOverReason(target_name(touched.storage)), &found);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Per copy of the log, whether the plan writes it.
std::vector<bool> LoadPlanBuilder::KeptCopies() const {
  std::vector<bool> is_kept(log_.copies.size());
  for (const auto& [target, state] : states_) {
    for (const PlainWrite& write : state.plain)
      is_kept[static_cast<size_t>(write.time)] = !fallbacks_->Contains(write.name);
    for (const TargetWrite& write : state.writes)
      is_kept[static_cast<size_t>(write.time)] = IsKept(write);
  }
  return is_kept;
}

// What the plan leaves to the loader must happen in a call with the fallback names only. It
// does not where the loader writes in the turn of a name that the call is not given.
//
// Example: `b`'s turn copies live bytes that `a` wrote before; `a` falls back, `b` is unneeded.
//
// And plan and call must end as the round does. Let the last write of a byte in the round be
// the call's: all that overwrites it in the call comes later in the round too, so that there
// is nothing; and the plan writes no byte that the call touches. Let it be only the plan's: the
// same holds of the plan's pass.
absl::Status LoadPlanBuilder::CheckFallbackCall() {
  if (fallbacks_->empty() || everything_falls_back_ || !input_.fallback_call.has_value()) {
    return absl::OkStatus();
  }
  const FallbackCall& call = *input_.fallback_call;
  // Names that have joined since are in the next trace of the call.
  std::vector<bool> is_called(plan_.sources_.size());
  if (!input_.exploration.has_value()) {
    for (const auto& [name, reason] : input_.fallbacks) is_called[static_cast<size_t>(name)] = true;
  }
  for (const std::int32_t name : call.names) is_called[static_cast<size_t>(name)] = true;
  for (size_t name = 0; name < is_called.size(); ++name) {
    if (fallbacks_->Contains(static_cast<std::int32_t>(name)) && !is_called[name])
      return absl::OkStatus();
  }
  WriteBag kept;
  const std::vector<bool> is_kept = KeptCopies();
  for (const PassWrite& write : LogWrites()) {
    if (is_kept[static_cast<size_t>(write.time)]) kept.Add(write);
  }
  for (size_t round = 0; round < call.rounds.size(); ++round) {
    const bool is_explored =
        input_.exploration.has_value() && round < input_.exploration->rounds.size();
    WriteBag of_plan = kept;
    WriteBag of_call(call.rounds[round]);
    const std::vector<PassWrite>& whole =
        is_explored ? input_.exploration->rounds[round] : LogWrites();
    for (const PassWrite& write : whole) {
      if (!of_plan.Take(write) && !of_call.Take(write))
        return LetEverythingFallBack(std::string(kNotInCall));
    }
    const LastWrites last(whole);
    for (const PassWrite& write : call.rounds[round]) {
      if (last.Of(write) < 0) return LetEverythingFallBack(std::string(kOnlyInCall));
    }
    if (!OtherwiseOrdered(call.rounds[round], last).empty())
      return LetEverythingFallBack(std::string(kOtherOrderInCall));
    const LastWrites last_of_call(call.rounds[round]);
    for (const auto& [earlier, later] : OtherwiseOrdered(LogWrites(), last)) {
      if (last_of_call.Of(LogWrites()[static_cast<size_t>(earlier)]) < 0)
        return LetEverythingFallBack(std::string(kOtherOrderInCall));
    }
  }
  return absl::OkStatus();
}

}  // namespace loadplan
