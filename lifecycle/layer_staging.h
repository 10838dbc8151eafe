// LayerStaging: memory for the load-format tensors of layers, there only while their bytes arrive.
//
//   auto staging = LayerStaging::Create(traced, targets, spec).value();
//   staging->Write(storage, map, casts, from);        // as the plan says, in any order
//   while (auto group = staging->TakeReady(false)) {  // every byte of these layers is there
//     ... staging->TensorsOf(group) are real: process the layers, keep the results
//     staging->Release(group);
//   }
//   TakeReady(true)                                   // at the end: also what had to wait
#ifndef LOADPLAN_LIFECYCLE_LAYER_STAGING_H_
#define LOADPLAN_LIFECYCLE_LAYER_STAGING_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "backend/target_set.h"
#include "backend/traced_plan.h"
#include "lifecycle/byte_copy.h"
#include "lifecycle/layer_progress.h"

namespace loadplan {

// A tensor of a layer. On meta: it has no memory outside an update, and is staged. Else it is
// written where it is, before its layer is processed.
struct StagedTarget {
  std::string name;
  std::int32_t layer = -1;  // which shows it, in the order in which layers are processed
  at::Device device = at::kCPU;
  // What an unwritten tensor holds when the model is new: one element for all, or as many as the
  // tensor has. Undefined: unknown, zeros are taken.
  at::Tensor initial;
};

struct StagingSpec {
  std::vector<StagedTarget> targets;
  std::vector<std::int32_t> deferred_layers;  // processed after all others
  bool defer_processing = false;              // nothing is ready before the end
  // Staged bytes at any time. What would go beyond is held on the host until there is room.
  std::optional<Index> max_nbytes;
};

// Note [What is staged when]
//
// The storages of a group are allocated one by one, each when its first byte arrives. Where
// `max_nbytes` is given a group counts whole from its first byte on, so that groups that have begun
// can always be completed; bytes for other groups are held packed on the host, and written when an
// earlier group has been released. Groups that wait for the end anyway (deferred layers) are held.
class LayerStaging {
 public:
  // `traced` is kept. FailedPrecondition, naming the target or layer: a target on meta that `spec`
  // does not name or that the plan reads, a group that alone goes beyond max_nbytes.
  static absl::StatusOr<std::unique_ptr<LayerStaging>> Create(
      std::shared_ptr<const TracedPlan> traced, std::shared_ptr<const TargetSet> targets,
      StagingSpec spec);

  // Whether a layer waits for bytes of `storage`: all of them go through Write.
  bool Owns(StorageId storage) const { return progress_.GroupOf(storage) >= 0; }
  // Whether these bytes are staged, and not written where they belong.
  bool Stages(StorageId storage) const {
    return Owns(storage) && targets_->storages()[static_cast<std::size_t>(storage)].is_meta();
  }
  // Whether constants of the group go to live memory.
  bool WritesLiveConstants(std::int32_t group) const;
  // Whether the layers of `storage` were given to be processed.
  bool WasTaken(StorageId storage) const {
    const std::int32_t group = progress_.GroupOf(storage);
    return group >= 0 && states_[static_cast<std::size_t>(group)].is_taken;
  }
  // Staged targets of those layers of which the spec has no initial value.
  std::vector<TargetTensor> TakenUnknown() const;
  const LayerProgress& progress() const { return progress_; }
  // Where checkpoint tensors and programs are: the device of the first target.
  at::Device device() const { return device_; }

  // As CopyMapped, into the storage, or to the host where there is no room. The bytes count.
  absl::Status Write(StorageId storage, const StridedMap& map, std::span<const CastStep> casts,
                     const ByteSide& from);

  // The bytes of source `entry` have been written where they belong, not through Write.
  void WroteElsewhere(std::int32_t entry);

  // Makes everything real that a call of the loader with the fallback names may write: all that the
  // plan does not write in full. Gives these groups.
  absl::StatusOr<std::vector<std::int32_t>> OpenForCall();
  // After it: `met` are the storages that it touched.
  void CallDone(std::span<const StorageId> met);

