#include "lifecycle/layer_staging.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "geometry/at.h"
#include "lifecycle/attempt.h"

namespace loadplan {
namespace {

Index NbytesOf(const at::Tensor& storage) { return static_cast<Index>(storage.storage().nbytes()); }

}  // namespace

absl::StatusOr<std::unique_ptr<LayerStaging>> LayerStaging::Create(
    std::shared_ptr<const TracedPlan> traced, std::shared_ptr<const TargetSet> targets,
    StagingSpec spec) {
  absl::flat_hash_map<std::string_view, StorageId> storages;
  for (const TargetTensor& target : targets->target_tensors()) {
    storages.emplace(target.name, target.storage);
  }
  for (const StagedTarget& target : spec.targets) {
    if (storages.contains(target.name)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "`", target.name, "` came after the plan was made; plan again in this reload"));
  }
  const std::vector<std::vector<std::int32_t>> layers =
      LayersOfStorage(traced->plan, *targets, spec);
  auto staging = std::unique_ptr<LayerStaging>(
      new LayerStaging(std::move(traced), std::move(targets), std::move(spec), layers));
  for (std::size_t s = 0; s < layers.size(); ++s) {
    const auto storage = static_cast<StorageId>(s);
    if (!staging->targets_->storages()[s].is_meta() || staging->Stages(storage)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("target `", staging->targets_->NameOf(storage),
                     "` is on meta and was not recorded; call record_metadata_for_reloading before "
                     "post-processing"));
  }
  if (absl::Status status = staging->CheckReads(); !status.ok()) return status;
  if (absl::Status status = staging->CheckBounds(); !status.ok()) return status;
  return staging;
}

std::vector<std::vector<std::int32_t>> LayerStaging::LayersOfStorage(const LoadPlan& plan,
                                                                     const TargetSet& targets,
                                                                     const StagingSpec& spec) {
  std::vector<bool> waited(targets.storages().size(), false);
  for (std::size_t s = 0; s < waited.size(); ++s) waited[s] = targets.storages()[s].is_meta();
  for (const auto& items : {plan.writes(), std::span<const WriteItem>(plan.value_writes()),
                            std::span<const WriteItem>(plan.constants()),
                            std::span<const WriteItem>(plan.live_copies())}) {
    for (const WriteItem& item : items) waited[static_cast<std::size_t>(item.target)] = true;
  }
  // The call with the fallback names may write it.
  for (const UncoveredTarget& item : plan.uncovered()) {
    if (item.nbytes == 0 || !plan.has_fallbacks()) continue;
    waited[static_cast<std::size_t>(At(plan.targets(), item.target).storage)] = true;
  }
  absl::flat_hash_map<std::string_view, StorageId> storages;
  for (const TargetTensor& target : targets.target_tensors()) {
    storages.emplace(target.name, target.storage);
  }
  std::vector<std::vector<std::int32_t>> layers(waited.size());
  for (const StagedTarget& target : spec.targets) {
    const StorageId storage = storages.at(target.name);
    if (waited[static_cast<std::size_t>(storage)]) At(layers, storage).push_back(target.layer);
  }
  for (auto& list : layers) {
    std::ranges::sort(list);
    list.erase(std::unique(list.begin(), list.end()), list.end());
  }
  return layers;
}

bool LayerStaging::WritesLiveConstants(std::int32_t group) const {
  return std::ranges::any_of(At(states_, group).constants, [this](std::int32_t index) {
    return !Stages(At(plan().constants(), index).target);
  });
}

