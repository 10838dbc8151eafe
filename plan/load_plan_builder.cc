#include "plan/load_plan_builder.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "plan/builder_steps.h"

namespace loadplan {
namespace {

// Pairs that an error message spells out.
constexpr size_t kMaxListedPairs = 8;

}  // namespace

LoadPlanBuilder::LoadPlanBuilder(BuildInput input)
    : input_(std::move(input)),
      log_(input_.log),
      target_of_storage_(log_.storages.size(), -1),
      program_of_node_(log_.nodes.size(), -1) {
  plan_.sources_ = std::move(input_.sources);
  plan_.overlap_policy_ = input_.overlaps;
  plan_.targets_ = std::move(input_.targets);
}

absl::StatusOr<LoadPlan> LoadPlanBuilder::Build() {
  const auto start = std::chrono::steady_clock::now();
  for (const auto& step : {&LoadPlanBuilder::CheckNames, &LoadPlanBuilder::CheckTargets}) {
    if (absl::Status status = (this->*step)(); !status.ok()) return status;
  }
  if (absl::Status status = ValidateLog(log_); !status.ok()) return status;
  memory_.emplace(log_);
  nodes_.emplace(log_, *memory_);
  fallbacks_.emplace(plan_.sources_);
  for (auto& [name, reason] : input_.fallbacks) fallbacks_->Add(name, std::move(reason));
  for (const auto& step :
       {&LoadPlanBuilder::ResolveTargets, &LoadPlanBuilder::NoteRefusals,
        &LoadPlanBuilder::NoteStates, &LoadPlanBuilder::NoteOverlaps,
        &LoadPlanBuilder::NoteAnsweredReads, &LoadPlanBuilder::SettleFallbacks}) {
    if (absl::Status status = (this->*step)(); !status.ok()) return status;
  }
  CheckCoverage();
  EmitPrograms();
  EmitWrites();
  Classify();
  // One call with all names looks for itself.
  if (plan_.AllFallBack()) plan_.premises_.clear();
  plan_.IndexLiveReads();
  plan_.build_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return std::move(plan_);
}

absl::Status LoadPlanBuilder::CheckNames() {
  plan_.by_name_.reserve(plan_.sources_.size());
  std::vector<Index> nbytes(plan_.sources_.size());
  for (size_t n = 0; n < plan_.sources_.size(); ++n) {
    const SourceTensor& source = plan_.sources_[n];
    if (!plan_.by_name_.emplace(source.name, static_cast<std::int32_t>(n)).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("`", source.name, "` is declared twice; names must be unique"));
    }
    nbytes[n] = source.nbytes();
  }
  for (const StorageRecord& record : log_.storages) {
    if (record.kind != StorageKind::kCheckpoint) continue;
    if (record.ref < 0 || static_cast<size_t>(record.ref) >= plan_.sources_.size()) {
      return absl::InvalidArgumentError("a checkpoint storage belongs to no declared name");
    }
    const auto n = static_cast<size_t>(record.ref);
    if (record.nbytes != nbytes[n]) {
      return absl::InvalidArgumentError(absl::StrCat("`", plan_.sources_[n].name,
                                                     "` was declared with ", nbytes[n],
                                                     " bytes and traced with ", record.nbytes));
    }
  }
  for (const auto& [name, reason] : input_.fallbacks) {
    if (name < 0 || static_cast<size_t>(name) >= plan_.sources_.size()) {
      return absl::InvalidArgumentError("a fallback belongs to no declared name");
    }
  }
  return absl::OkStatus();
}

absl::Status LoadPlanBuilder::CheckTargets() {
  for (size_t t = plan_.targets_.size(); t-- > 0;) {
    const TargetTensor& target = plan_.targets_[t];
    if (target.storage < 0 || static_cast<size_t>(target.storage) >= log_.storages.size() ||
        storage(target.storage).kind != StorageKind::kTarget) {
      return absl::InvalidArgumentError(
          absl::StrCat("target `", target.name, "` has no target storage in the log"));
    }
    const ByteRange span = target.layout.Span();
    if (span.start < 0 || span.stop > storage(target.storage).nbytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("target `", target.name, "` reaches outside its storage"));
    }
    target_of_storage_[static_cast<size_t>(target.storage)] = static_cast<std::int32_t>(t);
  }
  if (!input_.fallback_call) return absl::OkStatus();
  for (const ReadRecord& touched : input_.fallback_call->touched) {
    if (touched.storage >= 0 && static_cast<size_t>(touched.storage) < log_.storages.size() &&
        target_of_storage_[static_cast<size_t>(touched.storage)] >= 0) {
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "a fallback call touches storage ", touched.storage, ", which is shown by no target"));
  }
  return absl::OkStatus();
}

