#include "geometry/grid.h"

#include <algorithm>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/oracle.h"
#include "tests/testing/random_geometry.h"
#include "tests/testing/seed.h"

namespace loadplan::geometry_internal {
namespace {

using loadplan::testing::ForEachRandom;
using loadplan::testing::Map;
using loadplan::testing::Pair;
using loadplan::testing::SortedPairs;
using loadplan::testing::Uniform;

std::vector<Pair> PairsOf(const Grid& grid) { return SortedPairs(MapOf(grid, Side::kTo, {})); }

TEST(GridTest, StridesAscendAndFlipsAreTurned) {
  const Grid grid = GridOf(Map({2, 3}, {0, {3, 1}, 1}, {10, {1, -4}, 1}), Side::kFrom, nullptr);
  EXPECT_EQ(grid.offset, 2);
  EXPECT_EQ(grid.other_offset, 2);
  EXPECT_EQ(grid.dims, (GridDims{{2, 1, 3}, {3, 4, -1}}));
  EXPECT_EQ(grid.Span(), (ByteRange{2, 12}));
}

TEST(GridTest, RepeatsAreSetAside) {
  GridDims repeats;
  const Grid grid = GridOf(Map({5, 3}, {0, {3, 1}, 1}, {4, {0, 1}, 1}), Side::kFrom, &repeats);
  EXPECT_EQ(grid.dims, (GridDims{{3, 1, 1}}));
  EXPECT_EQ(repeats, (GridDims{{5, 0, 3}}));
}

TEST(GridTest, TheItemOfACastIsKept) {
  const Grid grid = GridOf(Map({3}, {0, {4}, 4}, {0, {2}, 2}, true), Side::kTo, nullptr);
  EXPECT_TRUE(grid.HasAtomDim());
  EXPECT_EQ(grid.atom, 4);
  EXPECT_EQ(grid.other_atom, 2);
  EXPECT_EQ(grid.dims, (GridDims{{4, 1, 0}, {3, 4, 2}}));
}

TEST(ClipToSpanTest, KeepsRowsThatReachIn) {
  Grid grid = GridOf(loadplan::testing::Layout(0, {10}, {20}, 5));
  std::vector<Grid> outside;
  bool vanished = true;
  // Row 2 is 40..45, row 5 is 100..105.
  EXPECT_TRUE(ClipToSpan({44, 101}, &grid, &outside, &vanished));
  EXPECT_FALSE(vanished);
  EXPECT_EQ(grid.Span(), (ByteRange{40, 105}));
  ASSERT_EQ(outside.size(), 2u);
  EXPECT_EQ(outside[0].Span(), (ByteRange{0, 25}));
  EXPECT_EQ(outside[1].Span(), (ByteRange{120, 185}));
  EXPECT_FALSE(ClipToSpan({44, 101}, &grid, &outside, &vanished));
}

TEST(GridPropertyTest, MapOfIsTheInverse) {
  ForEachRandom(4000, [](std::mt19937& gen) {
    const StridedMap map = loadplan::testing::RandomInner(gen, 96, Uniform(gen, 0, 2) == 0);
    if (map.empty()) return;
    for (const Side side : {Side::kTo, Side::kFrom}) {
      GridDims repeats;
      const Grid grid = GridOf(map, side, &repeats);
      for (size_t d = 1; d < grid.dims.size(); ++d) {
        EXPECT_LE(grid.dims[d - 1].stride, grid.dims[d].stride);
      }
      EXPECT_EQ(SortedPairs(MapOf(grid, side, repeats)), SortedPairs(map)) << map;
    }
  });
}

TEST(GridPropertyTest, ClippingLosesNothingThatMeetsTheSpan) {
  ForEachRandom(4000, [](std::mt19937& gen) {
    const StridedMap map = loadplan::testing::RandomInner(gen, 96, Uniform(gen, 0, 2) == 0);
    if (map.empty()) return;
    const Grid grid = GridOf(map, Side::kTo, nullptr);
    const Index start = Uniform(gen, 0, 100);
    const ByteRange range{start, Uniform(gen, start + 1, 110)};
    Grid clipped = grid;
    std::vector<Grid> outside;
    bool vanished = false;
    const bool changed = ClipToSpan(range, &clipped, &outside, &vanished);
    EXPECT_EQ(changed, !outside.empty());
    std::vector<Pair> pairs;
    for (const Grid& part : outside) {
      const Index itemsize = std::max<Index>(part.atom, 1);
      for (const Pair& pair : PairsOf(part)) {
        EXPECT_TRUE(pair.first + itemsize <= range.start || pair.first >= range.stop);
        pairs.push_back(pair);
      }
    }
    if (!vanished) {
      const std::vector<Pair> more = PairsOf(clipped);
      pairs.insert(pairs.end(), more.begin(), more.end());
    }
    std::sort(pairs.begin(), pairs.end());
    EXPECT_EQ(pairs, PairsOf(grid)) << map;
  });
}

}  // namespace
}  // namespace loadplan::geometry_internal