LayerStaging::LayerStaging(std::shared_ptr<const TracedPlan> traced,
                           std::shared_ptr<const TargetSet> targets, StagingSpec spec,
                           const std::vector<std::vector<std::int32_t>>& layers_of_storage)
    : traced_(std::move(traced)),
      targets_(std::move(targets)),
      spec_(std::move(spec)),
      progress_(traced_->plan, layers_of_storage),
      states_(progress_.groups().size()),
      specs_of_storage_(layers_of_storage.size()),
      storages_(layers_of_storage.size()) {
  absl::flat_hash_map<std::string_view, std::int32_t> by_name;
  for (std::size_t i = 0; i < spec_.targets.size(); ++i) {
    by_name.emplace(spec_.targets[i].name, static_cast<std::int32_t>(i));
  }
  for (const TargetTensor& target : targets_->target_tensors()) {
    const auto found = by_name.find(target.name);
    if (found != by_name.end()) At(specs_of_storage_, target.storage).push_back(found->second);
  }
  if (!storages_.empty()) {
    device_ = Stages(0) ? At(spec_.targets, specs_of_storage_.front().front()).device
                        : targets_->storages().front().device();
  }
  for (std::size_t g = 0; g < states_.size(); ++g) {
    const LayerGroup& group = progress_.groups()[g];
    for (const StorageId storage : group.storages) {
      if (!Stages(storage)) continue;
      states_[g].nbytes += NbytesOf(At(targets_->storages(), storage));
    }
    states_[g].is_deferred = std::ranges::any_of(group.layers, [this](std::int32_t layer) {
      return std::ranges::find(spec_.deferred_layers, layer) != spec_.deferred_layers.end();
    });
  }
  for (std::int32_t i = 0; i < static_cast<std::int32_t>(plan().constants().size()); ++i) {
    const StorageId storage = At(plan().constants(), i).target;
    if (Owns(storage)) state(progress_.GroupOf(storage)).constants.push_back(i);
  }
  for (const WriteItem& item : plan().live_copies()) {
    if (Owns(item.target)) state(progress_.GroupOf(item.target)).gets_live_copies = true;
  }
}

std::vector<TargetTensor> LayerStaging::TakenUnknown() const {
  std::vector<TargetTensor> unknown;
  for (std::size_t s = 0; s < specs_of_storage_.size(); ++s) {
    const auto storage = static_cast<StorageId>(s);
    if (!WasTaken(storage) || !Stages(storage)) continue;
    for (const std::int32_t spec : specs_of_storage_[s]) {
      if (At(spec_.targets, spec).initial.defined()) continue;
      const auto& tensors = targets_->target_tensors();
      const auto found =
          std::ranges::find(tensors, At(spec_.targets, spec).name, &TargetTensor::name);
      if (found != tensors.end()) unknown.push_back(*found);
      break;  // a tied tensor once
    }
  }
  return unknown;
}

bool LayerStaging::HasRoomForCall() const {
  if (!spec_.max_nbytes.has_value()) return true;
  Index nbytes = reserved_nbytes_;
  for (std::size_t g = 0; g < states_.size(); ++g) {
    if (WaitsForCall(static_cast<std::int32_t>(g)) && !states_[g].is_open) {
      nbytes += states_[g].nbytes;
    }
  }
  return nbytes <= *spec_.max_nbytes;
}

// Before an update a staged tensor has no bytes that could be read.
absl::Status LayerStaging::CheckReads() const {
  const auto refuse = [this](StorageId storage) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the loader reads bytes that `", targets_->NameOf(storage),
        "` had before the update, or copies live bytes into it, and a layerwise reload has none of "
        "them; change the loader, or reload in mode direct"));
  };
  for (const WriteItem& item : plan().live_copies()) {
    if (Stages(item.target)) return refuse(item.target);
    if (Stages(item.origin.index)) return refuse(item.origin.index);
  }
  for (const Program& program : plan().programs()) {
    for (const ProgramInput& input : program.inputs) {
      for (const WriteItem& piece : input.pieces) {
        if (piece.origin.kind == OriginKind::kLiveBefore && Stages(piece.origin.index)) {
          return refuse(piece.origin.index);
        }
      }
    }
  }
  return absl::OkStatus();
}

absl::Status LayerStaging::CheckBounds() const {
  if (!spec_.max_nbytes.has_value()) return absl::OkStatus();
  Index for_call = 0;
  for (std::size_t g = 0; g < states_.size(); ++g) {
    const auto group = static_cast<std::int32_t>(g);
    if (states_[g].nbytes > *spec_.max_nbytes) {
      return absl::FailedPreconditionError(
          absl::StrCat("the layer of `", NameOf(group), "` needs ", states_[g].nbytes,
                       " staged bytes, more than max_staging_bytes=", *spec_.max_nbytes,
                       "; start_reload with max_staging_bytes=", states_[g].nbytes,
                       " or more, or without a bound"));
    }
    if (WaitsForCall(group)) for_call += states_[g].nbytes;
  }
  if (for_call > *spec_.max_nbytes) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the call of load_weights with the fallback names may write ", for_call,
        " staged bytes, more than max_staging_bytes=", *spec_.max_nbytes,
        "; start_reload with max_staging_bytes=", for_call, " or more, or without a bound"));
  }
  return absl::OkStatus();
}

