// What keeps the plan and a call of the loader with the fallback names apart. See Note
// [Fallback calls] in plan/fallback.h.
#include <functional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/plan/builder_cases.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/status_matchers.h"

namespace loadplan::testing {
namespace {

using ::testing::HasSubstr;

// w -> p and f -> q; `f` goes through the loader.
struct Two {
  explicit Two(LogBuilder& log)
      : p(log.Target("p", {4})),
        q(log.Target("q", {2})),
        w(log.Source("w", {4})),
        f(log.Source("f", {2})) {
    log.Copy(p, w);
    log.Copy(q, f);
    log.input().fallbacks.emplace_back(1, "given");
  }

  View p, q, w, f;
};

void Touch(LogBuilder& log, const View& view) {
  if (!log.input().fallback_call) log.input().fallback_call.emplace();
  log.input().fallback_call->touched.push_back({view.storage, view.layout, view.dtype});
}

void Answer(LogBuilder& log, const View& view) {
  log.input().log.answered.push_back({{view.storage, view.layout, view.dtype}, log.now()});
}

class BuilderFallbackCallTest : public ::testing::TestWithParam<BuilderCase> {};

TEST_P(BuilderFallbackCallTest, GivesThePlan) { CheckPlan(GetParam()); }

constexpr const char* kPlanned =
    "w: direct\n"
    "  checkpoint 0 -> p: 0 + ():() x 4 <- 0 + ():() x 4\n"
    "f: fallback, given\n";

// A pass with all names: `records` after those of Two.
std::vector<PassWrite> Round(const std::function<void(LogBuilder&, const Two&)>& records) {
  LogBuilder log;
  const Two two(log);
  records(log, two);
  return WritesOfPass(log.input().log, {});
}

void Explore(LogBuilder& log, const std::function<void(LogBuilder&, const Two&)>& records) {
  if (!log.input().exploration) log.input().exploration.emplace();
  log.input().exploration->rounds.push_back(Round(records));
}

INSTANTIATE_TEST_SUITE_P(
    Explored, BuilderFallbackCallTest,
    ::testing::ValuesIn(std::vector<BuilderCase>{
        {"AsInThePassWithoutIt",
         [](LogBuilder& log) {
           const Two two(log);
           Explore(log, [](LogBuilder&, const Two&) {});
         },
         kPlanned},
        {"ANameThatIsCombinedOnceItsPartnerIsThere",
         [](LogBuilder& log) {
           const Two two(log);
           log.Source("h", {2});
           Explore(log, [](LogBuilder& with, const Two& all) {
             const View h = with.Source("h", {2});
             const View pair = with.Temporary({2});
             with.Copy(pair.Slice(0, 0, 1), all.f.Slice(0, 0, 1));
             with.Copy(pair.Slice(0, 1, 2), h.Slice(0, 0, 1));
             with.Copy(all.q, pair);
           });
         },
         std::string(kPlanned) +
             "h: fallback, the loader does something else with it once names that go through the "
             "loader are there\n"},
        {"InOneOfTwoRounds",
         [](LogBuilder& log) {
           const Two two(log);
           Explore(log, [](LogBuilder&, const Two&) {});
           Explore(log, [](LogBuilder& with, const Two& all) {
             with.Copy(all.q, all.w.Slice(0, 0, 2));
           });
         },
         "w: fallback, the loader does something else with it once names that go through the "
         "loader are there\n"
         "f: fallback, given\n"},
        {"AnotherOperator",
         [](LogBuilder& log) {
           const Two two(log);
           log.Copy(two.p, log.Node("aten::neg", {two.p}, {4}));
           Explore(log, [](LogBuilder& with, const Two& all) {
             with.Copy(all.p, with.Node("aten::exp", {all.p}, {4}));
           });
         },
         "w: fallback, the loader does something else with it once names that go through the "
         "loader are there\n"
         "f: fallback, given\n"},
        {"AConstantThatIsNotWrittenThen",
         [](LogBuilder& log) {
           const Two two(log);
           log.Copy(two.q, log.Constant(0, {2}));
           Explore(log, [](LogBuilder&, const Two&) {});
         },
         "w: fallback, the loader writes bytes with no name behind them otherwise once names that "
         "go through the loader are there\n"
         "f: fallback, given\n"},
        {"AConstantThatTheCallAloneDoesNotWrite",
         [](LogBuilder& log) {
           const Two two(log);
           Explore(log, [](LogBuilder& with, const Two& all) {
             with.Copy(all.q, with.Constant(0, {2}));
           });
           FallbackCall& call = log.input().fallback_call.emplace();
           call.names = {1};
           call.rounds.push_back(Round([](LogBuilder&, const Two&) {}));
         },
         "w: fallback, the loader writes a fallback name's bytes in the turn of another name, so "
         "that only one whole call of it does that\n"
         "f: fallback, given\n"},
        {"AConstantThatTheCallWrites",
         [](LogBuilder& log) {
           const Two two(log);
           Explore(log, [](LogBuilder& with, const Two& all) {
             with.Copy(all.q, with.Constant(0, {2}));
           });
           FallbackCall& call = log.input().fallback_call.emplace();
           call.names = {1};
           call.rounds.push_back(Round(
               [](LogBuilder& with, const Two& all) { with.Copy(all.q, with.Constant(0, {2})); }));
         },
         kPlanned},
        {"TwoHalvesOfAnotherNameInAnotherOrder",
         [](LogBuilder& log) {
           const Two two(log);
           const View v = log.Source("v", {8});
           const View r = log.Target("r", {4});
           log.Copy(r, v.Slice(0, 0, 4));
           log.Copy(r, v.Slice(0, 4, 8));
           Explore(log, [](LogBuilder& with, const Two&) {
             const View half = with.Source("v", {8});
             const View to = with.Target("r", {4});
             with.Copy(to, half.Slice(0, 4, 8));
             with.Copy(to, half.Slice(0, 0, 4));
           });
         },
         std::string(kPlanned) +
             "v: fallback, the loader writes the same bytes more than once, in another order once "
             "names that go through the loader are there\n"},
        {"HalvesThatShareNothingInAnotherOrder",
         [](LogBuilder& log) {
           const Two two(log);
           const View v = log.Source("v", {2});
           const View r = log.Target("r", {2});
           log.Copy(r.Slice(0, 0, 1), v.Slice(0, 0, 1));
           log.Copy(r.Slice(0, 1, 2), v.Slice(0, 1, 2));
           Explore(log, [](LogBuilder& with, const Two&) {
             const View half = with.Source("v", {2});
             const View to = with.Target("r", {2});
             with.Copy(to.Slice(0, 1, 2), half.Slice(0, 1, 2));
             with.Copy(to.Slice(0, 0, 1), half.Slice(0, 0, 1));
           });
         },
         std::string(kPlanned) + "v: direct\n"
                                 "  checkpoint 2 -> r: 0 + ():() x 1 <- 0 + ():() x 1\n"
                                 "  checkpoint 2 -> r: 1 + ():() x 1 <- 1 + ():() x 1\n"},
        {"AWriteAndAConstantInAnotherOrder",
         [](LogBuilder& log) {
           const Two two(log);
           const View v = log.Source("v", {2});
           const View r = log.Target("r", {2});
           log.Copy(r, log.Constant(0, {2}));
           log.Copy(r, v);
           Explore(log, [](LogBuilder& with, const Two&) {
             const View late = with.Source("v", {2});
             const View to = with.Target("r", {2});
             with.Copy(to, late);
             with.Copy(to, with.Constant(0, {2}));
           });
         },
         std::string(kPlanned) +
             "v: fallback, the loader writes the same bytes more than once, in another order once "
             "names that go through the loader are there\n"},
        {"TwoConstantsInAnotherOrder",
         [](LogBuilder& log) {
           const Two two(log);
           const View r = log.Target("r", {2});
           log.Copy(r, log.Constant(0, {2}));
           log.Copy(r, log.Constant(1, {2}));
           Explore(log, [](LogBuilder& with, const Two&) {
             const View to = with.Target("r", {2});
             with.Copy(to, with.Constant(1, {2}));
             with.Copy(to, with.Constant(0, {2}));
           });
         },
         "w: fallback, the loader writes the same bytes more than once, in another order once "
         "names that go through the loader are there\n"
         "f: fallback, given\n"},
        {"TheCallAloneKeepsAnotherOrder",
         [](LogBuilder& log) {
           const Two two(log);
           const auto constant_last = [](LogBuilder& with, const Two& all) {
             with.Copy(all.q, with.Constant(0, {2}));
           };
           Explore(log, constant_last);
           FallbackCall& call = log.input().fallback_call.emplace();
           call.names = {1};
           LogBuilder with;
           const Two all(with);
           constant_last(with, all);
           with.input().log.copies = {with.input().log.copies[2], with.input().log.copies[1]};
           call.rounds.push_back(WritesOfPass(with.input().log, {}));
         },
         "w: fallback, the loader writes the same bytes more than once, in an order that only one "
         "whole call of it keeps\n"
         "f: fallback, given\n"},
        {"AConstantOverACallsBytesInTheTurnOfAnotherName",
         [](LogBuilder& log) {
           const Two two(log);
           // The pass of the plan: a constant, and `f` over it. The round: the other way round.
           log.input().log.copies.pop_back();
           log.Copy(two.q, log.Constant(0, {2}));
           log.Copy(two.q, two.f);
           Explore(log, [](LogBuilder& with, const Two& all) {
             with.Copy(all.q, with.Constant(0, {2}));
           });
           FallbackCall& call = log.input().fallback_call.emplace();
           call.names = {1};
           call.rounds.push_back(Round([](LogBuilder&, const Two&) {}));
         },
         "w: fallback, the loader writes the same bytes more than once, in an order that only one "
         "whole call of it keeps\n"
         "f: fallback, given\n"},
        {"BytesThatOnlyTheCallAloneWrites",
         [](LogBuilder& log) {
           const Two two(log);
           Explore(log, [](LogBuilder&, const Two&) {});
           FallbackCall& call = log.input().fallback_call.emplace();
           call.names = {1};
           call.rounds.push_back(Round(
               [](LogBuilder& with, const Two& all) { with.Copy(all.q, with.Constant(0, {2})); }));
         },
         "w: fallback, a call of the loader with the fallback names alone writes bytes that it "
         "does not write with all names\n"
         "f: fallback, given\n"},
        {"NoValuesSatisfiedTheLoader",
         [](LogBuilder& log) {
           const Two two(log);
           log.input().exploration.emplace().error = "ValueError: no";
         },
         "w: fallback, what the loader does once names that go through the loader are there is not "
         "known: with values made up for them it raises ValueError: no\n"
         "f: fallback, given\n"},
    }),
    CaseName);

INSTANTIATE_TEST_SUITE_P(
    Touched, BuilderFallbackCallTest,
    ::testing::ValuesIn(std::vector<BuilderCase>{
        {"ItsOwnBytesOnly",
         [](LogBuilder& log) {
           const Two two(log);
           Touch(log, two.q);
         },
         kPlanned},
        {"OneByteOfAnother",
         [](LogBuilder& log) {
           const Two two(log);
           Touch(log, two.p.Slice(0, 3, 4));
         },
         "w: fallback, a call of the loader without it touches the bytes of `p` that it writes\n"
         "f: fallback, given\n"},
        {"ColumnsBetweenThoseOfAnother",
         [](LogBuilder& log) {
           const View p = log.Target("p", {2, 4});
           log.Copy(p.Slice(1, 0, 2), log.Source("w", {2, 2}));
           log.Copy(p.Slice(1, 2, 4), log.Source("f", {2, 2}));
           log.input().fallbacks.emplace_back(1, "given");
           Touch(log, p.Slice(1, 2, 4));
         },
         "w: direct\n"
         "  checkpoint 0 -> p: 0 + (2):(4) x 2 <- 0 + (2):(2) x 2\n"
         "f: fallback, given\n"},
        {"ResultOfAnOperator",
         [](LogBuilder& log) {
           const Two two(log);
           log.Copy(two.p, log.Node("aten::neg", {two.p}, {4}));
           Touch(log, two.p);
         },
         "w: fallback, a call of the loader without it touches the bytes of `p` that it writes\n"
         "f: fallback, given\n"},
        {"ConstantOfNoName",
         [](LogBuilder& log) {
           const Two two(log);
           const View r = log.Target("r", {2});
           log.Copy(r, log.Constant(0, {2}));
           Touch(log, r);
         },
         "w: fallback, a call of the loader without it touches the bytes of `r` that it writes\n"
         "f: fallback, given\n"},
        {"NoNameFallsBack",
         [](LogBuilder& log) {
           const Two two(log);
           log.input().fallbacks.clear();
           Touch(log, two.p);
         },
         "w: direct\n"
         "  checkpoint 0 -> p: 0 + ():() x 4 <- 0 + ():() x 4\n"
         "f: direct\n"
         "  checkpoint 1 -> q: 0 + ():() x 2 <- 0 + ():() x 2\n"},
        {"Raised",
         [](LogBuilder& log) {
           const Two two(log);
           log.input().fallback_call.emplace().error = "KeyError: 'w'";
         },
         "w: fallback, load_weights cannot be called with some names only: KeyError: 'w'\n"
         "f: fallback, given\n"},
    }),
    CaseName);

INSTANTIATE_TEST_SUITE_P(
    Answered, BuilderFallbackCallTest,
    ::testing::ValuesIn(std::vector<BuilderCase>{
        {"LiveBytesThatNothingWrites",
         [](LogBuilder& log) {
           const View map = log.Target("map", {4});
           log.Copy(log.Target("p", {4}), log.Source("w", {4}));
           Answer(log, map.Slice(0, 1, 3));
         },
         "w: direct\n"
         "  checkpoint 0 -> p: 0 + ():() x 4 <- 0 + ():() x 4\n"
         "uncovered: 4 of 4 bytes of map\n"
         "premise: 1 + (2):(1) x 1 of map\n"},
        {"BehindAnOperator",
         [](LogBuilder& log) {
           const View map = log.Target("map", {4});
           log.Copy(log.Target("p", {4}), log.Source("w", {4}));
           const View sum = log.Node("aten::sum", {map}, {1});
           Answer(log, log.Node("aten::neg", {sum}, {1}));
         },
         "w: direct\n"
         "  checkpoint 0 -> p: 0 + ():() x 4 <- 0 + ():() x 4\n"
         "uncovered: 4 of 4 bytes of map\n"
         "premise: 0 + (4):(1) x 1 of map\n"},
        {"Backwards",
         [](LogBuilder& log) {
           const View map = log.Target("map", {4});
           const View flipped = log.Temporary({4});
           log.Copy(flipped, map.With(3, {4}, {-1}));
           Answer(log, flipped);
         },
         "uncovered: 4 of 4 bytes of map\n"
         "premise: 0 + (4):(1) x 1 of map\n"},
        {"BeforeANameWritesThem",
         [](LogBuilder& log) {
           const View p = log.Target("p", {4});
           Answer(log, p.Slice(0, 0, 1));
           log.Copy(p, log.Source("w", {4}));
           log.Copy(log.Target("q", {2}), log.Source("x", {2}));
         },
         "w: fallback, the loader looks at the bytes of `p` that it writes, as the update before "
         "left them\n"
         "x: direct\n"
         "  checkpoint 1 -> q: 0 + ():() x 2 <- 0 + ():() x 2\n"},
        {"BeforeAConstantWritesThem",
         [](LogBuilder& log) {
           const View p = log.Target("p", {2});
           Answer(log, p);
           log.Copy(p, log.Constant(0, {2}));
           log.Copy(log.Target("q", {2}), log.Source("x", {2}));
         },
         "x: fallback, the loader looks at the bytes of `p` that it writes, as the update before "
         "left them\n"},
        {"ThatCannotBeFollowed",
         [](LogBuilder& log) {
           const View map = log.Target("map", {2, 2});
           const View tmp = log.Temporary({3});
           log.Copy(tmp.With(0, {2, 2}, {1, 1}), map);
           Answer(log, tmp);
           log.Copy(log.Target("p", {4}), log.Source("w", {4}));
         },
         "w: fallback, the loader looks at bytes that cannot be followed: a copy on the way writes "
         "one byte twice\n"
         "uncovered: 4 of 4 bytes of map\n"},
        {"AConstant", [](LogBuilder& log) { Answer(log, log.Constant(0, {2})); }, ""},
    }),
    CaseName);

TEST(BuilderFallbackCallErrorTest, TouchedStorageThatNoTargetShows) {
  LogBuilder log;
  const Two two(log);
  Touch(log, two.w);
  EXPECT_THAT(log.Build(), StatusIs(absl::StatusCode::kInvalidArgument,
                                    HasSubstr("which is shown by no target")));
}

TEST(BuilderFallbackCallErrorTest, AnsweredReadOutsideItsStorage) {
  LogBuilder log;
  Answer(log, log.Target("p", {2}).With(1, {2}, {1}));
  EXPECT_THAT(log.Build(), StatusIs(absl::StatusCode::kInvalidArgument,
                                    "`answered read` reads outside storage 0"));
}

}  // namespace
}  // namespace loadplan::testing
