#include "plan/fallback.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"

namespace loadplan {

std::string RefusedReason(const RefusalRecord& refusal) {
  return absl::StrCat("`", refusal.op, "`: ", refusal.reason,
                      refusal.where.empty() ? "" : absl::StrCat(" (", refusal.where, ")"));
}

std::string IrregularReason(const std::string& target, const absl::Status& status) {
  return absl::StrCat("a copy into `", target, "` cannot be planned: ",
                      std::string(status.message().data(), status.message().size()));
}

std::string UninitialisedReason(const std::string& target) {
  return absl::StrCat("a copy into `", target, "` combines it with uninitialised memory");
}

std::string NotReplayableReason(const std::string& op, const std::string& why) {
  return absl::StrCat("`", op, "` cannot be replayed: ", why);
}

std::string OverlapReason(const std::string& other, const std::string& target) {
  return absl::StrCat("it writes bytes of `", target, "` that `", other, "` writes too");
}

std::string LiveReadReason(const std::string& target) {
  return absl::StrCat("a write into `", target,
                      "` combines it with live bytes, which are unknown once another name goes "
                      "through the loader");
}

std::string CalledOverReason(const std::string& target) {
  return absl::StrCat("a call of the loader without it touches the bytes of `", target,
                      "` that it writes");
}

std::string NotExploredReason(const std::string& error) {
  return absl::StrCat(
      "what the loader does once names that go through the loader are there is not known: with "
      "values made up for them it raises ",
      error);
}

std::string SteersReason(const std::string& target) {
  return absl::StrCat("the loader looks at the bytes of `", target,
                      "` that it writes, as the update before left them");
}

std::string UnfollowedReadReason(const absl::Status& status) {
  return absl::StrCat("the loader looks at bytes that cannot be followed: ",
                      std::string(status.message().data(), status.message().size()));
}

void FallbackSet::Add(std::int32_t name, std::string reason) {
  const auto n = static_cast<size_t>(name);
  if (is_fallback_[n]) return;
  is_fallback_[n] = true;
  reasons_.emplace(name, std::move(reason));
}

void FallbackSet::AddAll(std::span<const std::int32_t> names, const std::string& reason) {
  for (const std::int32_t name : names) Add(name, reason);
}

void FallbackSet::AddEveryName(const std::string& reason) {
  for (size_t n = 0; n < is_fallback_.size(); ++n) Add(static_cast<std::int32_t>(n), reason);
}

void FallbackSet::AddGroup(std::vector<std::int32_t> names, std::string why) {
  if (names.size() > 1) groups_.push_back({std::move(names), std::move(why)});
}

bool FallbackSet::ContainsAnyOf(std::span<const std::int32_t> names) const {
  return std::any_of(names.begin(), names.end(),
                     [this](std::int32_t name) { return Contains(name); });
}

void FallbackSet::Propagate() {
  if (groups_.empty() || empty()) return;
  std::vector<std::vector<std::int32_t>> groups_of(is_fallback_.size());
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (const std::int32_t name : groups_[g].names) {
      groups_of[static_cast<size_t>(name)].push_back(static_cast<std::int32_t>(g));
    }
  }
  std::vector<std::int32_t> pending;
  for (size_t n = 0; n < is_fallback_.size(); ++n) {
    if (is_fallback_[n] && !groups_of[n].empty()) pending.push_back(static_cast<std::int32_t>(n));
  }
  // Each group is spread once: afterwards all its names are in.
  std::vector<bool> is_spread(groups_.size());
  for (size_t next = 0; next < pending.size(); ++next) {
    const auto culprit = static_cast<size_t>(pending[next]);
    for (const std::int32_t g : groups_of[culprit]) {
      if (is_spread[static_cast<size_t>(g)]) continue;
      is_spread[static_cast<size_t>(g)] = true;
      const Group& group = groups_[static_cast<size_t>(g)];
      for (const std::int32_t name : group.names) {
        if (Contains(name)) continue;
        Add(name, absl::StrCat(group.why, " `", sources_[culprit].name,
                               "`, which goes through the loader"));
        pending.push_back(name);
      }
    }
  }
}

}  // namespace loadplan