const std::string& LayerStaging::NameOf(std::int32_t group) const {
  return targets_->NameOf(progress_.group(group).storages.front());
}

bool LayerStaging::WaitsForCall(std::int32_t group) const {
  return progress_.group(group).has_uncovered && plan().has_fallbacks() && !call_done_;
}

bool LayerStaging::WaitsForEnd(std::int32_t group) const {
  return spec_.defer_processing || At(states_, group).is_deferred || WaitsForCall(group);
}

bool LayerStaging::CameSomething(std::int32_t group) const {
  const LayerGroup& bytes = progress_.group(group);
  return bytes.received_nbytes > 0 || At(states_, group).met_by_call ||
         (bytes.expected_nbytes == 0 && bytes.constant_nbytes > 0);
}

bool LayerStaging::TryOpen(std::int32_t group) {
  GroupState& it = state(group);
  if (it.is_open) return true;
  if (spec_.max_nbytes.has_value() && reserved_nbytes_ + it.nbytes > *spec_.max_nbytes) {
    return false;
  }
  it.is_open = true;
  reserved_nbytes_ += it.nbytes;
  return true;
}

absl::Status LayerStaging::Open(std::int32_t group) {
  GroupState& it = state(group);
  if (!TryOpen(group)) {
    return absl::InternalError(absl::StrCat("no room to stage the layer of `", NameOf(group), "`"));
  }
  for (Held& held : std::exchange(it.held, {})) {
    absl::StatusOr<at::Tensor> to = Storage(held.storage);
    if (!to.ok()) return to.status();
    absl::Status status =
        CopyMapped(held.map, held.casts, ByteSide::OfStorage(*to), ByteSide::OfStorage(held.bytes));
    if (!status.ok()) return status;
    held_nbytes_ -= NbytesOf(held.bytes);
    held.bytes.reset();
  }
  return absl::OkStatus();
}

absl::StatusOr<at::Tensor> LayerStaging::Storage(StorageId storage) {
  if (!Stages(storage)) return At(targets_->storages(), storage);
  at::Tensor& bytes = At(storages_, storage);
  if (bytes.defined()) return bytes;
  const Index nbytes = NbytesOf(At(targets_->storages(), storage));
  absl::Status status = Attempt(
      absl::StrCat("`", targets_->NameOf(storage), "` could not be staged"), [&]() -> absl::Status {
        bytes = NewBytes(nbytes, At(spec_.targets, At(specs_of_storage_, storage).front()).device);
        nbytes_ += nbytes;
        peak_nbytes_ = std::max(peak_nbytes_, nbytes_);
        return Initialise(storage, bytes);
      });
  if (!status.ok()) return status;
  return bytes;
}

// Bytes that nobody writes are what they are in a new model, or zero, and never what lay there.
absl::Status LayerStaging::Initialise(StorageId storage, const at::Tensor& bytes) const {
  const bool uncovered = progress_.HasUncovered(storage);
  const auto& tensors = targets_->target_tensors();
  Index shown = 0;
  for (const TargetTensor& target : tensors) {
    if (target.storage == storage) shown = std::max(shown, target.layout.nbytes());
  }
  if (!uncovered && shown == NbytesOf(bytes)) return absl::OkStatus();
  bytes.zero_();
  if (!uncovered) return absl::OkStatus();
  for (const std::int32_t spec : At(specs_of_storage_, storage)) {
    const StagedTarget& staged = At(spec_.targets, spec);
    if (!staged.initial.defined()) continue;
    for (const TargetTensor& target : tensors) {
      if (target.name != staged.name) continue;
      at::Tensor view =
          ViewOf(ByteSide::OfStorage(bytes), target.layout, staged.initial.scalar_type());
      view.copy_(staged.initial.numel() == 1 ? staged.initial.reshape({})
                                             : staged.initial.reshape(view.sizes()));
    }
  }
  return absl::OkStatus();
}

