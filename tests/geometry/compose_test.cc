// Named cases of geometry/compose.h; the laws are in compose_property_test.cc.
#include "geometry/compose.h"

#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/oracle.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOk;
using testing::Layout;
using testing::Map;
using ::testing::SizeIs;
using testing::StatusIs;

std::vector<std::string> Printed(const std::vector<StridedMap>& maps) {
  std::vector<std::string> printed;
  for (const StridedMap& map : maps) printed.push_back(ToString(map));
  return printed;
}

struct ComposeCase {
  std::string name;
  StridedMap outer;
  StridedMap inner;
  std::vector<std::string> matched;
  std::vector<std::string> rest;

  friend std::ostream& operator<<(std::ostream& s, const ComposeCase& c) { return s << c.name; }
};

class ComposeTest : public ::testing::TestWithParam<ComposeCase> {};

TEST_P(ComposeTest, IsTheFewestPieces) {
  const ComposeCase& c = GetParam();
  const absl::StatusOr<Composition> result = Compose(c.outer, c.inner);
  ASSERT_THAT(result, IsOk());
  EXPECT_EQ(Printed(result->matched), c.matched);
  EXPECT_EQ(Printed(result->rest), c.rest);
}

StridedMap RunOf(Index to, Index from, Index nbytes) {
  return Map({}, {to, {}, nbytes}, {from, {}, nbytes});
}

// A 6x10 matrix of bytes read in full.
const StridedMap kMatrix = Map({}, {0, {}, 60}, {0, {}, 60});

