// LayerProgress: which bytes the layers of a model wait for, and which are there.
#ifndef LOADPLAN_LIFECYCLE_LAYER_PROGRESS_H_
#define LOADPLAN_LIFECYCLE_LAYER_PROGRESS_H_

#include <cstdint>
#include <vector>

#include "plan/load_plan.h"

namespace loadplan {

// Note [Layer groups]
//
// A layer is processed when every byte that the plan writes into its tensors is there. Layers that
// show one storage (a tied embedding) are one group: the storage is there once, and none of them
// can be processed, nor the storage freed, before the others have all of their bytes.
struct LayerGroup {
  std::vector<std::int32_t> layers;  // ascending
  std::vector<StorageId> storages;   // ascending
  Index expected_nbytes = 0;         // that come from names: copies, computed values
  Index constant_nbytes = 0;         // that the plan sets, or copies from live bytes
  Index received_nbytes = 0;         // of the expected ones
  // The plan does not write all of its bytes: a fallback call may.
  bool has_uncovered = false;

  bool is_complete() const { return received_nbytes == expected_nbytes; }
};

// Counts bytes, of which a plan writes each once; touches none.
//
// Example: layer 0 shows storages 0 and 1, layer 1 shows 1 and 2, layer 2 shows 3; storage 4 is
// nobody's. Groups: {0, 1} over {0, 1, 2} and {2} over {3}.
class LayerProgress {
 public:
  // `layers_of_storage`: per target storage of the plan the layers that show it, none for one that
  // is written where it is.
  LayerProgress(const LoadPlan& plan,
                const std::vector<std::vector<std::int32_t>>& layers_of_storage);

  const std::vector<LayerGroup>& groups() const { return groups_; }
  const LayerGroup& group(std::int32_t index) const {
    return groups_[static_cast<std::size_t>(index)];
  }
  // -1: the storage is nobody's.
  std::int32_t GroupOf(StorageId storage) const {
    return group_of_storage_[static_cast<std::size_t>(storage)];
  }
  bool HasUncovered(StorageId storage) const {
    return uncovered_[static_cast<std::size_t>(storage)];
  }
  // Bytes of a name that have come for a storage of a group.
  void Count(StorageId storage, Index nbytes);

 private:
  std::vector<LayerGroup> groups_;
  std::vector<std::int32_t> group_of_storage_;
  std::vector<bool> uncovered_;  // per storage
};

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_LAYER_PROGRESS_H_