absl::Status LoadPlanBuilder::ResolveTargets() {
  for (size_t s = 0; s < log_.storages.size(); ++s) {
    const auto id = static_cast<StorageId>(s);
    if (log_.storages[s].kind != StorageKind::kTarget || memory_->WritesInto(id).empty()) continue;
    if (target_of_storage_[s] < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("storage ", id, " is written and shown by no target"));
    }
    states_.push_back({id, ResolveTarget(log_, *memory_, *nodes_, id)});
  }
  return absl::OkStatus();
}

// Reads that only real bytes could have answered: the names behind them go back to
// the loader. A read with no name behind it cannot be left out of anything.
absl::Status LoadPlanBuilder::NoteRefusals() {
  for (const RefusalRecord& refusal : log_.refusals) {
    std::vector<std::int32_t> names;
    for (const ReadRecord& input : refusal.inputs) {
      absl::StatusOr<std::vector<StridedMap>> maps = BufferMaps(input.layout);
      bool is_exact = maps.ok();
      for (size_t m = 0; is_exact && m < maps->size(); ++m) {
        absl::StatusOr<std::vector<Piece>> pieces =
            memory_->Resolve(input.storage, (*maps)[m], /*casts=*/{}, refusal.time);
        is_exact = pieces.ok();
        if (!is_exact) break;
        const std::vector<std::int32_t> more = nodes_->NamesOf(*pieces);
        names.insert(names.end(), more.begin(), more.end());
      }
      if (is_exact) continue;
      const std::vector<std::int32_t> more =
          memory_->NamesBehind(input.storage, input.layout.Span(), refusal.time);
      names.insert(names.end(), more.begin(), more.end());
    }
    if (names.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat(RefusedReason(refusal),
                       "; no checkpoint tensor is behind what it reads, "
                       "so that none can be left out"));
    }
    fallbacks_->AddAll(names, RefusedReason(refusal));
  }
  return absl::OkStatus();
}

