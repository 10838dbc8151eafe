#include "transfer/shards.h"

#include <algorithm>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/oracle.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"
#include "tests/transfer/random_shards.h"

namespace loadplan {
namespace {

using ::testing::AllOf;
using testing::Elements;
using ::testing::ElementsAre;
using testing::ForEachRandom;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::RandomBox;
using testing::RandomPartition;
using testing::StatusIs;
using testing::Uniform;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

absl::Status Check(const DimVector& shape, const std::vector<ShardPiece>& pieces,
                   bool must_cover = true) {
  return DistinctBoxes("w", shape, pieces, must_cover).status();
}

TEST(DistinctBoxesTest, UnevenRowsAreAnExactCover) {
  EXPECT_THAT(Check({5, 6}, {{0, Box({{0, 3}, {0, 6}})}, {1, Box({{3, 5}, {0, 6}})}}), IsOk());
}

TEST(DistinctBoxesTest, EqualBoxesAreReplicas) {
  const auto boxes = DistinctBoxes(
      "w", {4},
      std::vector<ShardPiece>{
          {3, Box({{2, 4}})}, {0, Box({{0, 2}})}, {1, Box({{2, 4}})}, {2, Box({{0, 2}})}},
      true);
  ASSERT_THAT(boxes, IsOk());
  ASSERT_EQ(boxes->size(), 2U);
  EXPECT_EQ((*boxes)[0].box, Box({{0, 2}}));
  EXPECT_THAT((*boxes)[0].ranks, ElementsAre(0, 2));
  EXPECT_THAT((*boxes)[1].ranks, ElementsAre(1, 3));
}

TEST(DistinctBoxesTest, EmptyShardsOfUnevenCutsDoNotCount) {
  const auto boxes = DistinctBoxes(
      "w", {2}, std::vector<ShardPiece>{{0, Box({{0, 2}})}, {1, Box({{2, 2}})}, {2, Box({{2, 2}})}},
      true);
  ASSERT_THAT(boxes, IsOk());
  EXPECT_EQ(boxes->size(), 1U);
}

TEST(DistinctBoxesTest, ScalarsAndEmptyTensors) {
  EXPECT_THAT(Check({}, {{0, Box()}, {1, Box()}}), IsOk());
  EXPECT_THAT(Check({}, {}), StatusIs(kInvalid, HasSubstr("hold 0 of 1 elements")));
  EXPECT_THAT(Check({0, 4}, {}), IsOk());
}

TEST(DistinctBoxesTest, GapIsNamed) {
  EXPECT_THAT(Check({4, 4}, {{0, Box({{0, 2}, {0, 4}})}}),
              StatusIs(kInvalid, AllOf(HasSubstr("`w`"), HasSubstr("8 of 16 elements"),
                                       HasSubstr("no rank holds [2:4, 0:4]"))));
  EXPECT_THAT(Check({4, 4}, {{0, Box({{0, 2}, {0, 4}})}}, /*must_cover=*/false), IsOk());
}

TEST(DistinctBoxesTest, PartialOverlapIsRefused) {
  EXPECT_THAT(Check({4, 4}, {{0, Box({{0, 3}, {0, 4}})}, {1, Box({{2, 4}, {0, 4}})}}),
              StatusIs(kInvalid, AllOf(HasSubstr("`w`"), HasSubstr("[0:3, 0:4] of rank 0"),
                                       HasSubstr("[2:4, 0:4] of rank 1"), HasSubstr("overlap"))));
}

TEST(DistinctBoxesTest, NoBoxOfTheTensor) {
  EXPECT_THAT(Check({4}, {{2, Box({{0, 5}})}}),
              StatusIs(kInvalid, HasSubstr("the shard [0:5] of rank 2 is no box of a tensor of "
                                           "shape (4,)")));
  EXPECT_THAT(Check({4}, {{2, Box({{0, 4}, {0, 1}})}}), StatusIs(kInvalid, HasSubstr("no box")));
  EXPECT_THAT(Check({4}, {{-1, Box({{0, 4}})}}), StatusIs(kInvalid, HasSubstr("rank -1")));
}

TEST(DistinctBoxesTest, OneRankTwice) {
  EXPECT_THAT(Check({4}, {{2, Box({{0, 4}})}, {2, Box({{0, 4}})}}),
              StatusIs(kInvalid, HasSubstr("rank 2 holds the shard [0:4] twice")));
}

// Brute force: how many distinct boxes hold each element.
TEST(DistinctBoxesPropertyTest, AgreesWithCounting) {
  ForEachRandom(300, [](std::mt19937& gen) {
    DimVector shape;
    for (Index d = Uniform(gen, 0, 3); d > 0; --d) shape.push_back(Uniform(gen, 1, 7));
    std::vector<ShardPiece> pieces = RandomPartition(gen, Box::Whole(shape), 6);
    const Index fault = Uniform(gen, 0, 2);
    if (fault == 1) pieces.pop_back();
    if (fault == 2) pieces.push_back({9, RandomBox(gen, shape)});
    std::vector<Box> distinct;
    for (const ShardPiece& piece : pieces) {
      if (std::ranges::find(distinct, piece.box) == distinct.end()) distinct.push_back(piece.box);
    }
    std::vector<int> count(static_cast<std::size_t>(Box::Whole(shape).num_elements()), 0);
    for (const Box& box : distinct) {
      for (const Index element : Elements(box, shape)) ++count[static_cast<std::size_t>(element)];
    }
    const bool is_disjoint = std::ranges::all_of(count, [](int n) { return n <= 1; });
    const bool is_cover = std::ranges::all_of(count, [](int n) { return n == 1; });
    EXPECT_EQ(Check(shape, pieces, true).ok(), is_cover);
    EXPECT_EQ(Check(shape, pieces, false).ok(), is_disjoint);
    const auto boxes = DistinctBoxes("w", shape, pieces, false);
    if (!boxes.ok() || is_cover) return;
    for (const Index element : Elements(FirstGap(Box::Whole(shape), *boxes), shape)) {
      EXPECT_EQ(count[static_cast<std::size_t>(element)], 0);
    }
  });
}

TEST(BoxIndexPropertyTest, FindsWhatAScanFinds) {
  ForEachRandom(200, [](std::mt19937& gen) {
    const DimVector shape = {Uniform(gen, 1, 9), Uniform(gen, 1, 9)};
    std::vector<OwnedBox> boxes;
    for (const ShardPiece& piece : RandomPartition(gen, Box::Whole(shape), 8)) {
      boxes.push_back({piece.box, {piece.rank}});
    }
    const Box query = RandomBox(gen, shape);
    std::vector<std::int32_t> found;
    BoxIndex(boxes).ForEachMeeting(query, [&](std::int32_t position, const Box& common) {
      found.push_back(position);
      EXPECT_EQ(common, *Intersect(boxes[static_cast<std::size_t>(position)].box, query));
    });
    std::ranges::sort(found);
    std::vector<std::int32_t> scanned;
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      if (Intersect(boxes[i].box, query)) scanned.push_back(static_cast<std::int32_t>(i));
    }
    EXPECT_EQ(found, scanned);
  });
}

}  // namespace
}  // namespace loadplan
