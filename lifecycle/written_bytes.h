// Which bytes of live storages an update has written, in regions.
#ifndef LOADPLAN_LIFECYCLE_WRITTEN_BYTES_H_
#define LOADPLAN_LIFECYCLE_WRITTEN_BYTES_H_

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "plan/load_plan.h"

namespace loadplan {

// How much of a target was written; of an update, or by a failed one.
struct TargetBytes {
  std::string name;
  Index nbytes = 0;
  Index total_nbytes = 0;
  // Where, in bytes of the storage: merged ranges that hold all of them, gaps of strided regions
  // included.
  std::vector<ByteRange> ranges;
};

class WrittenBytes {
 public:
  // Everything that `plan` writes, by whatever way; nothing of its fallback names.
  static WrittenBytes OfPlan(const LoadPlan& plan);

  void Add(StorageId storage, StridedLayout region) {
    regions_[storage].push_back(std::move(region));
  }
  void Add(const WriteItem& item) { Add(item.target, item.map.ToLayout()); }
  // Every byte that `targets` show.
  void AddWhole(std::span<const TargetTensor> targets);

  bool empty() const { return regions_.empty(); }
  // Of one storage; may share bytes.
  std::span<const StridedLayout> Of(StorageId storage) const;

  // One for each of `targets`, in their order, with nothing written where nothing was.
  std::vector<TargetBytes> PerTarget(std::span<const TargetTensor> targets) const;

 private:
  absl::flat_hash_map<StorageId, std::vector<StridedLayout>> regions_;
};

// Merges ranges that touch; the last one reaches to the end where more than `max_ranges` would be
// left.
std::vector<ByteRange> MergedRanges(std::vector<ByteRange> ranges, std::size_t max_ranges);

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_WRITTEN_BYTES_H_
