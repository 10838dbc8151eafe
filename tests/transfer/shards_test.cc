#include "transfer/shards.h"

#include <algorithm>
#include <set>
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

// D8 of the peer's cases: the row that both hold is one box with two owners.
TEST(DistinctBoxesTest, PartialOverlapIsAReplica) {
  const auto boxes = DistinctBoxes(
      "w", {4, 4}, std::vector<ShardPiece>{{1, Box({{2, 4}, {0, 4}})}, {0, Box({{0, 3}, {0, 4}})}},
      true);
  ASSERT_THAT(boxes, IsOk());
  ASSERT_EQ(boxes->size(), 3U);
  EXPECT_EQ((*boxes)[1].box, Box({{2, 3}, {0, 4}}));
  EXPECT_THAT((*boxes)[0].ranks, ElementsAre(0));
  EXPECT_THAT((*boxes)[1].ranks, ElementsAre(0, 1));
  EXPECT_THAT((*boxes)[2].ranks, ElementsAre(1));
}

TEST(DistinctBoxesTest, OneRankInTwoPiecesThatOverlapIsOneOwner) {
  const auto boxes = DistinctBoxes(
      "w", {4}, std::vector<ShardPiece>{{0, Box({{0, 3}})}, {0, Box({{2, 4}})}}, true);
  ASSERT_THAT(boxes, IsOk());
  for (const OwnedBox& owned : *boxes) EXPECT_THAT(owned.ranks, ElementsAre(0));
}

TEST(DistinctBoxesTest, TooManyOverlapsAreRefused) {
  std::vector<ShardPiece> pieces;
  for (Index i = 0; i < 100; ++i) {
    pieces.push_back({static_cast<std::int32_t>(i), Box({{i, i + 1}, {0, 100}})});
    pieces.push_back({static_cast<std::int32_t>(100 + i), Box({{0, 100}, {i, i + 1}})});
  }
  EXPECT_THAT(Check({100, 100}, pieces),
              StatusIs(kInvalid, HasSubstr("overlap in more than 4096 places")));
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

// Brute force: which ranks hold each element.
TEST(DistinctBoxesPropertyTest, AgreesWithCounting) {
  ForEachRandom(300, [](std::mt19937& gen) {
    DimVector shape;
    for (Index d = Uniform(gen, 0, 3); d > 0; --d) shape.push_back(Uniform(gen, 1, 7));
    std::vector<ShardPiece> pieces = RandomPartition(gen, Box::Whole(shape), 6);
    if (Uniform(gen, 0, 2) == 0) pieces.pop_back();
    for (std::int32_t k = 0; Uniform(gen, 0, 2) > 0 && k < 5; ++k) {
      pieces.push_back({20 + k / 2, RandomBox(gen, shape)});
    }
    const bool is_twice = std::ranges::any_of(pieces, [&](const ShardPiece& piece) {
      return piece.box.num_elements() > 0 && std::ranges::count(pieces, piece) > 1;
    });
    std::vector<std::set<std::int32_t>> holders(
        static_cast<std::size_t>(Box::Whole(shape).num_elements()));
    for (const ShardPiece& piece : pieces) {
      for (const Index element : Elements(piece.box, shape)) {
        holders[static_cast<std::size_t>(element)].insert(piece.rank);
      }
    }
    const bool is_cover = std::ranges::all_of(holders, [](const auto& of) { return !of.empty(); });
    EXPECT_EQ(Check(shape, pieces, true).ok(), is_cover && !is_twice);
    const auto boxes = DistinctBoxes("w", shape, pieces, false);
    EXPECT_EQ(boxes.ok(), !is_twice);
    if (!boxes.ok()) return;
    std::vector<std::set<std::int32_t>> owners(holders.size());
    for (const OwnedBox& owned : *boxes) {
      EXPECT_TRUE(std::ranges::is_sorted(owned.ranks));
      for (const Index element : Elements(owned.box, shape)) {
        auto& of = owners[static_cast<std::size_t>(element)];
        EXPECT_TRUE(of.empty()) << "element " << element << " is in two boxes";
        of.insert(owned.ranks.begin(), owned.ranks.end());
        EXPECT_EQ(of.size(), owned.ranks.size());
      }
    }
    EXPECT_EQ(owners, holders);
    if (is_cover) return;
    for (const Index element : Elements(FirstGap(Box::Whole(shape), *boxes), shape)) {
      EXPECT_TRUE(holders[static_cast<std::size_t>(element)].empty());
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
