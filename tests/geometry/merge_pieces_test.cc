// MergePieces of geometry/compose.h: the same pairs in fewer maps.
#include <algorithm>
#include <string>
#include <vector>

#include "geometry/compose.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/oracle.h"
#include "tests/testing/random_geometry.h"
#include "tests/testing/seed.h"

namespace loadplan {
namespace {

using testing::ForEachRandom;
using testing::Map;
using testing::SortedPairs;
using testing::Uniform;

std::vector<StridedMap> CheckMerge(const std::vector<StridedMap>& pieces) {
  const std::vector<StridedMap> merged = MergePieces(pieces);
  EXPECT_EQ(SortedPairs(merged), SortedPairs(pieces));
  EXPECT_LE(merged.size(), pieces.size());
  Index start = -1;
  for (const StridedMap& map : merged) {
    EXPECT_EQ(Coalesce(map), map);
    EXPECT_GT(map.to().byte_offset, start) << "not sorted";
    start = map.to().byte_offset;
  }
  return merged;
}

struct MergeCase {
  std::string name;
  std::vector<StridedMap> pieces;
  std::vector<std::string> merged;

  friend std::ostream& operator<<(std::ostream& s, const MergeCase& c) { return s << c.name; }
};

class MergePiecesTest : public ::testing::TestWithParam<MergeCase> {};

TEST_P(MergePiecesTest, KeepsThePairs) {
  std::vector<std::string> printed;
  for (const StridedMap& map : CheckMerge(GetParam().pieces)) printed.push_back(ToString(map));
  EXPECT_EQ(printed, GetParam().merged);
  // The order of the pieces does not matter.
  std::vector<StridedMap> reversed = GetParam().pieces;
  std::reverse(reversed.begin(), reversed.end());
  EXPECT_EQ(MergePieces(reversed), MergePieces(GetParam().pieces));
}

StridedMap RunOf(Index to, Index from, Index nbytes) {
  return Map({}, {to, {}, nbytes}, {from, {}, nbytes});
}

std::vector<StridedMap> Runs(Index count, Index to_step, Index from_step, Index nbytes) {
  std::vector<StridedMap> runs;
  for (Index i = 0; i < count; ++i) {
    runs.push_back(RunOf(i * to_step, 100 + i * from_step, nbytes));
  }
  return runs;
}

INSTANTIATE_TEST_SUITE_P(
    Cases, MergePiecesTest,
    ::testing::ValuesIn(std::vector<MergeCase>{
        {"None", {}, {}},
        {"EmptyOnesGo", {Map({0}, {0, {1}, 1}, {0, {1}, 1})}, {}},
        {"OneIsCoalesced",
         {Map({2, 3}, {0, {3, 1}, 1}, {0, {3, 1}, 1})},
         {"0 + ():() x 6 <- 0 + ():() x 6"}},
        {"ByteAfterByte", {RunOf(0, 10, 4), RunOf(4, 14, 3)}, {"0 + ():() x 7 <- 10 + ():() x 7"}},
        {"OnlyToContinues",
         {RunOf(0, 10, 4), RunOf(4, 15, 3)},
         {"0 + ():() x 4 <- 10 + ():() x 4", "4 + ():() x 3 <- 15 + ():() x 3"}},
        {"OnlyFromContinues",
         {RunOf(0, 10, 4), RunOf(5, 14, 3)},
         {"0 + ():() x 4 <- 10 + ():() x 4", "5 + ():() x 3 <- 14 + ():() x 3"}},
        {"HalvesOfRows",
         {Map({3}, {0, {8}, 4}, {0, {16}, 4}), Map({3}, {4, {8}, 4}, {4, {16}, 4})},
         {"0 + (3):(8) x 8 <- 0 + (3):(16) x 8"}},
        {"BlocksOfRows",
         {Map({3}, {0, {9}, 4}, {0, {16}, 4}), Map({2}, {27, {9}, 4}, {48, {16}, 4})},
         {"0 + (5):(9) x 4 <- 0 + (5):(16) x 4"}},
        {"BlocksOfAFlip",
         {Map({3}, {0, {4}, 4}, {80, {-4}, 4}), Map({2}, {12, {4}, 4}, {68, {-4}, 4})},
         {"0 + (5):(4) x 4 <- 80 + (5):(-4) x 4"}},
        {"LastRowAlone",
         {Map({3}, {0, {9}, 4}, {0, {16}, 4}), RunOf(27, 48, 4)},
         {"0 + (4):(9) x 4 <- 0 + (4):(16) x 4"}},
        {"FirstRowsAlone",
         {RunOf(0, 0, 4), RunOf(9, 16, 4), Map({3}, {18, {9}, 4}, {32, {16}, 4})},
         {"0 + (5):(9) x 4 <- 0 + (5):(16) x 4"}},
        {"RowsBecomeADimension", Runs(5, 6, 10, 4), {"0 + (5):(6) x 4 <- 100 + (5):(10) x 4"}},
        {"DiagonalBecomesOne", Runs(9, 2, 22, 2), {"0 + (9):(2) x 2 <- 100 + (9):(22) x 2"}},
        {"TwoRowBlocksStayApart",
         Runs(2, 12, 48, 12),
         {"0 + ():() x 12 <- 100 + ():() x 12", "12 + ():() x 12 <- 148 + ():() x 12"}},
        {"CastItems",
         {Map({2}, {0, {4}, 4}, {0, {2}, 2}, true), Map({3}, {8, {4}, 4}, {4, {2}, 2}, true)},
         {"0 + (5):(4) x 4 <-cast- 0 + (5):(2) x 2"}},
        {"CastAndCopyStayApart",
         {Map({}, {0, {}, 4}, {0, {}, 4}, true), Map({}, {4, {}, 4}, {4, {}, 4})},
         {"0 + ():() x 4 <-cast- 0 + ():() x 4", "4 + ():() x 4 <- 4 + ():() x 4"}},
    }),
    [](const auto& test) { return test.param.name; });

TEST(MergePiecesTest, ManyRowsInAGrid) {
  // 4 x 50 rows of 3 bytes, in disorder.
  std::vector<StridedMap> pieces;
  for (Index i = 0; i < 200; ++i) {
    const Index k = i * 77 % 200;
    pieces.push_back(RunOf(k / 50 * 1000 + k % 50 * 5, k / 50 * 7000 + k % 50 * 10, 3));
  }
  EXPECT_THAT(CheckMerge(pieces),
              ::testing::ElementsAre(Map({4, 50}, {0, {1000, 5}, 3}, {0, {7000, 10}, 3})));
}

TEST(MergePiecesPropertyTest, KeepsThePairsOfRandomPieces) {
  ForEachRandom(3000, [](std::mt19937& gen) {
    // Pieces of one map, cut along random dimensions.
    std::vector<StridedMap> pieces{testing::RandomInner(gen, 96, Uniform(gen, 0, 4) == 0)};
    for (Index cuts = Uniform(gen, 0, 12); cuts > 0; --cuts) {
      const auto i = static_cast<size_t>(Uniform(gen, 0, static_cast<Index>(pieces.size()) - 1));
      const StridedMap map = pieces[i];
      if (map.shape().empty()) continue;
      const auto d =
          static_cast<size_t>(Uniform(gen, 0, static_cast<Index>(map.shape().size()) - 1));
      const Index at = Uniform(gen, 0, map.shape()[d]);
      DimVector head = map.shape();
      DimVector tail = map.shape();
      head[d] = at;
      tail[d] -= at;
      MapSide to = map.to();
      MapSide from = map.from();
      to.byte_offset += at * to.byte_strides[d];
      from.byte_offset += at * from.byte_strides[d];
      pieces[i] = Map(head, map.to(), map.from(), map.is_cast());
      pieces.push_back(Map(tail, to, from, map.is_cast()));
    }
    std::shuffle(pieces.begin(), pieces.end(), gen);
    const std::vector<StridedMap> merged = MergePieces(pieces);
    EXPECT_EQ(SortedPairs(merged), SortedPairs(pieces));
    for (const StridedMap& map : merged) EXPECT_EQ(Coalesce(map), map);
  });
}

TEST(MergePiecesPropertyTest, JoinsBlocksOfAMatrix) {
  ForEachRandom(500, [](std::mt19937& gen) {
    // A matrix cut into rows of blocks and each of those into columns.
    std::vector<StridedMap> pieces;
    const Index rows = Uniform(gen, 4, 9);  // two or three single rows stay apart
    for (Index row = 0; row < rows;) {
      const Index height = Uniform(gen, 1, rows - row);
      for (Index column = 0; column < 12;) {
        const Index width = Uniform(gen, 1, 12 - column);
        pieces.push_back(
            Map({height, width}, {row * 20 + column, {20, 1}, 1}, {row * 12 + column, {12, 1}, 1}));
        column += width;
      }
      row += height;
    }
    std::shuffle(pieces.begin(), pieces.end(), gen);
    EXPECT_EQ(MergePieces(pieces).size(), 1u);
  });
}

}  // namespace
}  // namespace loadplan
