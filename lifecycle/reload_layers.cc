// ReloadSession, what is particular to layerwise updates.
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "lifecycle/reload_session.h"

namespace loadplan {

absl::Status ReloadSession::SetStaging(StagingSpec spec) {
  const std::lock_guard lock(mutex_);
  if (state_ != SessionState::kActive || plan_ != nullptr) {
    return absl::InternalError("SetStaging belongs between Start and Begin");
  }
  staging_spec_ = std::move(spec);
  return absl::OkStatus();
}

absl::StatusOr<ReadyLayers> ReloadSession::ReadyLayersOf(std::int32_t group) {
  ReadyLayers ready{group, staging_->progress().group(group).layers, {}};
  absl::StatusOr<std::vector<LiveTarget>> tensors = staging_->TensorsOf(group);
  if (!tensors.ok()) return tensors.status();
  ready.tensors = *std::move(tensors);
  return ready;
}

absl::StatusOr<std::optional<ReadyLayers>> ReloadSession::TakeReadyLayers(bool finishing) {
  return Guarded([&]() -> absl::StatusOr<std::optional<ReadyLayers>> {
    if (state_ != SessionState::kActive || staging_ == nullptr) return std::nullopt;
    absl::StatusOr<std::optional<std::int32_t>> group = staging_->TakeReady(finishing);
    if (!group.ok()) return Fail(group.status());
    if (!group->has_value()) return std::nullopt;
    layers_overwrote_ = layers_overwrote_ || staging_->WritesLiveConstants(**group);
    absl::StatusOr<ReadyLayers> ready = ReadyLayersOf(**group);
    if (!ready.ok()) return Fail(ready.status());
    return *std::move(ready);
  });
}

absl::Status ReloadSession::LayersDone(std::int32_t group) {
  const std::lock_guard lock(mutex_);
  if (staging_ == nullptr) return absl::InternalError("LayersDone without layers");
  staging_->Release(group);
  return absl::OkStatus();
}

absl::Status ReloadSession::LayersOverwrite(std::vector<LiveTarget> kernel) {
  const std::lock_guard lock(mutex_);
  if (state_ != SessionState::kActive || staging_ == nullptr) {
    return absl::FailedPreconditionError("the reload ended before its layers were processed");
  }
  layers_overwrote_ = true;
  overwritten_.insert(overwritten_.end(), kernel.begin(), kernel.end());
  return absl::OkStatus();
}

std::vector<TargetBytes> ReloadSession::ZeroedBytes() const {
  const std::lock_guard lock(mutex_);
  std::vector<TargetBytes> zeroed;
  if (staging_ == nullptr) return zeroed;
  const std::vector<TargetTensor> unknown = staging_->TakenUnknown();
  for (TargetBytes& target : Written(/*live_only=*/false).PerTarget(unknown)) {
    if (target.nbytes < target.total_nbytes) zeroed.push_back(std::move(target));
  }
  return zeroed;
}

absl::StatusOr<std::vector<ReadyLayers>> ReloadSession::OpenLayersForCall() {
  return Guarded([&]() -> absl::StatusOr<std::vector<ReadyLayers>> {
    std::vector<ReadyLayers> layers;
    if (staging_ == nullptr) return layers;
    absl::StatusOr<std::vector<std::int32_t>> groups = staging_->OpenForCall();
    if (!groups.ok()) return Fail(groups.status());
    for (const std::int32_t group : *groups) {
      absl::StatusOr<ReadyLayers> ready = ReadyLayersOf(group);
      if (!ready.ok()) return Fail(ready.status());
      layers.push_back(*std::move(ready));
    }
    return layers;
  });
}

void ReloadSession::LayersCalled(std::span<const std::string> met) {
  const std::lock_guard lock(mutex_);
  if (staging_ == nullptr) return;
  const absl::flat_hash_set<std::string_view> names(met.begin(), met.end());
  std::vector<StorageId> storages;
  for (const TargetTensor& target : plan_->targets->target_tensors()) {
    if (names.contains(target.name)) storages.push_back(target.storage);
  }
  staging_->CallDone(storages);
}

absl::Status ReloadSession::FailWith(const absl::Status& status) {
  const std::lock_guard lock(mutex_);
  return FailActive(status);
}

absl::Status ReloadSession::FailActive(const absl::Status& status) {
  return state_ == SessionState::kActive ? Fail(status) : status;
}

}  // namespace loadplan
