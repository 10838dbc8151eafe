// Landing: the parts that a schedule brings to one rank, on their way into a reload session.
#ifndef LOADPLAN_TRANSFER_LANDING_H_
#define LOADPLAN_TRANSFER_LANDING_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "geometry/strided_layout.h"
#include "lifecycle/byte_copy.h"
#include "lifecycle/reload_session.h"
#include "transfer/schedule.h"

namespace loadplan {

// Entries that `plan` needs and of which no byte comes to `rank`: empty tensors.
std::vector<std::int32_t> EntriesWithoutParts(const Schedule& schedule, std::int32_t rank,
                                              const LoadPlan& plan);

// One update. A name is opened with its first part and complete with its last.
class Landing {
 public:
  Landing(const Schedule& schedule, std::vector<std::int32_t> num_parts, ReloadSession& session)
      : schedule_(schedule),
        missing_(std::move(num_parts)),
        is_open_(missing_.size(), false),
        session_(session) {}

  // Before any part. `empty`: EntriesWithoutParts, which are complete. Names that write the same
  // bytes go through the loader in declared order: which has its last part first is chance.
  absl::Status Begin(const LoadPlan& plan, const std::vector<std::int32_t>& empty);
  // `layout`: the items of the part's box, in order, as they lie in `from`.
  absl::Status Land(const MessagePart& part, const StridedLayout& layout, const ByteSide& from);
  // Where the bytes of the box, packed, may be written directly; then LandedInPlace.
  absl::StatusOr<std::optional<ByteSide>> InPlace(const MessagePart& part);
  absl::Status LandedInPlace(const MessagePart& part);

 private:
  const std::string& NameOf(std::int32_t name) const {
    return schedule_.names()[static_cast<std::size_t>(name)];
  }
  absl::Status Open(std::int32_t name);
  absl::Status CountPart(std::int32_t name);
  // The part's bytes in the row-major tensor.
  StridedLayout InTensor(const MessagePart& part) const;

  const Schedule& schedule_;
  std::vector<std::int32_t> missing_;  // parts, per name
  std::vector<bool> is_open_;
  ReloadSession& session_;
};

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_LANDING_H_