INSTANTIATE_TEST_SUITE_P(
    Cases, ComposeTest,
    ::testing::ValuesIn(std::vector<ComposeCase>{
        {"AllOfIt", RunOf(0, 0, 60), RunOf(0, 100, 60), {"0 + ():() x 60 <- 100 + ():() x 60"}, {}},
        {"Apart", RunOf(0, 0, 10), RunOf(10, 100, 60), {}, {"0 + ():() x 10 <- 0 + ():() x 10"}},
        {"HeadAndTailAreLeft",
         RunOf(0, 0, 60),
         RunOf(10, 100, 20),
         {"10 + ():() x 20 <- 100 + ():() x 20"},
         {"0 + ():() x 10 <- 0 + ():() x 10", "30 + ():() x 30 <- 30 + ():() x 30"}},
        {"OffsetsAreFollowed",
         RunOf(7, 20, 10),
         RunOf(0, 100, 60),
         {"7 + ():() x 10 <- 120 + ():() x 10"},
         {}},
        {"MatrixOverColumns",  // cat of columns [2, 5)
         kMatrix,
         Map({6}, {2, {10}, 3}, {100, {3}, 3}),
         {"2 + (6):(10) x 3 <- 100 + (6):(3) x 3"},
         {"0 + (6):(10) x 2 <- 0 + (6):(10) x 2", "5 + (6):(10) x 5 <- 5 + (6):(10) x 5"}},
        {"ColumnsOfAMatrix",
         Map({6}, {0, {3}, 3}, {2, {10}, 3}),
         RunOf(0, 100, 60),
         {"0 + (6):(3) x 3 <- 102 + (6):(10) x 3"},
         {}},
        {"ColumnsCutByColumns",
         Map({6}, {0, {4}, 4}, {2, {10}, 4}),
         Map({6}, {4, {10}, 3}, {100, {3}, 3}),
         {"2 + (6):(4) x 2 <- 100 + (6):(3) x 2"},
         {"0 + (6):(4) x 2 <- 2 + (6):(10) x 2"}},
        {"TransposeOfAMatrix",
         Map({10, 6}, {0, {6, 1}, 1}, {0, {1, 10}, 1}),
         RunOf(0, 100, 60),
         {"0 + (10, 6):(6, 1) x 1 <- 100 + (10, 6):(1, 10) x 1"},
         {}},
        {"TransposeOfATranspose",
         Map({10, 6}, {0, {6, 1}, 1}, {0, {1, 10}, 1}),
         Map({6, 10}, {0, {10, 1}, 1}, {0, {1, 6}, 1}),
         {"0 + ():() x 60 <- 0 + ():() x 60"},
         {}},
        {"BroadcastOfABroadcast",
         Map({3, 4}, {0, {4, 1}, 1}, {5, {0, 1}, 1}),
         Map({10}, {0, {1}, 1}, {7, {0}, 1}),
         {"0 + (12):(1) x 1 <- 7 + (12):(0) x 1"},
         {}},
        {"BroadcastHalfWritten",
         Map({3}, {0, {4}, 4}, {4, {0}, 4}),
         RunOf(6, 100, 10),
         {"2 + (3):(4) x 2 <- 100 + (3):(0) x 2"},
         {"0 + (3):(4) x 2 <- 4 + (3):(0) x 2"}},
        {"FlipOfAFlip",
         Map({10}, {0, {1}, 1}, {9, {-1}, 1}),
         Map({10}, {0, {1}, 1}, {109, {-1}, 1}),
         {"0 + ():() x 10 <- 100 + ():() x 10"},
         {}},
        {"RowsOfTwoWidths",  // view(-1) of 6x10 read as 4x15: a tensor of another shape
         Map({4, 15}, {0, {20, 1}, 1}, {0, {15, 1}, 1}),
         RunOf(0, 100, 60),
         {"0 + (4):(20) x 15 <- 100 + (4):(15) x 15"},
         {}},
        {"DiagonalOfAMatrix",
         Map({6}, {0, {1}, 1}, {0, {11}, 1}),
         RunOf(0, 100, 60),
         {"0 + (6):(1) x 1 <- 100 + (6):(11) x 1"},
         {}},
        {"UnfoldOfARun",
         Map({5, 4}, {0, {4, 1}, 1}, {0, {2, 1}, 1}),
         RunOf(0, 100, 20),
         {"0 + (5):(4) x 4 <- 100 + (5):(2) x 4"},
         {}},
        {"CastAfterACopy",
         Map({4}, {0, {4}, 4}, {2, {2}, 2}, true),
         RunOf(0, 100, 20),
         {"0 + (4):(4) x 4 <-cast- 102 + (4):(2) x 2"},
         {}},
        {"CopyAfterACast",
         Map({2}, {0, {8}, 8}, {8, {16}, 8}),
         Map({12}, {0, {4}, 4}, {100, {2}, 2}, true),
         {"0 + (2, 2):(8, 4) x 4 <-cast- 104 + (2, 2):(8, 2) x 2"},
         {}},
        {"CastAfterACast",
         Map({4}, {0, {1}, 1}, {8, {4}, 4}, true),
         Map({12}, {0, {4}, 4}, {100, {2}, 2}, true),
         {"0 + (4):(1) x 1 <-cast- 104 + (4):(2) x 2"},
         {}},
        {"CastBesideACopy",
         Map({4}, {0, {4}, 4}, {0, {2}, 2}, true),
         RunOf(8, 100, 20),
         {},
         {"0 + (4):(4) x 4 <-cast- 0 + (4):(2) x 2"}},
        {"EmptyOuter", Map({0}, {0, {1}, 1}, {0, {1}, 1}), RunOf(0, 0, 9), {}, {}},
        {"EmptyInner",
         Map({3}, {0, {1}, 1}, {0, {1}, 1}),
         Map({0}, {0, {1}, 1}, {0, {1}, 1}),
         {},
         {"0 + ():() x 3 <- 0 + ():() x 3"}},
    }),
    [](const auto& test) { return test.param.name; });

struct CutCase {
  std::string name;
  StridedMap outer;
  StridedMap inner;
  std::string words;

  friend std::ostream& operator<<(std::ostream& s, const CutCase& c) { return s << c.name; }
};

class ComposeCutTest : public ::testing::TestWithParam<CutCase> {};

