#include "plan/landings.h"

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/status_matchers.h"

namespace loadplan::testing {
namespace {

std::string Text(const std::vector<Box>& boxes) {
  std::string text;
  for (const Box& box : boxes) absl::StrAppend(&text, text.empty() ? "" : " ", ToString(box));
  return text;
}

// `[0:2] -> p [2:4]`, one a line; `~` where the boxes are hulls.
std::string Text(const LoadPlan& plan) {
  std::string text;
  for (const Landing& landing : LandingsOf(plan)) {
    absl::StrAppend(&text, text.empty() ? "" : "\n", Text(landing.from), " -> ",
                    plan.targets()[static_cast<std::size_t>(landing.target)].name, " ",
                    Text(landing.to), landing.is_hull ? " ~" : "",
                    landing.is_transposed ? " transposed" : "",
                    landing.is_reversed ? " reversed" : "", landing.is_repeated ? " repeated" : "");
  }
  return text;
}

struct LandingCase {
  std::string name;
  std::function<void(LogBuilder&)> records;
  std::string text;
};
std::ostream& operator<<(std::ostream& stream, const LandingCase& c) { return stream << c.name; }

class LandingsTest : public ::testing::TestWithParam<LandingCase> {};

TEST_P(LandingsTest, SaysWhichBoxLandsWhere) {
  LogBuilder log;
  GetParam().records(log);
  const absl::StatusOr<LoadPlan> plan = log.Build(OverlapPolicy::kLastWins);
  ASSERT_THAT(plan, IsOk());
  EXPECT_EQ(Text(*plan), GetParam().text);
}

INSTANTIATE_TEST_SUITE_P(
    , LandingsTest,
    ::testing::Values(
        LandingCase{"rows_of_a_fused_matrix",
                    [](LogBuilder& log) {
                      const View p = log.Target("p", {6, 3}, kFloat32);
                      log.Copy(p.Slice(0, 0, 4), log.Source("q", {8, 3}, kFloat32).Slice(0, 4, 8));
                      log.Copy(p.Slice(0, 4, 6), log.Source("k", {2, 3}, kFloat32));
                    },
                    "[4:8, 0:3] -> p [0:4, 0:3]\n[0:2, 0:3] -> p [4:6, 0:3]"},
        LandingCase{"a_transpose",
                    [](LogBuilder& log) {
                      log.Copy(log.Target("p", {2, 3}), log.Source("w", {3, 2}).Transpose(0, 1));
                    },
                    "[0:3, 0:2] -> p [0:2, 0:3] transposed"},
        LandingCase{"a_row_over_all_rows_backwards",
                    [](LogBuilder& log) {
                      const View w = log.Source("w", {3});
                      log.Copy(log.Target("p", {2, 3}), w.With(2, {2, 3}, {0, -1}));
                    },
                    "[0:3] -> p [0:2, 0:3] transposed reversed repeated"},
        LandingCase{"a_flat_range_of_rows",
                    [](LogBuilder& log) {
                      const View w = log.Source("w", {3, 4});
                      log.Copy(log.Target("p", {8}), w.Reshape({12}).Slice(0, 2, 10));
                    },
                    "[0:1, 2:4] [1:2, 0:4] [2:3, 0:2] -> p [0:8]"},
        LandingCase{"a_cast_and_a_constant",
                    [](LogBuilder& log) {
                      const View p = log.Target("p", {4}, kFloat32);
                      log.Copy(p.Slice(0, 0, 3), log.Source("w", {3}, kBFloat16));
                      log.Copy(p.Slice(0, 3, 4), log.Constant(0, {1}, kFloat32));
                    },
                    "[0:3] -> p [0:3]\n -> p [3:4]"},
        LandingCase{"columns",
                    [](LogBuilder& log) {
                      const View s = log.Target("s", {3, 2});
                      log.Copy(s.Slice(1, 0, 1), log.Source("w", {3, 1}));
                    },
                    "[0:3, 0:1] -> s [0:3, 0:1]"},
        LandingCase{"the_name_that_shows_the_bytes",
                    [](LogBuilder& log) {
                      const View all = log.Target("head", {8});
                      log.input().targets[0].layout = all.Slice(0, 0, 4).layout;
                      log.Alias("tail", all.Slice(0, 4, 8));
                      log.Copy(all.Slice(0, 5, 7), log.Source("w", {2}));
                    },
                    "[0:2] -> tail [1:3]"},
        LandingCase{"a_target_that_is_not_row_major",
                    [](LogBuilder& log) {
                      const View all = log.Target("t", {6});
                      const View turned = all.Reshape({2, 3}).Transpose(0, 1);
                      log.input().targets[0].layout = turned.layout;
                      log.Copy(turned, log.Source("w", {3, 2}));
                    },
                    "[0:3, 0:2] -> t [0:3, 0:2] ~ transposed"}),
    [](const auto& param_info) { return param_info.param.name; });

}  // namespace
}  // namespace loadplan::testing
