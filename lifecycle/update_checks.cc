#include "lifecycle/update_checks.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lifecycle/arrival.h"
#include "lifecycle/listed.h"

namespace loadplan {
namespace {

bool MatchesAny(std::span<const std::string> patterns, const std::string& name) {
  return std::ranges::any_of(
      patterns, [&](const std::string& pattern) { return MatchesPattern(pattern, name); });
}

// `bare`: each a target with its bytes.
absl::Status Bare(const std::vector<std::string>& bare) {
  if (bare.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(bare.size(), " required target(s) are left without bytes: ", Listed(bare),
                   "; declare the checkpoint tensors that fill them, or do not require them"));
}

std::string BareText(const std::string& name, Index nbytes, Index total_nbytes) {
  return absl::StrCat("`", name, "` (", nbytes, " of ", total_nbytes, " bytes)");
}

}  // namespace

absl::Status CheckRequired(const TracedPlan& traced, std::span<const std::string> required) {
  const LoadPlan& plan = traced.plan;
  for (const std::string& pattern : required) {
    const bool matches = std::ranges::any_of(
        plan.declared_targets(),
        [&](const TargetTensor& target) { return MatchesPattern(pattern, target.name); });
    if (!matches) {
      return absl::InvalidArgumentError(
          absl::StrCat("`required` pattern `", pattern, "` names no target; correct it"));
    }
  }
  if (plan.has_fallbacks() && !traced.every_name_is_traced) return absl::OkStatus();
  std::vector<std::string> bare;
  for (const UncoveredTarget& uncovered : plan.uncovered()) {
    const std::string& name = plan.targets()[static_cast<std::size_t>(uncovered.target)].name;
    if (uncovered.nbytes == 0 || !MatchesAny(required, name)) continue;
    bare.push_back(BareText(name, uncovered.nbytes, uncovered.total_nbytes));
  }
  return Bare(bare);
}

absl::Status CheckRequiredWritten(std::span<const TargetTensor> targets,
                                  const WrittenBytes& written,
                                  std::span<const std::string> required) {
  std::vector<TargetTensor> wanted;
  std::ranges::copy_if(targets, std::back_inserter(wanted), [&](const TargetTensor& target) {
    return MatchesAny(required, target.name);
  });
  std::vector<std::string> bare;
  for (const TargetBytes& target : written.PerTarget(wanted)) {
    const Index left = target.total_nbytes - target.nbytes;
    if (left > 0) bare.push_back(BareText(target.name, left, target.total_nbytes));
  }
  return Bare(bare);
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
