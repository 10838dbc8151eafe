// Names that write one byte, under each policy.
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/plan/builder_cases.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/status_matchers.h"

namespace loadplan::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// a -> p[0:4], b -> p[2:6].
void TwoThatMeet(LogBuilder& log) {
  const View p = log.Target("p", {6});
  log.Copy(p.Slice(0, 0, 4), log.Source("a", {4}));
  log.Copy(p.Slice(0, 2, 6), log.Source("b", {4}));
}

std::string Overlaps(const LoadPlan& plan) {
  std::string text;
  for (const NameOverlap& overlap : plan.overlaps()) {
    absl::StrAppend(&text, plan.sources()[static_cast<size_t>(overlap.first)].name, " ",
                    plan.sources()[static_cast<size_t>(overlap.second)].name, " ", overlap.nbytes,
                    " of ", NameOf(plan, overlap.storage), "\n");
  }
  return text;
}

struct PolicyCase {
  std::string name;
  std::function<void(LogBuilder&)> records;
  OverlapPolicy policy;
  std::string overlaps;
  std::string plan;
};

std::ostream& operator<<(std::ostream& stream, const PolicyCase& c) { return stream << c.name; }

class OverlapPolicyTest : public ::testing::TestWithParam<PolicyCase> {};

TEST_P(OverlapPolicyTest, GivesThePlan) {
  LogBuilder log;
  GetParam().records(log);
  const absl::StatusOr<LoadPlan> plan = log.Build(GetParam().policy);
  ASSERT_THAT(plan, IsOk());
  EXPECT_EQ(Overlaps(*plan), GetParam().overlaps);
  EXPECT_EQ(Dump(*plan), GetParam().plan);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, OverlapPolicyTest,
    ::testing::ValuesIn(std::vector<PolicyCase>{
        {"FallbackNamesTheOther", TwoThatMeet, OverlapPolicy::kFallback, "a b 2 of p\n",
         "a: fallback, it writes bytes of `p` that `b` writes too\n"
         "b: fallback, it writes bytes of `p` that `a` writes too\n"},
        {"LastWinsClips", TwoThatMeet, OverlapPolicy::kLastWins, "a b 2 of p\n",
         "a: direct\n"
         "  checkpoint 0 -> p: 0 + ():() x 2 <- 0 + ():() x 2\n"
         "b: direct\n"
         "  checkpoint 1 -> p: 2 + ():() x 4 <- 0 + ():() x 4\n"},
        {"LastWinsLeavesNothing",
         [](LogBuilder& log) {
           const View p = log.Target("p", {2});
           log.Copy(p, log.Source("a", {2}));
           log.Copy(p, log.Source("b", {2}));
         },
         OverlapPolicy::kLastWins, "a b 2 of p\n",
         "a: unneeded, every byte that it writes is overwritten by `b`\n"
         "b: direct\n"
         "  checkpoint 1 -> p: 0 + ():() x 2 <- 0 + ():() x 2\n"},
        {"LastWinsInTheOrderOfTheProgram",
         [](LogBuilder& log) {
           const View p = log.Target("p", {2});
           const View a = log.Source("a", {2});
           log.Copy(p, log.Source("b", {2}));
           log.Copy(p, a);
         },
         OverlapPolicy::kLastWins, "a b 2 of p\n",
         "a: direct\n"
         "  checkpoint 0 -> p: 0 + ():() x 2 <- 0 + ():() x 2\n"
         "b: unneeded, every byte that it writes is overwritten by `a`\n"},
        {"LastWinsFallsBackTogether",
         [](LogBuilder& log) {
           TwoThatMeet(log);
           log.input().fallbacks.emplace_back(1, "given");
         },
         OverlapPolicy::kLastWins, "a b 2 of p\n",
         "a: fallback, it shares bytes of `p` with `b`, which goes through the loader\n"
         "b: fallback, given\n"},
        {"BothWaysIsOnePair",
         [](LogBuilder& log) {
           const View p = log.Target("p", {2});
           const View a = log.Source("a", {2});
           log.Copy(p, a);
           log.Copy(p, log.Source("b", {2}));
           log.Copy(p.Slice(0, 0, 1), a.Slice(0, 0, 1));
         },
         OverlapPolicy::kFallback, "a b 3 of p\n",
         "a: fallback, it writes bytes of `p` that `b` writes too\n"
         "b: fallback, it writes bytes of `p` that `a` writes too\n"},
        {"OnePairPerStorage",
         [](LogBuilder& log) {
           const View a = log.Source("a", {2});
           const View b = log.Source("b", {2});
           for (const char* name : {"p", "q"}) {
             const View p = log.Target(name, {2});
             log.Copy(p, a);
             log.Copy(p, b);
           }
         },
         OverlapPolicy::kFallback, "a b 2 of p\na b 2 of q\n",
         "a: fallback, it writes bytes of `p` that `b` writes too\n"
         "b: fallback, it writes bytes of `p` that `a` writes too\n"},
        {"ReadBackIsNone",
         [](LogBuilder& log) {
           const View p = log.Target("p", {2});
           log.Copy(p, log.Source("a", {2}));
           log.Copy(p, log.Node("aten::neg", {p}, {2}));
         },
         OverlapPolicy::kError, "",
         "a: derived, `aten::neg` reads it\n"
         "program 0 -> p: 0 + ():() x 2 <- 0 + ():() x 2\n"
         "aten::neg of a\n"
         "  input 0 + (2):(1) x 1\n"
         "    checkpoint 0 -> input: 0 + ():() x 2 <- 0 + ():() x 2\n"},
        {"SumThatContainsItIsNone",
         [](LogBuilder& log) {
           const View p = log.Target("p", {2});
           log.Copy(p, log.Source("a", {2}));
           log.Copy(p, log.Node("aten::add.Tensor", {p, log.Source("b", {2})}, {2}));
         },
         OverlapPolicy::kError, "",
         "a: derived, `aten::add.Tensor` reads it\n"
         "b: derived, `aten::add.Tensor` reads it\n"
         "program 0 -> p: 0 + ():() x 2 <- 0 + ():() x 2\n"
         "aten::add.Tensor of a b\n"
         "  input 0 + (2):(1) x 1\n"
         "    checkpoint 0 -> input: 0 + ():() x 2 <- 0 + ():() x 2\n"
         "  input 0 + (2):(1) x 1\n"
         "    checkpoint 1 -> input: 0 + ():() x 2 <- 0 + ():() x 2\n"},
        {"InterleavedColumnsAreNone",
         [](LogBuilder& log) {
           const View p = log.Target("p", {2, 4});
           log.Copy(p.Slice(1, 0, 2), log.Source("a", {2, 2}));
           log.Copy(p.Slice(1, 2, 4), log.Source("b", {2, 2}));
         },
         OverlapPolicy::kError, "",
         "a: direct\n"
         "  checkpoint 0 -> p: 0 + (2):(4) x 2 <- 0 + (2):(2) x 2\n"
         "b: direct\n"
         "  checkpoint 1 -> p: 2 + (2):(4) x 2 <- 0 + (2):(2) x 2\n"},
        {"PiecesThatDoNotMeetAreNone",
         [](LogBuilder& log) {
           const View p = log.Target("p", {4});
           const View tmp = log.Temporary({4});
           const View a = log.Source("a", {2});
           log.Copy(tmp.Slice(0, 0, 2), a);
           log.Copy(tmp.Slice(0, 2, 4), log.Constant(0, {2}));
           log.Copy(p, tmp);
           log.Copy(p.Slice(0, 2, 4), log.Source("b", {2}));
         },
         OverlapPolicy::kError, "",
         "a: direct\n"
         "  checkpoint 0 -> p: 0 + ():() x 2 <- 0 + ():() x 2\n"
         "b: direct\n"
         "  checkpoint 1 -> p: 2 + ():() x 2 <- 0 + ():() x 2\n"},
        // The constant beside `a` would land on what `b` left.
        {"NeighboursInOneCopyFallBackTogether",
         [](LogBuilder& log) {
           const View p = log.Target("p", {4});
           const View tmp = log.Temporary({4});
           log.Copy(tmp.Slice(0, 0, 2), log.Source("a", {2}));
           log.Copy(tmp.Slice(0, 2, 4), log.Constant(0, {2}));
           log.Copy(p, tmp);
           log.Copy(p.Slice(0, 2, 4), log.Source("b", {2}));
           log.input().fallbacks.emplace_back(0, "given");
         },
         OverlapPolicy::kLastWins, "",
         "a: fallback, given\n"
         "b: fallback, it shares bytes of `p` with `a`, which goes through the loader\n"},
        {"ZeroedFirstThenFilled",
         [](LogBuilder& log) {
           const View p = log.Target("p", {3, 2});
           log.Copy(p, log.Constant(0, {1}).Select(0, 0).Expand(0, 3).Expand(1, 2));
           log.Copy(p.Select(1, 0), log.Source("a", {3}));
           log.Copy(p.Select(0, 0).Slice(0, 1, 2), log.Source("b", {1}));
         },
         OverlapPolicy::kError, "",
         "a: direct\n"
         "  checkpoint 0 -> p: 0 + (3):(2) x 1 <- 0 + (3):(1) x 1\n"
         "b: direct\n"
         "  checkpoint 1 -> p: 1 + ():() x 1 <- 0 + ():() x 1\n"
         "constant 0 -> p: 3 + (2):(2) x 1 <- 0 + (2):(0) x 1\n"},
    }),
    [](const auto& test) { return test.param.name; });

TEST(OverlapErrorTest, ListsThePairs) {
  LogBuilder log;
  TwoThatMeet(log);
  EXPECT_THAT(log.Build(OverlapPolicy::kError), StatusIs(absl::StatusCode::kInvalidArgument,
                                                         "`a` and `b` both write 2 bytes of `p`"));
}

TEST(OverlapErrorTest, CountsThePairsThatItDoesNotList) {
  LogBuilder log;
  const View p = log.Target("p", {2});
  for (int i = 0; i < 6; ++i) log.Copy(p, log.Source(absl::StrCat("w", i), {2}));
  EXPECT_THAT(log.Build(OverlapPolicy::kError),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("`w0` and `w1` both write 2 bytes of `p`; "),
                             HasSubstr("; and 7 more pairs"), Not(HasSubstr("`w4` and `w5`")))));
}

}  // namespace
}  // namespace loadplan::testing
