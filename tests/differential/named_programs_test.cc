// Programs that once left a wrong byte, or that no plan could be made of, shrunk.
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/differential/differential.h"

namespace loadplan::testing {
namespace {

struct NamedProgram {
  std::string name;
  Program program;
};
std::ostream& operator<<(std::ostream& stream, const NamedProgram& p) { return stream << p.name; }

class NamedPrograms : public ::testing::TestWithParam<NamedProgram> {};

TEST_P(NamedPrograms, PlanLeavesWhatTheLoaderLeaves) {
  for (const OverlapPolicy overlaps : {OverlapPolicy::kFallback, OverlapPolicy::kLastWins}) {
    const Outcome outcome = RunBothWays(GetParam().program, overlaps, 1);
    EXPECT_EQ(outcome.kind, Outcome::kPlanned) << outcome.detail << "\n"
                                               << Format(GetParam().program);
  }
}

const std::vector<SourceSpec> kFloats = {{{4, 3}, at::kFloat}};
const std::vector<StorageSpec> kStorage = {{12, at::kFloat}};
const std::vector<TargetSpec> kTarget = {{0, at::kFloat, {4, 3}, {3, 1}, 0}};

INSTANTIATE_TEST_SUITE_P(
    , NamedPrograms,
    ::testing::Values(
        // What the target held before `add_` is an input, though it is a known constant.
        NamedProgram{"in_place_on_a_filled_target",
                     {kFloats,
                      kStorage,
                      kTarget,
                      {{Op::kFill, 0, {1}, {}, 3}, {Op::kAddInPlace, 0, {1, 0}}}}},
        NamedProgram{"in_place_on_a_zeroed_source",
                     {kFloats,
                      kStorage,
                      kTarget,
                      {{Op::kZero, 0, {0}},
                       {Op::kNarrow, 0, {0}, {0, 0, 2}},
                       {Op::kMulInPlace, 0, {0}, {}, 2},
                       {Op::kAddInPlace, 0, {1, 0}}}}},
        // The same of a scratch tensor that no copy had met before.
        NamedProgram{"in_place_on_new_scratch",
                     {kFloats,
                      kStorage,
                      kTarget,
                      {{Op::kRealZeros, 0, {1}},
                       {Op::kFill, 0, {2}, {}, 5},
                       {Op::kAddInPlace, 0, {2, 0}},
                       {Op::kCopy, 0, {1, 2}}}}},
        // An operator's output that is written again.
        NamedProgram{
            "in_place_on_a_computed_tensor",
            {kFloats,
             kStorage,
             kTarget,
             {{Op::kNeg, 0, {0}}, {Op::kMulInPlace, 0, {2}, {}, 2}, {Op::kCopy, 0, {1, 2}}}}},
        NamedProgram{"part_of_a_computed_tensor_is_replaced",
                     {kFloats,
                      kStorage,
                      kTarget,
                      {{Op::kExp, 0, {0}},
                       {Op::kNarrow, 0, {2}, {0, 1, 2}},
                       {Op::kNarrow, 0, {0}, {0, 2, 2}},
                       {Op::kCopy, 0, {3, 4}},
                       {Op::kCopy, 0, {1, 2}}}}},
        // A cast that reads backwards: torch flips no float8.
        NamedProgram{"cast_of_float8_read_backwards",
                     {{{{6}, at::kFloat8_e4m3fn}},
                      {{6, at::kFloat}},
                      {{0, at::kFloat, {6}, {1}, 0}},
                      {{Op::kIndexSelect, 0, {0}, {0, 5, 4, 3, 2, 1, 0}}, {Op::kCopy, 0, {1, 2}}}}},
        // A view whose items lie off the alignment of their dtype, through a cast.
        NamedProgram{"bytes_of_a_cast_at_an_odd_offset",
                     {{{{2}, at::kByte}},
                      {{8, at::kByte}},
                      {{0, at::kByte, {4}, {1}, 3}},
                      {{Op::kTo, 0, {0}, {}, 0, at::kBFloat16},
                       {Op::kViewDtype, 0, {2}, {}, 0, at::kByte},
                       {Op::kCopy, 0, {1, 3}}}}},
        // The memory of a result is laid out by the strides of the argument.
        NamedProgram{"memory_of_a_flipped_transposed_view",
                     {{{{4, 6}, at::kFloat}},
                      {{12, at::kFloat}},
                      {{0, at::kFloat, {2, 3}, {3, 1}, 0}},
                      {{Op::kNarrow, 0, {0}, {1, 1, 3}},
                       {Op::kTranspose, 0, {2}, {0, 1}},
                       {Op::kFlip, 0, {3}, {0}},
                       {Op::kAsStrided, 0, {4}, {2, 3, 3, 1, 2}},
                       {Op::kCopy, 0, {1, 5}}}}},
        NamedProgram{"memory_of_flipped_windows",
                     {{{{5, 3, 6}, at::kFloat}},
                      {{6, at::kFloat}},
                      {{0, at::kFloat, {3, 2}, {2, 1}, 0}},
                      {{Op::kUnfold, 0, {0}, {1, 2, 1}},
                       {Op::kFlip, 0, {2}, {3}},
                       {Op::kAsStrided, 0, {3}, {3, 2, 5, 1, 56}},
                       {Op::kCopy, 0, {1, 4}}}}},
        // NaN of a sum in float16: its float32 bits depend on the place in the row that is cast.
        NamedProgram{
            "part_of_a_cast_of_nan",
            {{{{5, 3}, at::kInt}},
             {{54, at::kFloat}, {54, at::kFloat}},
             {{0, at::kFloat, {4, 13}, {13, 1}, 0}, {1, at::kFloat, {5, 3, 3}, {9, 3, 1}, 0}},
             {{Op::kTranspose, 0, {2}, {1, 0}},
              {Op::kTo, 0, {3}, {}, 0, at::kHalf},
              {Op::kSum, 0, {4}, {2}},
              {Op::kTo, 0, {5}, {}, 0, at::kFloat},
              {Op::kNarrow, 0, {1}, {0, 0, 2}},
              {Op::kNarrow, 0, {6}, {0, 1, 2}},
              {Op::kNarrow, 0, {7}, {1, 4, 5}},
              {Op::kCopy, 0, {9, 8}},
              {Op::kSelect, 0, {2}, {1, 2}},
              {Op::kCopy, 0, {11, 0}}}}},
        NamedProgram{"memory_without_strides",
                     {kFloats,
                      kStorage,
                      kTarget,
                      {{Op::kEmptyLike, 0, {0}}, {Op::kCopy, 0, {2, 0}}, {Op::kCopy, 0, {1, 2}}}}}),
    [](const auto& param_info) { return param_info.param.name; });

}  // namespace
}  // namespace loadplan::testing