  // The next group of which all bytes are there, written, constants included; nullopt where there
  // is none. With `finishing` also groups that had to wait, deferred ones last. A group of which
  // nothing came is never given. Release it before the next one is taken. FailedPrecondition,
  // naming a target of it: the bytes that a group waits for did not all come.
  absl::StatusOr<std::optional<std::int32_t>> TakeReady(bool finishing);
  void Release(std::int32_t group);

  // The real tensors of the target names that `group` shows, with their names.
  absl::StatusOr<std::vector<LiveTarget>> TensorsOf(std::int32_t group);

  // Whether what the call with the fallback names may write can be staged now.
  bool HasRoomForCall() const;

  // For selective updates: FailedPrecondition, naming a target of it, where some bytes of a group
  // came and others did not, or none of one that is processed all the same (deferred).
  absl::Status CheckWhole() const;

  Index peak_nbytes() const { return peak_nbytes_; }
  Index peak_held_nbytes() const { return peak_held_nbytes_; }

 private:
  // A copy that waits for room.
  struct Held {
    StorageId storage;
    StridedMap map;
    std::vector<CastStep> casts;
    at::Tensor bytes;
  };
  struct GroupState {
    Index nbytes = 0;            // of its storages
    Index elsewhere_nbytes = 0;  // of those it waits for, written past Write
    bool is_deferred = false;
    bool is_open = false;
    bool is_taken = false;
    bool is_done = false;
    bool gets_live_copies = false;
    bool met_by_call = false;
    std::vector<std::int32_t> constants;  // into LoadPlan::constants
    std::vector<Held> held;
  };

  LayerStaging(std::shared_ptr<const TracedPlan> traced, std::shared_ptr<const TargetSet> targets,
               StagingSpec spec, const std::vector<std::vector<std::int32_t>>& layers_of_storage);
  // Without storages that are live and that no update of this plan may change.
  static std::vector<std::vector<std::int32_t>> LayersOfStorage(const LoadPlan& plan,
                                                                const TargetSet& targets,
                                                                const StagingSpec& spec);
  absl::Status CheckReads() const;
  absl::Status CheckBounds() const;
  const LoadPlan& plan() const { return traced_->plan; }
  GroupState& state(std::int32_t group) { return states_[static_cast<std::size_t>(group)]; }
  const std::string& NameOf(std::int32_t group) const;

  bool WaitsForCall(std::int32_t group) const;
  bool WaitsForEnd(std::int32_t group) const;
  bool CameSomething(std::int32_t group) const;
  bool TryOpen(std::int32_t group);
  // Writes what was held.
  absl::Status Open(std::int32_t group);
  absl::Status Hold(StorageId storage, const StridedMap& map, std::span<const CastStep> casts,
                    const ByteSide& from);
  absl::StatusOr<at::Tensor> Storage(StorageId storage);
  absl::Status Initialise(StorageId storage, const at::Tensor& bytes) const;
  absl::Status CheckComplete(std::int32_t group) const;
  absl::Status WriteConstants(std::int32_t group);

  const std::shared_ptr<const TracedPlan> traced_;
  const std::shared_ptr<const TargetSet> targets_;
  const StagingSpec spec_;
  LayerProgress progress_;
  std::vector<GroupState> states_;
  at::Device device_ = at::kCPU;
  std::vector<std::vector<std::int32_t>> specs_of_storage_;  // into spec_.targets
  std::vector<at::Tensor> storages_;                         // undefined where not allocated
  std::vector<std::int32_t> complete_;                       // groups to take, as they came
  bool call_done_ = false;
  bool is_finishing_ = false;
  Index reserved_nbytes_ = 0;
  Index nbytes_ = 0;
  Index held_nbytes_ = 0;
  Index peak_nbytes_ = 0;
  Index peak_held_nbytes_ = 0;
};

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_LAYER_STAGING_H_
