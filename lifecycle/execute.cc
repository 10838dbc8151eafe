#include "lifecycle/execute.h"

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "backend/convert.h"
#include "geometry/at.h"
#include "lifecycle/annotate.h"
#include "lifecycle/attempt.h"

namespace loadplan {

PlanExecutor::PlanExecutor(std::shared_ptr<const TracedPlan> traced,
                           std::shared_ptr<const TargetSet> targets, LayerStaging* staging)
    : traced_(std::move(traced)),
      targets_(std::move(targets)),
      staging_(staging),
      plan_(traced_->plan),
      begun_writes_(plan_.writes().size()) {
  if (!targets_->storages().empty()) device_ = targets_->storages().front().device();
  if (staging_ != nullptr) device_ = staging_->device();
  IndexPrograms();
}

void PlanExecutor::BatchOn(const CopyDevice& device, std::shared_ptr<DevicePlan> plan) {
  queue_ = std::make_unique<CopyQueue>(device, std::move(plan), *targets_);
}

void PlanExecutor::IndexPrograms() {
  programs_.resize(plan_.programs().size());
  for (std::int32_t p = 0; p < static_cast<std::int32_t>(programs_.size()); ++p) {
    const Program& program = At(plan_.programs(), p);
    At(programs_, p).num_missing = program.names.size();
    At(programs_, p).inputs.resize(program.inputs.size());
    for (const std::int32_t name : program.names) programs_of_source_[name].push_back(p);
    for (std::int32_t i = 0; i < static_cast<std::int32_t>(program.inputs.size()); ++i) {
      const auto& pieces = At(program.inputs, i).pieces;
      for (std::int32_t k = 0; k < static_cast<std::int32_t>(pieces.size()); ++k) {
        const Origin& origin = At(pieces, k).origin;
        const PieceRef ref{p, i, k};
        switch (origin.kind) {
          case OriginKind::kCheckpoint:
            pieces_of_source_[origin.index].push_back(ref);
            break;
          case OriginKind::kValue:
            pieces_of_program_[origin.index].push_back(ref);
            break;
          case OriginKind::kConstant:
          case OriginKind::kLiveBefore:
            early_pieces_.push_back(ref);
            break;
        }
      }
    }
  }
  for (std::int32_t w = 0; w < static_cast<std::int32_t>(plan_.value_writes().size()); ++w) {
    writes_of_program_[At(plan_.value_writes(), w).origin.index].push_back(w);
  }
}

absl::Status PlanExecutor::Begin() {
  for (const WriteItem& item : plan_.live_copies()) {
    const StridedMap packed = KeptMapsOf(item.map, !item.casts.empty()).in;
    at::Tensor bytes =
        NewBytes(packed.nbytes(), At(targets_->storages(), item.origin.index).device());
    absl::Status status =
        CopyMapped(packed, {}, ByteSide::OfStorage(bytes), TargetSide(item.origin.index));
    if (!status.ok()) return status;
    live_bytes_.push_back(std::move(bytes));
  }
  for (const PieceRef& ref : early_pieces_) {
    const Origin& origin = PieceOf(ref).origin;
    const ByteSide from = origin.kind == OriginKind::kLiveBefore
                              ? TargetSide(origin.index)
                              : ByteSide::OfElements(traced_->constants.at(origin.index));
    if (absl::Status status = Gather(ref, from); !status.ok()) return status;
  }
  // Layers are processed before the end, from these too.
  if (absl::Status status = WriteLiveCopies(/*of_layers=*/true); !status.ok()) return status;
  std::vector<std::int32_t> nameless;
  for (std::int32_t p = 0; p < static_cast<std::int32_t>(programs_.size()); ++p) {
    if (At(programs_, p).num_missing == 0) nameless.push_back(p);
  }
  return RunReadyPrograms(std::move(nameless));
}

absl::Status PlanExecutor::Deliver(std::int32_t entry, const at::Tensor& tensor) {
  const auto pieces = pieces_of_source_.find(entry);
  const std::span<const WriteItem> writes = plan_.writes_of(entry);
  if (!writes.empty() || pieces != pieces_of_source_.end()) {
    absl::Status status = BeforeRead(ByteSide::OfElements(tensor));
    if (!status.ok()) return status;
    // A plan speaks of row-major tensors; a sender may hand over any view.
    const bool is_plain = tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
    const ByteSide from =
        ByteSide::OfElements(is_plain ? tensor : tensor.resolve_conj().resolve_neg().contiguous());
    for (const WriteItem& item : writes) {
      if (status = Write(item, from); !status.ok()) return status;
    }
    if (pieces != pieces_of_source_.end()) {
      if (status = GatherAll(pieces->second, from); !status.ok()) return status;
    }
    // A copy of ours would stay in memory with those of all names of the batch.
    if (!is_plain && queue_ != nullptr && queue_->device().is_for_many) {
      if (status = queue_->Flush(); !status.ok()) return status;
    }
  }
  return Arrived(entry);
}

absl::Status PlanExecutor::Arrived(std::int32_t entry) {
  const auto waiting = programs_of_source_.find(entry);
  if (waiting == programs_of_source_.end()) return absl::OkStatus();
  std::vector<std::int32_t> ready;
  for (const std::int32_t program : waiting->second) {
    if (--At(programs_, program).num_missing == 0) ready.push_back(program);
  }
  return RunReadyPrograms(std::move(ready));
}

absl::Status PlanExecutor::Finish() {
  if (absl::Status status = Flush(); !status.ok()) return status;
  for (const WriteItem& item : plan_.constants()) {
    if (IsOfLayer(item.target)) continue;  // set when its layer was complete
    const ByteSide from = ByteSide::OfElements(traced_->constants.at(item.origin.index));
    if (absl::Status status = Write(item, from); !status.ok()) return status;
  }
  return WriteLiveCopies(/*of_layers=*/false);
}

absl::Status PlanExecutor::WriteLiveCopies(bool of_layers) {
  for (std::size_t i = 0; i < live_bytes_.size(); ++i) {
    const WriteItem& item = plan_.live_copies()[i];
    if (IsOfLayer(item.target) != of_layers) continue;
    if (absl::Status status = BeforeWrite(item); !status.ok()) return status;
    // Not as bytes that a layer waits for: it does not wait for these.
    const StridedMap map = KeptMapsOf(item.map, !item.casts.empty()).out;
    absl::Status status = CopyMapped(map, item.casts, TargetSide(item.target),
                                     ByteSide::OfStorage(std::exchange(live_bytes_[i], {})));
    if (!status.ok()) return status;
    written_nbytes_ += map.nbytes();
  }
  return absl::OkStatus();
}

const WriteItem& PlanExecutor::PieceOf(const PieceRef& ref) const {
  return At(At(At(plan_.programs(), ref.program).inputs, ref.input).pieces, ref.piece);
}

ByteSide PlanExecutor::InputSide(const PieceRef& ref) {
  at::Tensor& buffer = At(At(programs_, ref.program).inputs, ref.input);
  if (!buffer.defined()) {
    const ProgramInput& input = At(At(plan_.programs(), ref.program).inputs, ref.input);
    buffer = NewBytes(input.layout.Span().stop, device_);
  }
  return ByteSide::OfStorage(buffer);
}

absl::Status PlanExecutor::Gather(const PieceRef& ref, const ByteSide& from) {
  const WriteItem& piece = PieceOf(ref);
  return CopyMapped(piece.map, piece.casts, InputSide(ref), from);
}

absl::Status PlanExecutor::GatherAll(const std::vector<PieceRef>& pieces, const ByteSide& from) {
  for (const PieceRef& ref : pieces) {
    if (absl::Status status = Gather(ref, from); !status.ok()) return status;
  }
  return absl::OkStatus();
}

std::optional<std::size_t> PlanExecutor::IndexOf(const WriteItem& item) const {
  const std::span<const WriteItem> writes = plan_.writes();
  const std::less<const WriteItem*> is_before;
  if (is_before(&item, writes.data()) || !is_before(&item, writes.data() + writes.size())) {
    return std::nullopt;
  }
  return static_cast<std::size_t>(&item - writes.data());
}

void PlanExecutor::ForEachBegun(absl::FunctionRef<void(const WriteItem& item)> f) const {
  for (std::size_t i = 0; i < begun_writes_.size(); ++i) {
    if (begun_writes_[i]) f(plan_.writes()[i]);
  }
  for (const WriteItem* item : begun_others_) f(*item);
}

bool PlanExecutor::HasBegunAll() const {
  return num_begun_ == plan_.writes().size() + plan_.constants().size() +
                           plan_.live_copies().size() + plan_.value_writes().size();
}

absl::Status PlanExecutor::BeforeWrite(const WriteItem& item) {
  const std::optional<std::size_t> index = IndexOf(item);
  if (index.has_value() ? begun_writes_[*index] : begun_others_.contains(&item)) {
    return absl::OkStatus();
  }
  if (undo_ != nullptr && !IsStaged(item.target)) {
    absl::Status status = undo_->Keep(At(targets_->storages(), item.target), item.map.ToLayout());
    if (!status.ok()) return status;
  }
  if (index.has_value()) {
    begun_writes_[*index] = true;
  } else {
    begun_others_.insert(&item);
  }
  ++num_begun_;
  return absl::OkStatus();
}

absl::Status PlanExecutor::Write(const WriteItem& item, const StridedMap& map,
                                 const ByteSide& from) {
  if (absl::Status status = BeforeWrite(item); !status.ok()) return status;
  absl::Status status = IsOfLayer(item.target) ? staging_->Write(item.target, map, item.casts, from)
                                               : WriteToTarget(item, map, from);
  if (status.ok()) written_nbytes_ += map.nbytes();
  return status;
}

absl::Status PlanExecutor::WriteToTarget(const WriteItem& item, const StridedMap& map,
                                         const ByteSide& from) {
  if (Batches()) {
    const absl::StatusOr<bool> is_queued = queue_->Add(item, map, from);
    if (!is_queued.ok() || *is_queued) return is_queued.status();
    if (absl::Status status = queue_->FlushBefore(item.target, from); !status.ok()) return status;
  }
  return CopyMapped(map, item.casts, TargetSide(item.target), from);
}

absl::Status PlanExecutor::Flush() {
  in_batch_ = false;
  return queue_ == nullptr ? absl::OkStatus() : queue_->Flush();
}

absl::Status PlanExecutor::BeforeRead(const ByteSide& from) {
  return queue_ == nullptr ? absl::OkStatus() : queue_->FlushBeforeRead(from);
}

// A program comes after those it reads, and its names contain theirs: in ascending order
// everything it reads has run.
absl::Status PlanExecutor::RunReadyPrograms(std::vector<std::int32_t> candidates) {
  std::ranges::sort(candidates);
  for (const std::int32_t program : candidates) {
    if (absl::Status status = RunProgram(program); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status PlanExecutor::RunProgram(std::int32_t index) {
  std::vector<at::Tensor> results;
  absl::Status status = Compute(index, results);
  At(programs_, index).inputs.clear();
  if (!status.ok()) {
    return Prefixed(
        absl::StrCat("`", At(plan_.programs(), index).op, "` failed when it was run again: "),
        status);
  }
  return UseResults(index, results);
}

absl::Status PlanExecutor::Compute(std::int32_t index, std::vector<at::Tensor>& results) {
  const Program& program = At(plan_.programs(), index);
  const auto node = traced_->nodes.find(program.node);
  if (node == traced_->nodes.end()) return absl::InternalError("the plan lost it; plan again");
  return Attempt([&] {
    std::vector<at::Tensor> inputs;
    for (std::size_t i = 0; i < program.inputs.size(); ++i) {
      at::Tensor& buffer = At(programs_, index).inputs[i];
      // An input without elements has no pieces.
      if (!buffer.defined()) buffer = NewBytes(program.inputs[i].layout.Span().stop, device_);
      inputs.push_back(ViewOf(ByteSide::OfStorage(buffer), program.inputs[i].layout,
                              ToScalarType(program.inputs[i].dtype)));
    }
    results = node->second->Run(inputs);
  });
}

absl::Status PlanExecutor::UseResults(std::int32_t index, const std::vector<at::Tensor>& results) {
  const auto side_of = [&](const Origin& origin) {
    return ByteSide::OfElements(At(results, origin.output));
  };
  if (const auto found = writes_of_program_.find(index); found != writes_of_program_.end()) {
    for (const std::int32_t write : found->second) {
      const WriteItem& item = At(plan_.value_writes(), write);
      if (absl::Status status = Write(item, side_of(item.origin)); !status.ok()) return status;
    }
  }
  if (const auto found = pieces_of_program_.find(index); found != pieces_of_program_.end()) {
    for (const PieceRef& ref : found->second) {
      absl::Status status = Gather(ref, side_of(PieceOf(ref).origin));
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

ByteSide PlanExecutor::TargetSide(StorageId storage) const {
  return ByteSide::OfStorage(At(targets_->storages(), storage));
}

}  // namespace loadplan