absl::Status LayerStaging::Hold(StorageId storage, const StridedMap& map,
                                std::span<const CastStep> casts, const ByteSide& from) {
  const KeptMaps kept = KeptMapsOf(map, !casts.empty());
  at::Tensor bytes = NewBytes(kept.in.nbytes(), at::kCPU);
  absl::Status status = CopyMapped(kept.in, {}, ByteSide::OfStorage(bytes), from);
  if (!status.ok()) return status;
  held_nbytes_ += NbytesOf(bytes);
  peak_held_nbytes_ = std::max(peak_held_nbytes_, held_nbytes_);
  state(progress_.GroupOf(storage))
      .held.push_back({storage, kept.out, {casts.begin(), casts.end()}, std::move(bytes)});
  return absl::OkStatus();
}

absl::Status LayerStaging::Write(StorageId storage, const StridedMap& map,
                                 std::span<const CastStep> casts, const ByteSide& from) {
  const std::int32_t group = progress_.GroupOf(storage);
  GroupState& it = state(group);
  if (it.is_done) {
    return absl::InternalError(absl::StrCat("bytes came for `", targets_->NameOf(storage),
                                            "` after its layer was processed"));
  }
  const c10::NoGradGuard no_grad;
  // With a bound, what stays until the end would take the room of all others.
  const bool may_open = !spec_.max_nbytes.has_value() || !WaitsForEnd(group);
  absl::Status status;
  if (it.is_open || !Stages(storage) || (may_open && TryOpen(group))) {
    absl::StatusOr<at::Tensor> to = Storage(storage);
    if (!to.ok()) return to.status();
    status = CopyMapped(map, casts, ByteSide::OfStorage(*to), from);
  } else {
    status = Hold(storage, map, casts, from);
  }
  if (!status.ok()) return status;
  progress_.Count(storage, map.nbytes());
  if (progress_.group(group).is_complete() && !WaitsForEnd(group)) complete_.push_back(group);
  return status;
}

void LayerStaging::WroteElsewhere(std::int32_t entry) {
  for (const WriteItem& item : plan().writes_of(entry)) {
    if (!Owns(item.target)) continue;
    state(progress_.GroupOf(item.target)).elsewhere_nbytes += item.map.nbytes();
  }
}

// Never to be seen where a session has checked which names came: the last guard before a layer is
// made from memory that nobody wrote.
absl::Status LayerStaging::CheckComplete(std::int32_t group) const {
  const LayerGroup& bytes = progress_.group(group);
  const Index come = bytes.received_nbytes + At(states_, group).elsewhere_nbytes;
  if (come == bytes.expected_nbytes) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the layer of `", NameOf(group), "` got ", come, " of ", bytes.expected_nbytes,
                   " bytes and cannot be processed; send all of its names"));
}