TEST_P(ComposeCutTest, IsRefused) {
  EXPECT_THAT(Compose(GetParam().outer, GetParam().inner),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(GetParam().words)));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, ComposeCutTest,
    ::testing::ValuesIn(std::vector<CutCase>{
        {"HalfOfAnItemWritten", Map({4}, {0, {4}, 4}, {0, {2}, 2}, true), RunOf(0, 100, 3),
         "the other operand has a part of it"},
        {"HalfOfAnItemRead", RunOf(0, 2, 8), Map({4}, {0, {4}, 4}, {0, {2}, 2}, true),
         "the other operand has a part of it"},
        {"BytesJoinedFromParts", Map({4}, {0, {4}, 4}, {0, {2}, 2}, true),
         Map({4, 2}, {0, {2, 1}, 1}, {1, {2, -1}, 1}), "`inner` joins it from parts"},
        {"BytesTakenApart", Map({4, 2}, {0, {1, 4}, 1}, {0, {2, 1}, 1}),
         Map({4}, {0, {2}, 2}, {0, {4}, 4}, true), "`outer` takes it apart"},
        {"TwoItemsizes", Map({2}, {0, {8}, 8}, {0, {4}, 4}, true),
         Map({4}, {0, {2}, 2}, {0, {4}, 4}, true), "itemsizes of two casts differ"},
        {"ItemsizesThatDoNotDivide", Map({2}, {0, {8}, 8}, {0, {4}, 4}, true),
         Map({2}, {0, {6}, 6}, {0, {4}, 4}, true), "itemsizes do not divide"},
        {"CastsShifted", Map({2}, {0, {8}, 8}, {2, {4}, 4}, true),
         Map({4}, {0, {4}, 4}, {0, {4}, 4}, true), "the other operand has a part of it"},
    }),
    [](const auto& test) { return test.param.name; });

TEST(ComposeTest, SlicesOfManyRowsStayOnePiece) {
  // Row-parallel slice of 7168 rows of a matrix that came through a temporary.
  const absl::StatusOr<Composition> result =
      Compose(Map({7168}, {0, {512}, 512}, {1024, {4096}, 512}),
              Map({7168, 2048}, {0, {4096, 2}, 2}, {64, {4096, 2}, 2}), /*max_pieces=*/4);
  ASSERT_THAT(result, IsOk());
  EXPECT_THAT(Printed(result->matched),
              ElementsAre("0 + (7168):(512) x 512 <- 1088 + (7168):(4096) x 512"));
  EXPECT_THAT(result->rest, IsEmpty());
}

TEST(ComposeTest, OneRowDoesNotSeeTheStridesOfOtherRows) {
  // One row of 96 bytes against rows of 100: no common digits, one row is left.
  const absl::StatusOr<Composition> result =
      Compose(Map({1000}, {0, {96}, 50}, {0, {96}, 50}),
              Map({1000}, {500 * 96, {100}, 50}, {0, {50}, 50}), /*max_pieces=*/3000);
  EXPECT_THAT(result, IsOk());
  const absl::StatusOr<Composition> row = Compose(Map({5, 10}, {0, {10, 1}, 1}, {960, {16, 1}, 1}),
                                                  Map({1000}, {0, {96}, 96}, {0, {100}, 96}),
                                                  /*max_pieces=*/4);
  ASSERT_THAT(row, IsOk());
  EXPECT_THAT(Printed(row->matched), ElementsAre("0 + (5):(10) x 10 <- 1000 + (5):(16) x 10"));
}

TEST(ComposeTest, UnrolledDimensionIsJoinedAgain) {
  const absl::StatusOr<Composition> result =
      Compose(Map({100}, {0, {2}, 2}, {0, {202}, 2}),         // a diagonal
              Map({100}, {0, {200}, 200}, {0, {512}, 200}));  // rows that were padded
  ASSERT_THAT(result, IsOk());
  EXPECT_THAT(Printed(result->matched), ElementsAre("0 + (100):(2) x 2 <- 0 + (100):(514) x 2"));
  EXPECT_THAT(result->rest, IsEmpty());
}

TEST(ComposeTest, TheWorkLimitIsAnError) {
  const StridedMap diagonal = Map({1000}, {0, {1}, 1}, {0, {1003}, 1});
  const StridedMap rows = Map({1000, 1001}, {0, {1002, 1}, 1}, {0, {2000, 1}, 1});
  EXPECT_THAT(Compose(diagonal, rows, 100),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("max_pieces")));
  EXPECT_THAT(Compose(diagonal, rows, 5000), IsOk());
  // Refused before the work, not after it.
  const Index n = Index{1} << 30;
  EXPECT_THAT(Compose(Map({n}, {0, {1}, 1}, {0, {n - 1}, 1}), Map({n}, {0, {n}, 1}, {0, {n}, 1})),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("max_pieces")));
}

TEST(ComposeTest, TheWorkLimitHoldsWhileDigitsAreSplit) {
  // Windows that overlap are taken one by one.
  const StridedMap windows = Map({1000, 1000}, {0, {1000, 1}, 1}, {0, {1, 1}, 1});
  EXPECT_THAT(Compose(windows, RunOf(5, 0, 100), 10),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("max_pieces")));
}