absl::Status LoadPlanBuilder::NoteStates() {
  for (const auto& [id, state] : states_) {
    const std::string& target = target_name(id);
    if (!state.status.ok()) {
      absl::Status status = LetEverythingFallBack(IrregularReason(target, state.status));
      if (!status.ok()) return status;
    }
    for (const TargetWrite& write : state.writes) {
      if (absl::Status status = NoteWrite(write, id); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::Status LoadPlanBuilder::NoteWrite(const TargetWrite& write, StorageId id) {
  const std::string& target = target_name(id);
  if (!write.status.ok()) {
    const std::string reason = IrregularReason(target, write.status);
    if (write.names.empty()) return LetEverythingFallBack(reason);
    fallbacks_->AddAll(write.names, reason);
  }
  for (const Piece& piece : write.visible) {
    if (piece.storage < 0) continue;
    const StorageRecord& origin = storage(piece.storage);
    if (origin.kind == StorageKind::kTemporary) {
      fallbacks_->AddAll(write.names, UninitialisedReason(target));
    }
    if (origin.kind != StorageKind::kValue) continue;
    const ResolvedNode& node = nodes_->Get(origin.ref);
    if (!node.obstacle.empty()) {
      if (node.names.empty() && IsMirror(id)) {
        if (absl::Status status = LetEverythingFallBack(node.obstacle); !status.ok()) return status;
      } else if (node.names.empty()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "target `", target, "` gets bytes that come from no checkpoint tensor and ",
            "cannot be computed again: ", node.obstacle));
      }
      fallbacks_->AddAll(node.names, node.obstacle);
    }
    fallbacks_->AddGroup(
        node.names,
        absl::StrCat("`", log_.nodes[static_cast<size_t>(origin.ref)].op, "` combines it with"));
  }
  fallbacks_->AddGroup(write.names, absl::StrCat("a copy into `", target, "` combines it with"));
  return absl::OkStatus();
}

absl::Status LoadPlanBuilder::NoteOverlaps() {
  std::vector<std::string> sentences;
  for (const auto& [id, state] : states_) {
    const std::string& target = target_name(id);
    for (const auto& [one, other] : state.neighbours) {
      fallbacks_->AddGroup({one, other}, absl::StrCat("it shares bytes of `", target, "` with"));
    }
    for (const NameMeeting& meeting : state.meetings) {
      const std::string& earlier = plan_.sources_[static_cast<size_t>(meeting.earlier)].name;
      const std::string& later = plan_.sources_[static_cast<size_t>(meeting.later)].name;
      overwritten_.emplace(meeting.earlier, absl::StrCat("`", later, "`"));
      switch (input_.overlaps) {
        case OverlapPolicy::kError:
          sentences.push_back(absl::StrCat("`", earlier, "` and `", later, "` both write ",
                                           meeting.nbytes, " bytes of `", target, "`"));
          break;
        case OverlapPolicy::kFallback:
          fallbacks_->Add(meeting.earlier, OverlapReason(later, target));
          fallbacks_->Add(meeting.later, OverlapReason(earlier, target));
          break;
        case OverlapPolicy::kLastWins:
          break;
      }
      const auto [first, second] = std::minmax(meeting.earlier, meeting.later);
      plan_.overlaps_.push_back({first, second, id, meeting.nbytes});
    }
  }
  if (!sentences.empty()) {
    const size_t hidden = sentences.size() - std::min(sentences.size(), kMaxListedPairs);
    sentences.resize(sentences.size() - hidden);
    std::string text;
    for (const std::string& sentence : sentences) {
      absl::StrAppend(&text, text.empty() ? "" : "; ", sentence);
    }
    if (hidden > 0) absl::StrAppend(&text, "; and ", hidden, " more pairs");
    return absl::InvalidArgumentError(text);
  }
  // A pair may meet both ways (a, then b, then a again): listed once, bytes summed.
  std::vector<NameOverlap>& overlaps = plan_.overlaps_;
  const auto key = [](const NameOverlap& o) { return std::tuple(o.first, o.second, o.storage); };
  std::sort(overlaps.begin(), overlaps.end(),
            [&](const NameOverlap& a, const NameOverlap& b) { return key(a) < key(b); });
  size_t kept = 0;
  for (size_t i = 0; i < overlaps.size(); ++i) {
    if (kept > 0 && key(overlaps[kept - 1]) == key(overlaps[i])) {
      overlaps[kept - 1].nbytes += overlaps[i].nbytes;
    } else {
      overlaps[kept++] = overlaps[i];
    }
  }
  overlaps.resize(kept);
  return absl::OkStatus();
}

// One call of the loader with all names is eager itself: right where nothing else is
// known to be.
absl::Status LoadPlanBuilder::LetEverythingFallBack(const std::string& reason) {
  if (plan_.sources_.empty()) return absl::FailedPreconditionError(reason);
  everything_falls_back_ = true;
  fallbacks_->AddEveryName(reason);
  return absl::OkStatus();
}

// Spreads fallbacks along groups, and along what a call of the loader with some
// names only would see or leave otherwise than the pass did, until nothing changes.
absl::Status LoadPlanBuilder::SettleFallbacks() {
  size_t settled = 0;
  if (absl::Status status = NoteExplored(); !status.ok()) return status;
  if (absl::Status status = NoteFallbackCall(); !status.ok()) return status;
  fallbacks_->Propagate();
  while (settled != fallbacks_->size()) {
    settled = fallbacks_->size();
    for (const auto& [id, state] : states_) {
      for (const TargetWrite& write : state.writes) {
        if (absl::Status status = NoteLiveReads(id, write); !status.ok()) {
          return status;
        }
        if (write.is_overwritten_by_nothing_named && fallbacks_->ContainsAnyOf(write.names)) {
          absl::Status status = LetEverythingFallBack(std::string(kOverwrittenByNothingNamed));
          if (!status.ok()) return status;
        }
      }
    }
    fallbacks_->Propagate();
  }
  // Their call is the whole loader: constants and live copies are in it.
  everything_falls_back_ |= !fallbacks_->empty() && fallbacks_->size() == plan_.sources_.size();
  return CheckFallbackCall();
}

absl::Status LoadPlanBuilder::NoteLiveReads(StorageId target, const TargetWrite& write) {
  for (const Piece& piece : write.visible) {
    if (piece.storage < 0 || !nodes_->ReadsLive(piece)) continue;
    if (!write.names.empty()) {
      fallbacks_->AddAll(write.names, LiveReadReason(target_name(target)));
    } else if (!IsNoWrite(target, piece)) {
      return LetEverythingFallBack(std::string(kNamelessLiveRead));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<LoadPlan> BuildLoadPlan(BuildInput input) {
  return LoadPlanBuilder(std::move(input)).Build();
}

}  // namespace loadplan
