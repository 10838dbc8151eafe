#include "lifecycle/undefined_bytes.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "geometry/overlap.h"
#include "plan/coverage.h"

namespace loadplan {
namespace {

// All names of each storage: another plan may show them in another order.
absl::flat_hash_map<StorageId, std::vector<std::string>> NamesOf(
    std::span<const TargetTensor> targets) {
  absl::flat_hash_map<StorageId, std::vector<std::string>> names;
  for (const TargetTensor& target : targets) names[target.storage].push_back(target.name);
  return names;
}

Index UntouchedOf(const std::vector<StridedLayout>& layouts,
                  std::span<const StridedLayout> regions) {
  const std::vector<Index> untouched = UntouchedNbytes(layouts, {regions.begin(), regions.end()});
  return std::accumulate(untouched.begin(), untouched.end(), Index{0});
}

}  // namespace

void UndefinedBytes::Clear() {
  regions_.clear();
  told_.clear();
  per_target_.clear();
}

void UndefinedBytes::Add(std::span<const TargetTensor> targets, const WrittenBytes& written) {
  for (const auto& [storage, names] : NamesOf(targets)) {
    const std::span<const StridedLayout> added = written.Of(storage);
    if (added.empty()) continue;
    const auto known = std::ranges::find_if(
        names, [this](const std::string& name) { return regions_.contains(name); });
    std::vector<StridedLayout>& regions = regions_[known == names.end() ? names.front() : *known];
    const std::vector<StridedLayout> before = regions;
    for (const StridedLayout& region : added) {
      // A model that fails again and again must not grow the list.
      if (before.empty() || UntouchedOf({region}, before) > 0) regions.push_back(region);
    }
  }
  WrittenBytes all;
  for (const TargetTensor& target : targets) {
    const auto found = regions_.find(target.name);
    if (found == regions_.end()) continue;
    for (const StridedLayout& region : found->second) all.Add(target.storage, region);
  }
  Tell(all.PerTarget(targets));
}

void UndefinedBytes::AddTold(std::span<const LiveTarget> tensors, bool is_readable) {
  for (const auto& [name, tensor, is_mirror] : tensors) {
    if (!tensor.has_storage() || tensor.is_meta() || tensor.numel() == 0) continue;
    // Padding around the tensor, too.
    const auto all = static_cast<Index>(tensor.storage().nbytes());
    // Fewer bytes than elements where a tensor repeats itself (`expand`).
    const Index nbytes = std::min(static_cast<Index>(tensor.nbytes()), all);
    const auto [found, is_new] =
        told_.try_emplace(name, Told{{name, nbytes, nbytes, {{0, all}}}, is_readable});
    if (!is_new) found->second.is_readable = found->second.is_readable && is_readable;
  }
  Tell(std::exchange(per_target_, {}));
}

void UndefinedBytes::Tell(std::vector<TargetBytes> loaded) {
  std::erase_if(loaded, [&](const TargetBytes& target) {
    return target.nbytes == 0 || told_.contains(target.name);
  });
  per_target_ = std::move(loaded);
  for (const auto& [name, told] : told_) per_target_.push_back(told.bytes);
  std::ranges::sort(per_target_, {}, &TargetBytes::name);
}

absl::Status UndefinedBytes::CheckCovered(std::span<const TargetTensor> targets,
                                          const WrittenBytes& written) const {
  absl::flat_hash_map<std::string_view, StorageId> storage_of;
  for (const TargetTensor& target : targets) storage_of.emplace(target.name, target.storage);
  for (const auto& [name, regions] : regions_) {
    const auto found = storage_of.find(name);
    if (found != storage_of.end() && UntouchedOf(regions, written.Of(found->second)) == 0) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("a failed update left bytes of `", name,
                     "` undefined, and this plan does not write them all; use the plan of the "
                     "failed update, or one that covers as much"));
  }
  return absl::OkStatus();
}

absl::Status UndefinedBytes::CheckNotRead(const LoadPlan& plan) const {
  if (empty()) return absl::OkStatus();
  const auto names = NamesOf(plan.targets());
  absl::Status status;
  const auto check = [&](const WriteItem& item) {
    if (item.origin.kind != OriginKind::kLiveBefore || !status.ok()) return;
    const ByteRange span = item.map.FromSpan();
    const StridedLayout read =
        StridedLayout::Unchecked(span.start, {std::max<Index>(span.nbytes(), 0)}, {1}, 1);
    for (const std::string& name : names.at(item.origin.index)) {
      const auto found = regions_.find(name);
      const bool meets = found != regions_.end() &&
                         std::ranges::any_of(found->second, [&](const StridedLayout& region) {
                           return MayShareBytes(region, read);
                         });
      const auto told = told_.find(name);
      if (!meets && (told == told_.end() || told->second.is_readable)) continue;
      status = absl::FailedPreconditionError(
          absl::StrCat("this plan computes from the bytes that `", name,
                       "` held before, which a failed update left undefined; load the model anew"));
      return;
    }
  };
  for (const WriteItem& item : plan.live_copies()) check(item);
  for (const Program& program : plan.programs()) {
    for (const ProgramInput& input : program.inputs) {
      for (const WriteItem& piece : input.pieces) check(piece);
    }
  }
  return status;
}

}  // namespace loadplan
