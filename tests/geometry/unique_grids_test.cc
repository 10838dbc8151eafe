#include "geometry/unique_grids.h"

#include <algorithm>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/oracle.h"
#include "tests/testing/random_geometry.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"

namespace loadplan::geometry_internal {
namespace {

using loadplan::testing::ForEachRandom;
using loadplan::testing::IsOk;
using loadplan::testing::Layout;
using loadplan::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::SizeIs;

void CheckUnique(const StridedLayout& layout) {
  SCOPED_TRACE(ToString(layout));
  const absl::StatusOr<std::vector<Grid>> grids = UniqueGrids(layout, 1 << 20);
  ASSERT_THAT(grids, IsOk());
  std::vector<Index> bytes;
  for (const Grid& grid : *grids) {
    for (const auto& [t, o] : loadplan::testing::Pairs(MapOf(grid, Side::kTo, {}))) {
      EXPECT_EQ(t, o);
      bytes.push_back(t);
    }
  }
  std::sort(bytes.begin(), bytes.end());
  const std::set<Index> expected = loadplan::testing::ByteSet(layout);
  EXPECT_EQ(bytes, std::vector<Index>(expected.begin(), expected.end()));
}

TEST(UniqueGridsTest, RegularRepeatsAreOneGrid) {
  EXPECT_THAT(*UniqueGrids(Layout(0, {1000, 4}, {2, 1}, 1), 1), SizeIs(1));        // unfold
  EXPECT_THAT(*UniqueGrids(Layout(0, {50, 10, 4}, {20, 0, 1}, 2), 1), SizeIs(1));  // expand
  EXPECT_THAT(*UniqueGrids(Layout(0, {10, 3, 4}, {100, 20, 20}, 2), 1), SizeIs(1));
  EXPECT_THAT(*UniqueGrids(Layout(0, {0}, {1}, 1), 1), SizeIs(0));
}

TEST(UniqueGridsTest, IrregularRepeatsAreTakenApart) {
  CheckUnique(Layout(0, {5, 4, 3}, {7, 11, 13}, 3));
  CheckUnique(Layout(0, {6, 6}, {4, 6}, 1));
  EXPECT_THAT(UniqueGrids(Layout(0, {50, 40, 30}, {7, 11, 13}, 3), 10),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("repeats bytes")));
}

TEST(FoldDimsTest, JoinsOnlyWhatLeavesNoGap) {
  GridDims windows{{4, 1, 0}, {5, 2, 0}, {3, 20, 0}};
  FoldDims(&windows);
  EXPECT_EQ(windows, (GridDims{{12, 1, 0}, {3, 20, 0}}));
  GridDims rows{{4, 1, 0}, {5, 4, 0}, {3, 20, 0}};
  FoldDims(&rows);
  EXPECT_EQ(rows, (GridDims{{60, 1, 0}}));
  GridDims gaps{{4, 1, 0}, {5, 5, 0}};
  FoldDims(&gaps);
  EXPECT_EQ(gaps, (GridDims{{4, 1, 0}, {5, 5, 0}}));
}

TEST(UniqueGridsPropertyTest, HoldEachByteOnce) {
  ForEachRandom(3000, [](std::mt19937& gen) {
    CheckUnique(loadplan::testing::RandomLayout(gen, 96));
    CheckUnique(loadplan::testing::RandomAsStrided(gen, 96));
  });
}

}  // namespace
}  // namespace loadplan::geometry_internal
