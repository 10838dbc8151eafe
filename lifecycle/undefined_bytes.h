// UndefinedBytes: what failed updates have written and no complete one has overwritten since.
#ifndef LOADPLAN_LIFECYCLE_UNDEFINED_BYTES_H_
#define LOADPLAN_LIFECYCLE_UNDEFINED_BYTES_H_

#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "backend/target_set.h"
#include "lifecycle/written_bytes.h"
#include "plan/load_plan.h"

namespace loadplan {

// Storages go by a name that shows them, so that another plan of the same model can be asked
// whether it makes them good; of several names any finds them.
class UndefinedBytes {
 public:
  bool empty() const { return regions_.empty() && told_.empty(); }
  void Clear();
  // What a failed update has written, or may have: storages are those of `targets`.
  void Add(std::span<const TargetTensor> targets, const WrittenBytes& written);
  // Tensors that a hook may have written. They are told, and not asked of a plan: it may not write
  // all of them (a buffer), or knows the load format of their layers only; hooks run again.
  // `is_readable`: their bytes are old ones in load format, from which a plan may compute.
  void AddTold(std::span<const LiveTarget> tensors, bool is_readable = false);

  // Sorted by name; each has some bytes.
  const std::vector<TargetBytes>& targets() const { return per_target_; }

  // FailedPrecondition, naming the target, where `written`, with the storages of `targets`,
  // leaves an undefined byte as it is, or where the target is no longer there.
  absl::Status CheckCovered(std::span<const TargetTensor> targets,
                            const WrittenBytes& written) const;
  // FailedPrecondition, naming the target, where `plan` computes from bytes that are undefined.
  absl::Status CheckNotRead(const LoadPlan& plan) const;

 private:
  void Tell(std::vector<TargetBytes> loaded);

  std::map<std::string, std::vector<StridedLayout>> regions_;
  struct Told {
    TargetBytes bytes;
    bool is_readable = false;
  };
  std::map<std::string, Told> told_;
  std::vector<TargetBytes> per_target_;
};

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_UNDEFINED_BYTES_H_
