// Why names go through the loader: the sentences, and the rule that names which
// one write combines fall back together.
#ifndef LOADPLAN_PLAN_FALLBACK_H_
#define LOADPLAN_PLAN_FALLBACK_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "plan/load_plan.h"
#include "plan/records.h"

namespace loadplan {

// Note [Fallback calls]
//
//   scale.fill_(w.item())     a fallback: an update calls load_weights with `w` alone,
//                             and lands every other name by plan
//
// That is eager only if the two do not meet. So a name joins the fallbacks when the
// call, traced with the fallback names, writes or reads its bytes (a
// `zero_()` at entry, finishing code); when the loader read the live bytes that it
// writes; when it is combined with a fallback name; when it depends on live bytes; and
// when the loader does something else with it once that name is there: see Note [Exploring]
// in plan/pass_writes.h. At update time the call is watched: a byte that it touches and the
// plan writes is an error before it is touched.

// Every reason is a clause that can follow "`name` goes through the loader: ". A name
// keeps the first reason it was given.
std::string RefusedReason(const RefusalRecord& refusal);
std::string IrregularReason(const std::string& target, const absl::Status& status);
std::string UninitialisedReason(const std::string& target);
std::string NotReplayableReason(const std::string& op, const std::string& why);
std::string OverlapReason(const std::string& other, const std::string& target);
std::string LiveReadReason(const std::string& target);
std::string CalledOverReason(const std::string& target);
std::string NotExploredReason(const std::string& error);
inline constexpr std::string_view kTreatedOtherwiseReason =
    "the loader does something else with it once names that go through the loader are there";
inline constexpr std::string_view kNamelessOtherwise =
    "the loader writes bytes with no name behind them otherwise once names that go through the "
    "loader are there";
inline constexpr std::string_view kOtherOrderReason =
    "the loader writes the same bytes more than once, in another order once names that go through "
    "the loader are there";
std::string SteersReason(const std::string& target);
std::string UnfollowedReadReason(const absl::Status& status);
inline constexpr std::string_view kOverwrittenByNothingNamed =
    "a fallback name's bytes are overwritten later by a constant or by live bytes, in an order "
    "that only one whole call of the loader keeps";
inline constexpr std::string_view kNotInCall =
    "the loader writes a fallback name's bytes in the turn of another name, so that only one whole "
    "call of it does that";
inline constexpr std::string_view kOnlyInCall =
    "a call of the loader with the fallback names alone writes bytes that it does not write with "
    "all names";
inline constexpr std::string_view kOtherOrderInCall =
    "the loader writes the same bytes more than once, in an order that only one whole call of it "
    "keeps";
inline constexpr std::string_view kNamelessLiveRead =
    "live bytes are copied or computed from by themselves, and what they hold is unknown once a "
    "name goes through the loader";

// The names that fall back, with a reason each.
//
// Example: Add(0, "..."); AddGroup({0, 1}, "`aten::mul` combines it with"); after
// Propagate name 1 falls back because "`aten::mul` combines it with `a`, which goes
// through the loader".
class FallbackSet {
 public:
  explicit FallbackSet(const std::vector<SourceTensor>& sources)
      : sources_(sources), is_fallback_(sources.size()) {}

  void Add(std::int32_t name, std::string reason);
  void AddAll(std::span<const std::int32_t> names, const std::string& reason);
  void AddEveryName(const std::string& reason);
  // From now on all of `names` or none of them fall back. `why` precedes the name of
  // the one that fell back first.
  void AddGroup(std::vector<std::int32_t> names, std::string why);
  // Makes the groups true.
  void Propagate();

  bool Contains(std::int32_t name) const { return is_fallback_[static_cast<std::size_t>(name)]; }
  bool ContainsAnyOf(std::span<const std::int32_t> names) const;
  bool empty() const { return reasons_.empty(); }
  std::size_t size() const { return reasons_.size(); }
  // Of a name that it contains.
  std::string& reason(std::int32_t name) { return reasons_.at(name); }

 private:
  struct Group {
    std::vector<std::int32_t> names;
    std::string why;
  };

  const std::vector<SourceTensor>& sources_;
  std::vector<bool> is_fallback_;
  absl::flat_hash_map<std::int32_t, std::string> reasons_;
  std::vector<Group> groups_;
};

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_FALLBACK_H_
