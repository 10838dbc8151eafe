// What falls back and why, what is unneeded, what refuses the plan.
#include "plan/load_plan_builder.h"

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

using ::testing::HasSubstr;

class BuilderFallbackTest : public ::testing::TestWithParam<BuilderCase> {};

TEST_P(BuilderFallbackTest, GivesThePlan) { CheckPlan(GetParam()); }

INSTANTIATE_TEST_SUITE_P(
    Unneeded, BuilderFallbackTest,
    ::testing::ValuesIn(std::vector<BuilderCase>{
        {"NeverRead", [](LogBuilder& log) { log.Source("w", {2}); }, "w: unneeded\n"},
        {"OnlyIntoATemporary",
         [](LogBuilder& log) { log.Copy(log.Temporary({2}), log.Source("w", {2})); },
         "w: unneeded\n"},
        {"EmptyCopy",
         [](LogBuilder& log) {
           log.Copy(log.Target("p", {2}).Slice(0, 1, 1), log.Source("w", {2}).Slice(0, 0, 0));
         },
         "w: unneeded\n"
         "uncovered: 2 of 2 bytes of p\n"},
        {"ZeroSize",
         [](LogBuilder& log) {
           log.Copy(log.Target("p", {0, 2}), log.Source("w", {0, 2}));
         },
         "w: unneeded\n"},
        {"OnlyIntoAnOperatorThatReachesNothing",
         [](LogBuilder& log) {
           log.Node("aten::rand_like", {log.Source("w", {2})}, {2}, "random numbers");
         },
         "w: unneeded\n"},
        {"OverwrittenByAConstant",
         [](LogBuilder& log) {
           const View p = log.Target("p", {2});
           log.Copy(p, log.Source("w", {2}));
           log.Copy(p, log.Constant(0, {1}).Select(0, 0).Expand(0, 2));
         },
         "w: unneeded, every byte that it writes is overwritten by a constant\n"
         "constant 0 -> p: 0 + (2):(1) x 1 <- 0 + (2):(0) x 1\n"},
        {"RandomInitialisationThatIsOverwritten",
         [](LogBuilder& log) {
           const View p = log.Target("p", {2});
           log.Copy(p, log.Node("aten::normal_", {}, {2}, "random numbers"));
           log.Copy(p, log.Source("w", {2}));
         },
         "w: direct\n"
         "  checkpoint 0 -> p: 0 + ():() x 2 <- 0 + ():() x 2\n"},
    }),
    CaseName);

INSTANTIATE_TEST_SUITE_P(Nameless, BuilderFallbackTest,
                         ::testing::ValuesIn(std::vector<BuilderCase>{
                             {"ConstantBeforeIsClipped",
                              [](LogBuilder& log) {
                                const View p = log.Target("p", {4});
                                log.Copy(p, log.Constant(7, {1}).Select(0, 0).Expand(0, 4));
                                log.Copy(p.Slice(0, 1, 3), log.Source("w", {2}));
                              },
                              "w: direct\n"
                              "  checkpoint 0 -> p: 1 + ():() x 2 <- 0 + ():() x 2\n"
                              "constant 7 -> p: 0 + ():() x 1 <- 0 + ():() x 1\n"
                              "constant 7 -> p: 3 + ():() x 1 <- 0 + ():() x 1\n"},
                             {"ConstantAfterClips",
                              [](LogBuilder& log) {
                                const View p = log.Target("p", {4});
                                log.Copy(p, log.Source("w", {4}));
                                log.Copy(p.Slice(0, 0, 1), log.Constant(7, {1}));
                              },
                              "w: direct\n"
                              "  checkpoint 0 -> p: 1 + ():() x 3 <- 1 + ():() x 3\n"
                              "constant 7 -> p: 0 + ():() x 1 <- 0 + ():() x 1\n"},
                             {"ConstantsAreNoOverlap",
                              [](LogBuilder& log) {
                                const View p = log.Target("p", {2});
                                log.Copy(p, log.Constant(1, {2}));
                                log.Copy(p, log.Constant(2, {2}));
                              },
                              "constant 2 -> p: 0 + ():() x 2 <- 0 + ():() x 2\n"},
                             {"LiveBytesMove",
                              [](LogBuilder& log) {
                                const View p = log.Target("p", {4});
                                const View tmp = log.Temporary({2});
                                log.Copy(tmp, p.Slice(0, 0, 2));
                                log.Copy(p.Slice(0, 0, 2), log.Source("w", {2}));
                                log.Copy(p.Slice(0, 2, 4), tmp);
                              },
                              "w: direct\n"
                              "  checkpoint 0 -> p: 0 + ():() x 2 <- 0 + ():() x 2\n"
                              "live p -> p: 2 + ():() x 2 <- 0 + ():() x 2\n"},
                             {"LiveBytesOntoThemselvesAreNoWrite",
                              [](LogBuilder& log) {
                                const View p = log.Target("p", {4});
                                const View tmp = log.Temporary({4});
                                log.Copy(tmp, p);
                                log.Copy(tmp.Slice(0, 0, 1), log.Source("w", {1}));
                                log.Copy(p, tmp);
                              },
                              "w: direct\n"
                              "  checkpoint 0 -> p: 0 + ():() x 1 <- 0 + ():() x 1\n"
                              "uncovered: 3 of 4 bytes of p\n"},
                             {"UninitialisedBytesAreNotWritten",
                              [](LogBuilder& log) {
                                log.Copy(log.Target("p", {4}), log.Temporary({4}));
                              },
                              "uncovered: 4 of 4 bytes of p\n"},
                             {"PartsOfATargetUncovered",
                              [](LogBuilder& log) {
                                const View p = log.Target("p", {4, 4});
                                log.Target("q", {3});
                                log.Copy(p.Slice(1, 0, 3), log.Source("w", {4, 3}));
                              },
                              "w: direct\n"
                              "  checkpoint 0 -> p: 0 + (4):(4) x 3 <- 0 + (4):(3) x 3\n"
                              "uncovered: 4 of 16 bytes of p\n"
                              "uncovered: 3 of 3 bytes of q\n"},
                         }),
                         CaseName);