absl::Status LayerStaging::WriteConstants(std::int32_t group) {
  for (const std::int32_t index : state(group).constants) {
    const WriteItem& item = At(plan().constants(), index);
    absl::StatusOr<at::Tensor> to = Storage(item.target);
    if (!to.ok()) return to.status();
    absl::Status status =
        CopyMapped(item.map, item.casts, ByteSide::OfStorage(*to),
                   ByteSide::OfElements(traced_->constants.at(item.origin.index)));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::int32_t>> LayerStaging::OpenForCall() {
  const c10::NoGradGuard no_grad;
  std::vector<std::int32_t> opened;
  for (std::int32_t g = 0; g < static_cast<std::int32_t>(states_.size()); ++g) {
    if (!WaitsForCall(g)) continue;
    if (absl::Status status = Open(g); !status.ok()) return status;
    opened.push_back(g);
  }
  return opened;
}

void LayerStaging::CallDone(std::span<const StorageId> met) {
  call_done_ = true;
  for (const StorageId storage : met) {
    if (Owns(storage)) state(progress_.GroupOf(storage)).met_by_call = true;
  }
  for (std::int32_t group = 0; group < static_cast<std::int32_t>(states_.size()); ++group) {
    if (!progress_.group(group).has_uncovered || !progress_.group(group).is_complete()) continue;
    if (CameSomething(group) && !WaitsForEnd(group)) complete_.push_back(group);
  }
}

absl::StatusOr<std::optional<std::int32_t>> LayerStaging::TakeReady(bool finishing) {
  if (finishing && !std::exchange(is_finishing_, true)) {
    complete_.clear();
    for (std::int32_t group = 0; group < static_cast<std::int32_t>(states_.size()); ++group) {
      if (!state(group).is_done && CameSomething(group)) complete_.push_back(group);
    }
  }
  // First those that hold room; of deferred groups none before all others are done.
  for (const bool deferred : {false, true}) {
    for (const bool open : {true, false}) {
      for (auto it = complete_.begin(); it != complete_.end(); ++it) {
        const std::int32_t group = *it;
        if (state(group).is_deferred != deferred || state(group).is_open != open) continue;
        if (!TryOpen(group)) continue;
        complete_.erase(it);
        const c10::NoGradGuard no_grad;
        if (absl::Status status = CheckComplete(group); !status.ok()) return status;
        if (absl::Status status = Open(group); !status.ok()) return status;
        if (absl::Status status = WriteConstants(group); !status.ok()) return status;
        state(group).is_taken = true;
        return group;
      }
    }
  }
  return std::nullopt;
}

void LayerStaging::Release(std::int32_t group) {
  GroupState& it = state(group);
  it.is_done = true;
  if (!std::exchange(it.is_open, false)) return;
  reserved_nbytes_ -= it.nbytes;
  for (const StorageId storage : progress_.group(group).storages) {
    at::Tensor& bytes = At(storages_, storage);
    if (bytes.defined()) nbytes_ -= NbytesOf(bytes);
    bytes.reset();
  }
}

absl::StatusOr<std::vector<LiveTarget>> LayerStaging::TensorsOf(std::int32_t group) {
  std::vector<LiveTarget> tensors;
  const c10::NoGradGuard no_grad;
  absl::flat_hash_map<std::string_view, StorageId> mine;
  for (const StorageId storage : progress_.group(group).storages) {
    if (!Stages(storage)) continue;
    for (const std::int32_t spec : At(specs_of_storage_, storage)) {
      mine.emplace(At(spec_.targets, spec).name, storage);
    }
  }
  for (const LiveTarget& target : targets_->targets()) {
    const auto found = mine.find(target.name);
    if (found == mine.end()) continue;
    absl::StatusOr<at::Tensor> bytes = Storage(found->second);
    if (!bytes.ok()) return bytes.status();
    at::Tensor tensor =
        at::empty({0}, at::TensorOptions(target.tensor.scalar_type()).device(bytes->device()));
    tensor.set_(bytes->storage(), target.tensor.storage_offset(), target.tensor.sizes(),
                target.tensor.strides());
    tensors.push_back({target.name, std::move(tensor)});
  }
  return tensors;
}

absl::Status LayerStaging::CheckWhole() const {
  const bool came_some = std::ranges::any_of(
      progress_.groups(), [](const LayerGroup& group) { return group.received_nbytes > 0; });
  for (std::size_t g = 0; g < states_.size(); ++g) {
    const LayerGroup& group = progress_.groups()[g];
    if (group.received_nbytes == 0) {
      const bool is_processed = states_[g].is_deferred || states_[g].gets_live_copies;
      if (!is_processed || !came_some || group.expected_nbytes == 0) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("the layer of `", NameOf(static_cast<std::int32_t>(g)),
                       "` is processed in every update, since it derives from others, and its own "
                       "bytes did not come; send its names too"));
    }
    const bool misses_call = WaitsForCall(static_cast<std::int32_t>(g));
    if (group.is_complete() && !misses_call) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("the layer of `", NameOf(static_cast<std::int32_t>(g)), "` got ",
                     group.received_nbytes, " of ", group.expected_nbytes, " bytes",
                     misses_call ? " and its fallback names did not come" : "",
                     "; a layer is processed whole: send all of its names or none"));
  }
  return absl::OkStatus();
}

}  // namespace loadplan