TEST(ComposeTest, OffsetsNearTheEndOfTheIndexRange) {
  const Index far = std::numeric_limits<Index>::max() - 100;
  const absl::StatusOr<Composition> result =
      Compose(RunOf(far, far, 100), RunOf(far + 10, far, 90));
  ASSERT_THAT(result, IsOk());
  EXPECT_EQ(result->matched, std::vector<StridedMap>{RunOf(far + 10, far, 90)});
  EXPECT_EQ(result->rest, std::vector<StridedMap>{RunOf(far, far, 10)});
}

TEST(SubtractToTest, ColumnsLeaveTheColumnsBeside) {
  const absl::StatusOr<std::vector<StridedMap>> rest =
      SubtractTo(Map({6}, {0, {20}, 10}, {0, {10}, 10}), Layout(3, {6}, {20}, 4));
  ASSERT_THAT(rest, IsOk());
  EXPECT_THAT(Printed(*rest), ElementsAre("0 + (6):(20) x 3 <- 0 + (6):(10) x 3",
                                          "7 + (6):(20) x 3 <- 7 + (6):(10) x 3"));
}

TEST(SubtractToTest, EmptyOperands) {
  EXPECT_THAT(*SubtractTo(Map({0}, {0, {1}, 1}, {0, {1}, 1}), Layout(0, {9}, {1}, 1)), IsEmpty());
  EXPECT_THAT(*SubtractTo(RunOf(0, 0, 9), Layout(0, {0}, {1}, 1)), ElementsAre(RunOf(0, 0, 9)));
}

TEST(SubtractToTest, ItemsOfACastAreNotCut) {
  const StridedMap cast = Map({4}, {0, {4}, 4}, {0, {2}, 2}, true);
  EXPECT_THAT(SubtractTo(cast, Layout(4, {}, {}, 4)), IsOk());
  EXPECT_THAT(SubtractTo(cast, Layout(4, {}, {}, 5)),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("would have to be cut")));
}

TEST(SubtractToTest, TheWorkLimitIsAnError) {
  const StridedMap rows = Map({1000, 1001}, {0, {1002, 1}, 1}, {0, {2000, 1}, 1});
  EXPECT_THAT(SubtractTo(rows, Layout(0, {1000}, {1005}, 1), 100),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("max_pieces")));
}

TEST(IntersectTest, RowsAndColumnsMeetInABox) {
  EXPECT_THAT(*Intersect(Layout(20, {3, 10}, {10, 1}, 1), Layout(2, {6, 4}, {10, 1}, 1)),
              ElementsAre(Layout(22, {3}, {10}, 4)));
  EXPECT_THAT(*Subtract(Layout(20, {3, 10}, {10, 1}, 1), Layout(0, {}, {}, 25)),
              ElementsAre(Layout(25, {}, {}, 25)));
}

TEST(IntersectTest, BytesThatRepeatComeOnce) {
  EXPECT_THAT(*Intersect(Layout(0, {5, 4}, {2, 1}, 1), Layout(1, {3, 9}, {0, 1}, 1)),
              ElementsAre(Layout(1, {}, {}, 9)));
  EXPECT_THAT(*Subtract(Layout(0, {5, 4}, {2, 1}, 1), Layout(0, {0}, {1}, 1)),
              ElementsAre(Layout(0, {}, {}, 12)));
}

TEST(IntersectTest, EmptyOperands) {
  EXPECT_THAT(*Intersect(Layout(0, {0}, {1}, 1), Layout(0, {9}, {1}, 1)), IsEmpty());
  EXPECT_THAT(*Intersect(Layout(0, {9}, {1}, 1), Layout(0, {0}, {1}, 1)), IsEmpty());
  EXPECT_THAT(*Subtract(Layout(0, {0}, {1}, 1), Layout(0, {9}, {1}, 1)), IsEmpty());
}

TEST(IntersectTest, TheWorkLimitIsAnError) {
  const StridedLayout a = Layout(0, {1000}, {1001}, 1);
  const StridedLayout b = Layout(1, {1000}, {1003}, 1);
  EXPECT_THAT(Intersect(a, b, 100),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("max_pieces")));
  EXPECT_THAT(Subtract(a, b, 100),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("max_pieces")));
}

}  // namespace
}  // namespace loadplan