INSTANTIATE_TEST_SUITE_P(
    Fallback, BuilderFallbackTest,
    ::testing::ValuesIn(std::vector<BuilderCase>{
        {"Given",
         [](LogBuilder& log) {
           log.Source("w", {2});
           log.input().fallbacks.emplace_back(0, "`aten::item`: its value is read (l.py:3)");
         },
         "w: fallback, `aten::item`: its value is read (l.py:3)\n"},
        {"RefusedWithItsPlace",
         [](LogBuilder& log) {
           const View w = log.Source("w", {2});
           log.Copy(log.Target("p", {2}), w);
           log.Refuse("aten::item", "its value is read", "l.py:3", {w.Select(0, 0)});
         },
         "w: fallback, `aten::item`: its value is read (l.py:3)\n"},
        {"RefusedThroughATemporaryAndAnOperator",
         [](LogBuilder& log) {
           const View tmp = log.Temporary({2});
           log.Copy(tmp, log.Source("w", {2}));
           log.Refuse("aten::equal", "its result is a branch", "",
                      {log.Node("aten::exp", {tmp}, {2})});
           log.Copy(tmp, log.Source("later", {2}));
         },
         "w: fallback, `aten::equal`: its result is a branch\n"
         "later: unneeded\n"},
        {"NotReplayable",
         [](LogBuilder& log) {
           const View w = log.Source("w", {2});
           const View y = log.Node("aten::bernoulli", {w}, {2}, "random numbers");
           log.Copy(log.Target("p", {2}), log.Node("aten::exp", {y}, {2}));
         },
         "w: fallback, `aten::bernoulli` cannot be replayed: random numbers\n"},
        {"CastItemCut",
         [](LogBuilder& log) {
           const View tmp = log.Temporary({2}, kBFloat16);
           log.Copy(tmp, log.Source("w", {2}, kFloat32));
           log.Copy(log.Target("p", {3}), tmp.As(kUint8).Slice(0, 0, 3));
         },
         "w: fallback, a copy into `p` cannot be planned: an item of a cast map would have to be "
         "cut: the other operand has a part of it; the items of both maps must coincide on the "
         "storage between them\n"},
        {"CastsOfDifferentDtypes",
         [](LogBuilder& log) {
           const View tmp = log.Temporary({2}, kBFloat16);
           log.Copy(tmp, log.Source("w", {2}, kFloat32));
           log.Copy(log.Target("p", {2}, kFloat32), tmp.As(kFloat16));
         },
         "w: fallback, a copy into `p` cannot be planned: items cast to bfloat16 are read as "
         "float16 by the next cast\n"},
        {"ByteWrittenTwiceByOneCopy",
         [](LogBuilder& log) {
           const View p = log.Target("p", {3});
           log.Copy(p.With(0, {2, 2}, {1, 1}), log.Source("w", {2, 2}));
         },
         "w: fallback, a copy into `p` cannot be planned: it writes one byte twice\n"},
        {"UninitialisedBytesInItsCopy",
         [](LogBuilder& log) {
           const View tmp = log.Temporary({4});
           log.Copy(tmp.Slice(0, 0, 2), log.Source("w", {2}));
           log.Copy(log.Target("p", {4}), tmp);
         },
         "w: fallback, a copy into `p` combines it with uninitialised memory\n"
         "uncovered: 2 of 4 bytes of p\n"},
        {"CombinedInOneCopy",
         [](LogBuilder& log) {
           const View a = log.Source("a", {2});
           const View tmp = log.Temporary({4});
           log.Copy(tmp.Slice(0, 0, 2), a);
           log.Copy(tmp.Slice(0, 2, 4), log.Source("b", {2}));
           log.Copy(log.Target("p", {4}), tmp);
           log.Refuse("aten::item", "its value is read", "", {a});
         },
         "a: fallback, `aten::item`: its value is read\n"
         "b: fallback, a copy into `p` combines it with `a`, which goes through the loader\n"},
        {"CombinedByAnOperatorToAFixpoint",
         [](LogBuilder& log) {
           const View a = log.Source("a", {2});
           const View b = log.Source("b", {2});
           const View c = log.Source("c", {2});
           log.Copy(log.Target("p", {2}), log.Node("aten::add.Tensor", {a, b}, {2}));
           log.Copy(log.Target("q", {2}), log.Node("aten::mul.Tensor", {b, c}, {2}));
           log.Copy(log.Target("r", {2}), log.Source("d", {2}));
           log.Refuse("aten::item", "its value is read", "", {a});
         },
         "a: fallback, `aten::item`: its value is read\n"
         "b: fallback, `aten::add.Tensor` combines it with `a`, which goes through the loader\n"
         "c: fallback, `aten::mul.Tensor` combines it with `b`, which goes through the loader\n"
         "d: direct\n"
         "  checkpoint 3 -> r: 0 + ():() x 2 <- 0 + ():() x 2\n"},
        {"ConstantOfItsCopyGoesWithIt",
         [](LogBuilder& log) {
           const View w = log.Source("w", {2});
           const View tmp = log.Temporary({4});
           log.Copy(tmp, log.Constant(0, {4}));
           log.Copy(tmp.Slice(0, 0, 2), w);
           log.Copy(log.Target("p", {4}), tmp);
           log.Refuse("aten::item", "its value is read", "", {w});
         },
         "w: fallback, `aten::item`: its value is read\n"},
        {"LiveBytesBesideAnotherFallback",
         [](LogBuilder& log) {
           const View p = log.Target("p", {2});
           log.Copy(p, log.Node("aten::add.Tensor", {p, log.Source("delta", {2})}, {2}));
           log.Source("w", {2});
           log.input().fallbacks.emplace_back(1, "given");
         },
         "delta: fallback, a write into `p` combines it with live bytes, which are unknown once "
         "another name goes through the loader\n"
         "w: fallback, given\n"},
        {"NamelessLiveReadBesideAFallback",
         [](LogBuilder& log) {
           log.Copy(log.Target("lm_head", {2}), log.Target("embed", {2}));
           log.Copy(log.Target("p", {2}), log.Source("w", {2}));
           log.Source("x", {2});
           log.input().fallbacks.emplace_back(1, "given");
         },
         "w: fallback, live bytes are copied or computed from by themselves, and what they hold is "
         "unknown once a name goes through the loader\n"
         "x: fallback, given\n"
         "uncovered: 2 of 2 bytes of embed\n"},
        {"FallbackUnderALaterConstant",
         [](LogBuilder& log) {
           const View w = log.Source("w", {2});
           const View p = log.Target("p", {2});
           log.Copy(p, w);
           log.Copy(p.Slice(0, 0, 1), log.Constant(0, {1}));
           log.Copy(log.Target("q", {2}), log.Source("x", {2}));
           log.Refuse("aten::item", "its value is read", "", {w});
         },
         "w: fallback, `aten::item`: its value is read\n"
         "x: fallback, a fallback name's bytes are overwritten later by a constant or by live "
         "bytes, in an order that only one whole call of the loader keeps\n"},
        {"CastClippedInsideAnItem",
         [](LogBuilder& log) {
           const View p = log.Target("p", {2}, kBFloat16);
           log.Copy(p, log.Source("w", {2}, kFloat32));
           log.Copy(p.As(kUint8).Slice(0, 0, 1), log.Constant(0, {1}));
         },
         "w: fallback, a copy into `p` cannot be planned: an item of a cast map would have to be "
         "cut: the other operand has a part of it; the items of both maps must coincide on the "
         "storage between them\n"},
    }),
    CaseName);

