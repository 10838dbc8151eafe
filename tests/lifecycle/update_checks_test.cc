#include "lifecycle/update_checks.h"

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/lifecycle/live_log.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using ::loadplan::testing::IsOk;
using ::loadplan::testing::LiveLog;
using ::loadplan::testing::StatusIs;
using ::loadplan::testing::View;
using ::testing::AllOf;
using ::testing::HasSubstr;

// `w` is covered by `x`, of `v` one row of two is.
std::shared_ptr<const BoundPlan> HalfCovered() {
  LiveLog log;
  const View w = log.Target("layers.0.w", {2});
  const View v = log.Target("layers.0.v", {2, 4});
  log.Copy(w, log.Source("x", {2}));
  log.Copy(v.Slice(0, 0, 1), log.Source("y", {1, 4}));
  return log.Bind().value();
}

TEST(CheckRequiredTest, AcceptsWhatIsCovered) {
  const std::vector<std::string> required = {"*.w"};
  EXPECT_THAT(CheckRequired(*HalfCovered()->traced, required), IsOk());
}

TEST(CheckRequiredTest, NamesWhatIsNot) {
  const std::vector<std::string> required = {"layers.*"};
  EXPECT_THAT(CheckRequired(*HalfCovered()->traced, required),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("1 required target(s) are left without bytes"),
                             HasSubstr("`layers.0.v` (16 of 32 bytes)"))));
}

TEST(CheckRequiredTest, NamesTenAndCountsTheOthers) {
  LiveLog log;
  for (int i = 0; i < 12; ++i) log.Target(absl::StrCat("w", i), {2});
  EXPECT_THAT(CheckRequired(*log.Bind().value()->traced, std::vector<std::string>{"*"}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("12 required target(s) are left without bytes: `w0` (8 of "),
                             HasSubstr("`w9` (8 of 8 bytes) and 2 more; declare"))));
}

TEST(CheckRequiredTest, RefusesAPatternThatNamesNothing) {
  const std::vector<std::string> required = {"layer.*"};
  EXPECT_THAT(CheckRequired(*HalfCovered()->traced, required),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("`layer.*` names no target")));
}

TEST(CheckRequiredTest, BytesOfAFallbackAreMissedOnlyWhereATraceShowsThem) {
  const auto bound = HalfCovered();
  LiveLog log;
  log.Target("w", {2});
  const View v = log.Target("v", {2});
  log.Copy(v, log.Source("x", {2}));
  log.log().input().fallbacks.emplace_back(0, "it reads a value");
  const auto with_fallback = log.Bind().value();
  const std::vector<std::string> required = {"w"};
  EXPECT_THAT(CheckRequired(*with_fallback->traced, required), IsOk());
  WrittenBytes written = WrittenBytes::OfPlan(with_fallback->plan());
  const auto& targets = with_fallback->plan().targets();
  EXPECT_THAT(CheckRequiredWritten(targets, written, required),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("`w` (8 of 8 bytes)")));
  written.Add(0, StridedLayout::Unchecked(0, {4}, {1}, 1));
  EXPECT_THAT(CheckRequiredWritten(targets, written, required),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("`w` (4 of 8 bytes)")));
  written.Add(0, StridedLayout::Unchecked(4, {4}, {1}, 1));
  EXPECT_THAT(CheckRequiredWritten(targets, written, required), IsOk());
}

TEST(CheckWholeTest, WantsAllNamesOfAProgramOrNone) {
  LiveLog log;
  const View w = log.Target("w", {2});
  const View v = log.Target("v", {2});
  const View a = log.Source("a", {2});
  const View b = log.Source("b", {2});
  log.Copy(w, log.Multiply(a, b));
  log.Copy(v, log.Source("c", {2}));
  const auto bound = log.Bind().value();
  EXPECT_THAT(CheckWhole(bound->plan(), std::vector<std::int32_t>{2}), IsOk());
  EXPECT_THAT(CheckWhole(bound->plan(), std::vector<std::int32_t>{0, 1}), IsOk());
  EXPECT_THAT(CheckWhole(bound->plan(), std::vector<std::int32_t>{1, 2}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("`b` without `a`, with which `aten::mul.Tensor`")));
}

}  // namespace
}  // namespace loadplan
