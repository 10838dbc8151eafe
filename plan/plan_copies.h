// PlanCopies: the copies of a plan as jobs of a device, made once and used by every update.
#ifndef LOADPLAN_PLAN_PLAN_COPIES_H_
#define LOADPLAN_PLAN_PLAN_COPIES_H_

#include <cstdint>
#include <span>
#include <vector>

#include "geometry/copy_job.h"
#include "geometry/export.h"
#include "plan/load_plan.h"

namespace loadplan {

// Of copies of checkpoint bytes, as they are: plan.writes().
class LOADPLAN_API PlanCopies {
 public:
  // Jobs [first, first + count) of jobs().
  struct Jobs {
    std::uint32_t first = 0;
    std::uint32_t count = 0;
    // Another write shares a byte with it, or may: it needs a batch of its own, in its turn.
    bool is_alone = false;
  };

  // Whether the device makes such a cast.
  using HasCast = bool (*)(CopyCast cast);

  // `addresses`: of each target storage by its StorageId; 0 for one that is not on the device.
  // `has_cast` null: it makes none. `writes` must outlive this.
  PlanCopies(std::span<const WriteItem> writes, std::vector<std::uint64_t> addresses,
             HasCast has_cast = nullptr);

  // Count 0 where the item is no job of the device: a cast that it does not make or in several
  // steps, a target that is elsewhere, a region of too many pieces, an item that is not one of
  // `writes`.
  Jobs JobsOf(const WriteItem& item) const;
  std::span<const CopyJob> jobs() const { return jobs_; }
  const std::vector<std::uint64_t>& addresses() const { return addresses_; }

 private:
  bool IsPossible(const WriteItem& item) const;
  void MarkAlone();

  const std::span<const WriteItem> writes_;
  const std::vector<std::uint64_t> addresses_;
  const HasCast has_cast_;
  std::vector<CopyJob> jobs_;
  std::vector<Jobs> of_write_;  // parallel to writes_
};

// Of the dtypes of `item`; none for a copy of bytes.
LOADPLAN_API CopyCast CastOf(const WriteItem& item);

// More jobs for one write are not worth it.
inline constexpr std::size_t kMaxJobsOfWrite = 64;

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_PLAN_COPIES_H_
