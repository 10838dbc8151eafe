// What records become where everything can be planned.
#include "plan/load_plan_builder.h"

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/plan/builder_cases.h"
#include "tests/testing/log_builder.h"

namespace loadplan::testing {
namespace {

class BuilderTest : public ::testing::TestWithParam<BuilderCase> {};

TEST_P(BuilderTest, GivesThePlan) { CheckPlan(GetParam()); }

INSTANTIATE_TEST_SUITE_P(
    Direct, BuilderTest,
    ::testing::ValuesIn(std::vector<BuilderCase>{
        {"Whole",
         [](LogBuilder& log) {
           const View w = log.Source("w", {2, 4});
           log.Copy(log.Target("p", {2, 4}), w);
         },
         "w: direct\n"
         "  checkpoint 0 -> p: 0 + ():() x 8 <- 0 + ():() x 8\n"},
        {"RowShard",
         [](LogBuilder& log) {
           const View w = log.Source("w", {4, 2}, kFloat32);
           log.Copy(log.Target("p", {2, 2}, kFloat32), w.Slice(0, 2, 4));
         },
         "w: direct\n"
         "  checkpoint 0 -> p: 0 + ():() x 16 <- 16 + ():() x 16\n"},
        {"ColumnShardIsOneRegion",
         [](LogBuilder& log) {
           const View w = log.Source("w", {4, 8});
           log.Copy(log.Target("p", {4, 2}), w.Slice(1, 2, 4));
         },
         "w: direct\n"
         "  checkpoint 0 -> p: 0 + (4):(2) x 2 <- 2 + (4):(8) x 2\n"},
        {"Transpose",
         [](LogBuilder& log) {
           const View w = log.Source("w", {2, 3});
           log.Copy(log.Target("p", {3, 2}), w.Transpose(0, 1));
         },
         "w: direct\n"
         "  checkpoint 0 -> p: 0 + (3, 2):(2, 1) x 1 <- 0 + (3, 2):(1, 3) x 1\n"},
        {"Step",
         [](LogBuilder& log) {
           const View w = log.Source("w", {6});
           log.Copy(log.Target("p", {3}), w.Slice(0, 0, 6, 2));
         },
         "w: direct\n"
         "  checkpoint 0 -> p: 0 + (3):(1) x 1 <- 0 + (3):(2) x 1\n"},
        {"BroadcastReadsOnce",
         [](LogBuilder& log) {
           const View w = log.Source("w", {2});
           log.Copy(log.Target("p", {3, 2}), w.Expand(0, 3));
         },
         "w: direct\n"
         "  checkpoint 0 -> p: 0 + (3):(2) x 2 <- 0 + (3):(0) x 2\n"},
        {"Scalar",
         [](LogBuilder& log) {
           const View w = log.Source("w", {}, kFloat32);
           log.Copy(log.Target("p", {}, kFloat32), w);
         },
         "w: direct\n"
         "  checkpoint 0 -> p: 0 + ():() x 4 <- 0 + ():() x 4\n"},
        {"RawBytesOfAnotherDtype",
         [](LogBuilder& log) {
           const View w = log.Source("w", {4}, kBFloat16);
           log.Copy(log.Target("p", {2}, kFloat32).As(kBFloat16), w);
         },
         "w: direct\n"
         "  checkpoint 0 -> p: 0 + ():() x 8 <- 0 + ():() x 8\n"},
        {"TwoNamesIntoOneTarget",
         [](LogBuilder& log) {
           const View p = log.Target("p", {4, 2});
           log.Copy(p.Slice(0, 2, 4), log.Source("b", {2, 2}));
           log.Copy(p.Slice(0, 0, 2), log.Source("a", {2, 2}));
         },
         "b: direct\n"
         "  checkpoint 0 -> p: 4 + ():() x 4 <- 0 + ():() x 4\n"
         "a: direct\n"
         "  checkpoint 1 -> p: 0 + ():() x 4 <- 0 + ():() x 4\n"},
        {"OneNameIntoTwoTargets",
         [](LogBuilder& log) {
           const View w = log.Source("w", {4});
           log.Copy(log.Target("p", {4}), w);
           log.Copy(log.Target("q", {2}), w.Slice(0, 0, 2));
         },
         "w: direct\n"
         "  checkpoint 0 -> p: 0 + ():() x 4 <- 0 + ():() x 4\n"
         "  checkpoint 0 -> q: 0 + ():() x 2 <- 0 + ():() x 2\n"},
        {"LaterWriteOfOneNameWins",
         [](LogBuilder& log) {
           const View w = log.Source("w", {4});
           const View p = log.Target("p", {4});
           log.Copy(p, w);
           log.Copy(p.Slice(0, 0, 2), w.Slice(0, 2, 4));
         },
         "w: direct\n"
         "  checkpoint 0 -> p: 2 + ():() x 2 <- 2 + ():() x 2\n"
         "  checkpoint 0 -> p: 0 + ():() x 2 <- 2 + ():() x 2\n"},
        {"AliasesAreOneStorage",
         [](LogBuilder& log) {
           const View p = log.Target("embed", {4});
           log.Alias("lm_head", p);
           log.Alias("tail", p.Slice(0, 2, 4));
           log.Copy(p.Slice(0, 0, 3), log.Source("w", {3}));
         },
         "w: direct\n"
         "  checkpoint 0 -> embed: 0 + ():() x 3 <- 0 + ():() x 3\n"
         "uncovered: 1 of 4 bytes of embed\n"
         "uncovered: 1 of 4 bytes of lm_head\n"
         "uncovered: 1 of 2 bytes of tail\n"},
        {"ReadBackOfWrittenBytes",
         [](LogBuilder& log) {
           const View p = log.Target("embed", {4});
           log.Copy(p, log.Source("w", {4}));
           log.Copy(log.Target("lm_head", {2}), p.Slice(0, 1, 3));
         },
         "w: direct\n"
         "  checkpoint 0 -> embed: 0 + ():() x 4 <- 0 + ():() x 4\n"
         "  checkpoint 0 -> lm_head: 0 + ():() x 2 <- 1 + ():() x 2\n"},
        {"SourceReadAsItWasThen",
         [](LogBuilder& log) {
           const View w = log.Source("w", {4});
           log.Copy(log.Target("p", {4}), w);
           log.Copy(w.Slice(0, 0, 2), log.Constant(0, {2}));
           log.Copy(log.Target("q", {4}), w);
         },
         "w: direct\n"
         "  checkpoint 0 -> p: 0 + ():() x 4 <- 0 + ():() x 4\n"
         "  checkpoint 0 -> q: 2 + ():() x 2 <- 2 + ():() x 2\n"
         "constant 0 -> q: 0 + ():() x 2 <- 0 + ():() x 2\n"},
    }),
    CaseName);

INSTANTIATE_TEST_SUITE_P(Temporaries, BuilderTest,
                         ::testing::ValuesIn(std::vector<BuilderCase>{
                             {"CatIsPiecewise",
                              [](LogBuilder& log) {
                                const View tmp = log.Temporary({6, 2});
                                log.Copy(tmp.Slice(0, 0, 4), log.Source("q", {4, 2}));
                                log.Copy(tmp.Slice(0, 4, 6), log.Source("k", {2, 2}));
                                log.Copy(log.Target("p", {6, 2}), tmp);
                              },
                              "q: direct\n"
                              "  checkpoint 0 -> p: 0 + ():() x 8 <- 0 + ():() x 8\n"
                              "k: direct\n"
                              "  checkpoint 1 -> p: 8 + ():() x 4 <- 0 + ():() x 4\n"},
                             {"CatReadInPart",
                              [](LogBuilder& log) {
                                const View tmp = log.Temporary({8});
                                log.Copy(tmp.Slice(0, 0, 4), log.Source("q", {4}));
                                log.Copy(tmp.Slice(0, 4, 8), log.Source("k", {4}));
                                log.Copy(log.Target("p", {3}), tmp.Slice(0, 1, 4));
                              },
                              "q: direct\n"
                              "  checkpoint 0 -> p: 0 + ():() x 3 <- 1 + ():() x 3\n"
                              "k: unneeded\n"},
                             {"StackOnTheLastDimensionInterleaves",
                              [](LogBuilder& log) {
                                const View tmp = log.Temporary({3, 2});
                                log.Copy(tmp.Select(1, 0), log.Source("a", {3}));
                                log.Copy(tmp.Select(1, 1), log.Source("b", {3}));
                                log.Copy(log.Target("p", {6}), tmp.Reshape({6}));
                              },
                              "a: direct\n"
                              "  checkpoint 0 -> p: 0 + (3):(2) x 1 <- 0 + (3):(1) x 1\n"
                              "b: direct\n"
                              "  checkpoint 1 -> p: 1 + (3):(2) x 1 <- 0 + (3):(1) x 1\n"},
                             {"TemporaryOfTemporary",
                              [](LogBuilder& log) {
                                const View tmp = log.Temporary({2, 3});
                                const View u = log.Temporary({3, 2});
                                log.Copy(tmp, log.Source("w", {2, 3}));
                                log.Copy(u, tmp.Transpose(0, 1));
                                log.Copy(log.Target("p", {2}), u.Select(0, 1));
                              },
                              "w: direct\n"
                              "  checkpoint 0 -> p: 0 + (2):(1) x 1 <- 1 + (2):(3) x 1\n"},
                             {"BufferReusedInALoop",
                              [](LogBuilder& log) {
                                const View buffer = log.Temporary({2});
                                const View p = log.Target("p", {2, 2});
                                log.Copy(buffer, log.Source("a", {2}));
                                log.Copy(p.Select(0, 0), buffer);
                                log.Copy(buffer, log.Source("b", {2}));
                                log.Copy(p.Select(0, 1), buffer);
                              },
                              "a: direct\n"
                              "  checkpoint 0 -> p: 0 + ():() x 2 <- 0 + ():() x 2\n"
                              "b: direct\n"
                              "  checkpoint 1 -> p: 2 + ():() x 2 <- 0 + ():() x 2\n"},
                             {"ScratchKeepsWhatItHeld",
                              [](LogBuilder& log) {
                                const View scratch = log.Scratch(5, {4});
                                log.Copy(scratch.Slice(0, 0, 2), log.Source("w", {2}));
                                log.Copy(log.Target("p", {4}), scratch);
                              },
                              "w: direct\n"
                              "  checkpoint 0 -> p: 0 + ():() x 2 <- 0 + ():() x 2\n"
                              "constant 5 -> p: 2 + ():() x 2 <- 2 + ():() x 2\n"},
                         }),
                         CaseName);

INSTANTIATE_TEST_SUITE_P(
    Derived, BuilderTest,
    ::testing::ValuesIn(std::vector<BuilderCase>{
        {"Cast",
         [](LogBuilder& log) {
           const View w = log.Source("w", {4}, kFloat32);
           log.Copy(log.Target("p", {2}, kBFloat16), w.Slice(0, 2, 4));
         },
         "w: derived, cast float32 -> bfloat16\n"
         "  checkpoint 0 -> p: 0 + (2):(2) x 2 <-cast- 8 + (2):(4) x 4, cast float32 -> "
         "bfloat16\n"},
        {"CastChain",
         [](LogBuilder& log) {
           const View tmp = log.Temporary({4}, kBFloat16);
           log.Copy(tmp, log.Source("w", {4}, kFloat32));
           log.Copy(log.Target("p", {4}, kFloat32), tmp);
         },
         "w: derived, cast float32 -> bfloat16 -> float32\n"
         "  checkpoint 0 -> p: 0 + (4):(4) x 4 <-cast- 0 + (4):(4) x 4, cast float32 -> bfloat16 "
         "-> float32\n"},
        {"CopyOfACast",
         [](LogBuilder& log) {
           const View tmp = log.Temporary({4}, kBFloat16);
           log.Copy(tmp, log.Source("w", {4}, kFloat32));
           log.Copy(log.Target("p", {2}, kBFloat16), tmp.Slice(0, 0, 4, 2));
         },
         "w: derived, cast float32 -> bfloat16\n"
         "  checkpoint 0 -> p: 0 + (2):(2) x 2 <-cast- 0 + (2):(8) x 4, cast float32 -> "
         "bfloat16\n"},
        {"CastOfACat",
         [](LogBuilder& log) {
           const View tmp = log.Temporary({4}, kFloat32);
           log.Copy(tmp.Slice(0, 0, 2), log.Source("a", {2}, kFloat32));
           log.Copy(tmp.Slice(0, 2, 4), log.Source("b", {2}, kFloat32));
           log.Copy(log.Target("p", {4}, kBFloat16), tmp);
         },
         "a: derived, cast float32 -> bfloat16\n"
         "  checkpoint 0 -> p: 0 + (2):(2) x 2 <-cast- 0 + (2):(4) x 4, cast float32 -> bfloat16\n"
         "b: derived, cast float32 -> bfloat16\n"
         "  checkpoint 1 -> p: 4 + (2):(2) x 2 <-cast- 0 + (2):(4) x 4, cast float32 -> "
         "bfloat16\n"},
        {"Program",
         [](LogBuilder& log) {
           const View w = log.Source("w", {4});
           log.Copy(log.Target("p", {4}), log.Node("aten::exp", {w}, {4}));
         },
         "w: derived, `aten::exp` reads it\n"
         "program 0 -> p: 0 + ():() x 4 <- 0 + ():() x 4\n"
         "aten::exp of w\n"
         "  input 0 + (4):(1) x 1\n"
         "    checkpoint 0 -> input: 0 + ():() x 4 <- 0 + ():() x 4\n"},
        {"ProgramReadsItsInputsAsTheyWere",
         [](LogBuilder& log) {
           const View p = log.Target("p", {4});
           log.Copy(p, log.Source("w", {4}));
           const View y = log.Node("aten::exp", {p}, {4});
           log.Copy(p, y);
         },
         "w: derived, `aten::exp` reads it\n"
         "program 0 -> p: 0 + ():() x 4 <- 0 + ():() x 4\n"
         "aten::exp of w\n"
         "  input 0 + (4):(1) x 1\n"
         "    checkpoint 0 -> input: 0 + ():() x 4 <- 0 + ():() x 4\n"},
        {"ProgramsInOrderOfNeed",
         [](LogBuilder& log) {
           const View a = log.Source("a", {2});
           const View b = log.Source("b", {2});
           log.Node("aten::cos", {b}, {2});
           const View x = log.Node("aten::exp", {a}, {2});
           const View tmp = log.Temporary({4});
           log.Copy(tmp.Slice(0, 0, 2), x);
           log.Copy(tmp.Slice(0, 2, 4), b);
           log.Copy(log.Target("p", {4}), log.Node("aten::neg", {tmp}, {4}));
         },
         "a: derived, `aten::exp` reads it\n"
         "b: derived, `aten::neg` reads it\n"
         "program 1 -> p: 0 + ():() x 4 <- 0 + ():() x 4\n"
         "aten::exp of a\n"
         "  input 0 + (2):(1) x 1\n"
         "    checkpoint 0 -> input: 0 + ():() x 2 <- 0 + ():() x 2\n"
         "aten::neg of a b\n"
         "  input 0 + (4):(1) x 1\n"
         "    checkpoint 1 -> input: 2 + ():() x 2 <- 0 + ():() x 2\n"
         "    program 0 -> input: 0 + ():() x 2 <- 0 + ():() x 2\n"},
        {"InputKeepsItsStridesFromItsFirstByte",
         [](LogBuilder& log) {
           const View w = log.Source("w", {3, 4}).Slice(0, 1, 3).Slice(1, 1, 3);
           log.Copy(log.Target("p", {}), log.Node("aten::sum", {w}, {}));
         },
         "w: derived, `aten::sum` reads it\n"
         "program 0 -> p: 0 + ():() x 1 <- 0 + ():() x 1\n"
         "aten::sum of w\n"
         "  input 0 + (2, 2):(4, 1) x 1\n"
         "    checkpoint 0 -> input: 0 + (2):(4) x 2 <- 5 + (2):(4) x 2\n"},
        {"BroadcastInputHoldsEachByteOnce",
         [](LogBuilder& log) {
           const View w = log.Source("w", {2}).Expand(0, 3);
           log.Copy(log.Target("p", {3, 2}), log.Node("aten::exp", {w}, {3, 2}));
         },
         "w: derived, `aten::exp` reads it\n"
         "program 0 -> p: 0 + ():() x 6 <- 0 + ():() x 6\n"
         "aten::exp of w\n"
         "  input 0 + (3, 2):(0, 1) x 1\n"
         "    checkpoint 0 -> input: 0 + ():() x 2 <- 0 + ():() x 2\n"},
        {"BothDirectAndThroughAProgram",
         [](LogBuilder& log) {
           const View w = log.Source("w", {2});
           log.Copy(log.Target("p", {2}), w);
           log.Copy(log.Target("q", {2}), log.Node("aten::exp", {w}, {2}));
         },
         "w: derived, `aten::exp` reads it\n"
         "  checkpoint 0 -> p: 0 + ():() x 2 <- 0 + ():() x 2\n"
         "program 0 -> q: 0 + ():() x 2 <- 0 + ():() x 2\n"
         "aten::exp of w\n"
         "  input 0 + (2):(1) x 1\n"
         "    checkpoint 0 -> input: 0 + ():() x 2 <- 0 + ():() x 2\n"},
        {"LiveBytesPlusAName",
         [](LogBuilder& log) {
           const View p = log.Target("p", {2});
           log.Copy(p, log.Node("aten::add.Tensor", {p, log.Source("delta", {2})}, {2}));
         },
         "delta: derived, `aten::add.Tensor` reads it\n"
         "program 0 -> p: 0 + ():() x 2 <- 0 + ():() x 2\n"
         "aten::add.Tensor of delta\n"
         "  input 0 + (2):(1) x 1\n"
         "    live p -> input: 0 + ():() x 2 <- 0 + ():() x 2\n"
         "  input 0 + (2):(1) x 1\n"
         "    checkpoint 0 -> input: 0 + ():() x 2 <- 0 + ():() x 2\n"},
    }),
    CaseName);

}  // namespace
}  // namespace loadplan::testing
