#include "plan/plan_copies.h"

#include <cstddef>
#include <functional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "geometry/copy_jobs.h"
#include "geometry/overlap.h"

namespace loadplan {

PlanCopies::PlanCopies(std::span<const WriteItem> writes, std::vector<std::uint64_t> addresses,
                       HasCast has_cast)
    : writes_(writes),
      addresses_(std::move(addresses)),
      has_cast_(has_cast),
      of_write_(writes.size()) {
  for (std::size_t w = 0; w < of_write_.size(); ++w) {
    const WriteItem& item = writes_[w];
    const auto target = static_cast<std::size_t>(item.target);
    if (addresses_[target] == 0 || !IsPossible(item)) continue;
    const auto first = static_cast<std::uint32_t>(jobs_.size());
    const CopyCast cast = CastOf(item);
    if (!AppendCopyJobs(item.map, addresses_[target], kMaxJobsOfWrite, &jobs_, cast)) continue;
    of_write_[w].first = first;
    of_write_[w].count = static_cast<std::uint32_t>(jobs_.size()) - first;
  }
  MarkAlone();
}

bool PlanCopies::IsPossible(const WriteItem& item) const {
  if (item.casts.empty()) return !item.map.is_cast();
  return item.casts.size() == 2 && item.map.is_cast() && has_cast_ != nullptr &&
         has_cast_(CastOf(item));
}

// A plan's writes are disjoint, and this says so. It is asked all the same: bytes of a batch are
// written in no order, and the order is what a plan without this would have relied on.
void PlanCopies::MarkAlone() {
  absl::flat_hash_map<StorageId, std::vector<std::size_t>> by_target;
  for (std::size_t w = 0; w < of_write_.size(); ++w) {
    if (!writes_[w].map.empty()) by_target[writes_[w].target].push_back(w);
  }
  for (const auto& [target, writes] : by_target) {
    std::vector<StridedLayout> layouts;
    for (const std::size_t w : writes) layouts.push_back(writes_[w].map.ToLayout());
    const absl::StatusOr<std::vector<OverlapPair>> pairs = FindOverlaps(layouts);
    if (!pairs.ok()) {
      for (const std::size_t w : writes) of_write_[w].is_alone = true;
      continue;
    }
    for (const OverlapPair& pair : *pairs) {
      of_write_[writes[static_cast<std::size_t>(pair.first)]].is_alone = true;
      of_write_[writes[static_cast<std::size_t>(pair.second)]].is_alone = true;
    }
  }
}

PlanCopies::Jobs PlanCopies::JobsOf(const WriteItem& item) const {
  const WriteItem* const first = writes_.data();
  const std::less<const WriteItem*> is_before;
  if (is_before(&item, first) || !is_before(&item, first + of_write_.size())) return {};
  return of_write_[static_cast<std::size_t>(&item - first)];
}

CopyCast CastOf(const WriteItem& item) {
  if (item.casts.empty()) return {};
  return {item.casts.front().dtype.code, item.casts.back().dtype.code};
}

}  // namespace loadplan