struct ErrorCase {
  std::string name;
  std::function<void(LogBuilder&)> records;
  absl::StatusCode code;
  std::string words;
};

std::ostream& operator<<(std::ostream& stream, const ErrorCase& c) { return stream << c.name; }

class BuilderErrorTest : public ::testing::TestWithParam<ErrorCase> {};

TEST_P(BuilderErrorTest, SaysWhatIsWrong) {
  LogBuilder log;
  GetParam().records(log);
  EXPECT_THAT(log.Build(), StatusIs(GetParam().code, HasSubstr(GetParam().words)));
}

INSTANTIATE_TEST_SUITE_P(
    Errors, BuilderErrorTest,
    ::testing::ValuesIn(std::vector<ErrorCase>{
        {"DuplicateName",
         [](LogBuilder& log) {
           log.Source("w", {2});
           log.Source("w", {2});
         },
         absl::StatusCode::kInvalidArgument, "`w` is declared twice"},
        {"DeclaredOtherwise",
         [](LogBuilder& log) {
           log.Source("w", {2});
           log.input().sources[0].shape = {3};
         },
         absl::StatusCode::kInvalidArgument, "`w` was declared with 3 bytes and traced with 2"},
        {"SourceOfNoName",
         [](LogBuilder& log) {
           log.Source("w", {2});
           log.input().sources.clear();
         },
         absl::StatusCode::kInvalidArgument, "a checkpoint storage belongs to no declared name"},
        {"FallbackOfNoName",
         [](LogBuilder& log) { log.input().fallbacks.emplace_back(3, "given"); },
         absl::StatusCode::kInvalidArgument, "a fallback belongs to no declared name"},
        {"TargetWithoutStorage",
         [](LogBuilder& log) {
           log.Target("p", {2});
           log.input().targets[0].storage = 9;
         },
         absl::StatusCode::kInvalidArgument, "target `p` has no target storage"},
        {"TargetOutsideItsStorage",
         [](LogBuilder& log) {
           log.Target("p", {2});
           log.input().log.storages[0].nbytes = 1;
         },
         absl::StatusCode::kInvalidArgument, "target `p` reaches outside its storage"},
        {"WriteThatNoTargetShows",
         [](LogBuilder& log) {
           log.Copy(log.Target("p", {2}), log.Source("w", {2}));
           log.input().targets.clear();
         },
         absl::StatusCode::kInvalidArgument, "is written and shown by no target"},
        {"MalformedLog",
         [](LogBuilder& log) {
           log.Copy(log.Target("p", {2}), log.Source("w", {2}));
           log.input().log.copies[0].from = 17;
         },
         absl::StatusCode::kInvalidArgument, "copy record 0 names a storage"},
        {"WriteIntoNoStorage",
         [](LogBuilder& log) {
           log.Copy(log.Target("p", {2}), log.Source("w", {2}));
           log.input().log.copies[0].to = 1 << 30;
         },
         absl::StatusCode::kInvalidArgument, "copy record 0 names a storage"},
        {"RandomInitialisation",
         [](LogBuilder& log) {
           log.Copy(log.Target("p", {2}), log.Node("aten::normal_", {}, {2}, "random numbers"));
         },
         absl::StatusCode::kFailedPrecondition,
         "target `p` gets bytes that come from no checkpoint tensor and cannot be computed again: "
         "`aten::normal_` cannot be replayed: random numbers"},
        {"OperatorOnUninitialisedMemory",
         [](LogBuilder& log) {
           log.Copy(log.Target("p", {2}), log.Node("aten::exp", {log.Temporary({2})}, {2}));
         },
         absl::StatusCode::kFailedPrecondition, "`aten::exp` cannot be replayed: it reads uninit"},
        {"RefusalWithNoNameBehindIt",
         [](LogBuilder& log) {
           log.Refuse("aten::item", "its value is read", "l.py:3", {log.Target("p", {2})});
         },
         absl::StatusCode::kFailedPrecondition,
         "`aten::item`: its value is read (l.py:3); no checkpoint tensor is behind"},
        {"IrregularConstantWithoutNames",
         [](LogBuilder& log) {
           const View p = log.Target("p", {3});
           log.Copy(p.With(0, {2, 2}, {1, 1}), log.Constant(0, {2, 2}));
         },
         absl::StatusCode::kFailedPrecondition,
         "a copy into `p` cannot be planned: it writes one byte twice"},
    }),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace loadplan::testing
