#include "lifecycle/update_checks.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lifecycle/arrival.h"

namespace loadplan {
namespace {

constexpr std::size_t kNamesInMessage = 10;

}  // namespace

absl::Status CheckRequired(const LoadPlan& plan, std::span<const std::string> required) {
  for (const std::string& pattern : required) {
    const auto& targets = plan.targets();
    const bool matches = std::ranges::any_of(
        targets, [&](const TargetTensor& target) { return MatchesPattern(pattern, target.name); });
    if (!matches) {
      return absl::InvalidArgumentError(
          absl::StrCat("`required` pattern `", pattern, "` names no target; correct it"));
    }
  }
  // What a fallback covers is seen only by its loader.
  if (plan.has_fallbacks()) return absl::OkStatus();
  std::vector<std::string> bare;
  for (const UncoveredTarget& uncovered : plan.uncovered()) {
    const std::string& name = plan.targets()[static_cast<std::size_t>(uncovered.target)].name;
    if (uncovered.nbytes == 0) continue;
    const bool is_wanted = std::ranges::any_of(
        required, [&](const std::string& pattern) { return MatchesPattern(pattern, name); });
    if (!is_wanted) continue;
    bare.push_back(absl::StrCat("`", name, "` (", uncovered.nbytes, " of ", uncovered.total_nbytes,
                                " bytes)"));
  }
  if (bare.empty()) return absl::OkStatus();
  const std::size_t count = bare.size();
  if (count > kNamesInMessage) bare.resize(kNamesInMessage);
  return absl::FailedPreconditionError(absl::StrCat(
      "the plan leaves ", count, " required target(s) without bytes: ", absl::StrJoin(bare, ", "),
      count > bare.size() ? ", ..." : "",
      "; declare the checkpoint tensors that fill them, or do not require them"));
}

// A new update must write at least the bytes that the failed one left undefined. Counted per
// target: what the failed plan left alone, the new one may leave alone too.
absl::Status CheckUndefined(const LoadPlan& plan, const UndefinedTargets& undefined) {
  if (undefined.empty() || plan.has_fallbacks()) return absl::OkStatus();
  absl::flat_hash_map<std::string_view, Index> uncovered;
  for (const UncoveredTarget& item : plan.uncovered()) {
    uncovered[plan.targets()[static_cast<std::size_t>(item.target)].name] = item.nbytes;
  }
  absl::flat_hash_set<std::string_view> names;
  for (const TargetTensor& target : plan.targets()) names.insert(target.name);
  for (const auto& [name, allowed] : undefined) {
    const auto found = uncovered.find(name);
    const Index left = found == uncovered.end() ? 0 : found->second;
    if (names.contains(name) && left <= allowed) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("a failed update left bytes of `", name,
                     "` undefined, and this plan does not write them all; use the plan of the "
                     "failed update, or one that covers as much"));
  }
  return absl::OkStatus();
}

absl::Status CheckWhole(const LoadPlan& plan, std::span<const std::int32_t> partial) {
  const auto name_of = [&](std::int32_t entry) -> const std::string& {
    return plan.sources()[static_cast<std::size_t>(entry)].name;
  };
  for (const Program& program : plan.programs()) {
    const auto is_listed = [&](std::int32_t name) {
      return std::ranges::binary_search(partial, name);
    };
    const auto listed = std::ranges::find_if(program.names, is_listed);
    const auto left_out = std::ranges::find_if_not(program.names, is_listed);
    if (listed == program.names.end() || left_out == program.names.end()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("`partial` lists `", name_of(*listed), "` without `", name_of(*left_out),
                     "`, with which `", program.op, "` combines it; send both or neither"));
  }
  return absl::OkStatus();
}

}  // namespace loadplan
