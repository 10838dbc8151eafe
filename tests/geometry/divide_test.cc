#include "geometry/divide.h"

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
using loadplan::testing::Pair;
using loadplan::testing::Pairs;
using loadplan::testing::StatusIs;
using ::testing::HasSubstr;

TEST(DivideTest, RegularGridsTakeFewPieces) {
  // Columns of 7168 rows out of a matrix: the part itself and what is left of it.
  Index pieces_left = 10;
  Index nbytes = 0;
  std::vector<Grid> rest;
  EXPECT_THAT(Divide(
                  GridOf(Layout(0, {7168}, {4096}, 4096)), GridOf(Layout(64, {7168}, {4096}, 32)),
                  &pieces_left,
                  [&](const CommonPart& part) {
                    nbytes += part.nbytes();
                    return absl::OkStatus();
                  },
                  &rest),
              IsOk());
  EXPECT_EQ(nbytes, 7168 * 32);
  EXPECT_EQ(rest.size(), 2u);
  EXPECT_EQ(pieces_left, 7);
}

TEST(DivideTest, ErrorsOfTheCallbackEndIt) {
  Index pieces_left = 10;
  const Grid run = GridOf(Layout(0, {}, {}, 9));
  EXPECT_THAT(Divide(
                  run, run, &pieces_left,
                  [](const CommonPart&) { return absl::InternalError("stop here"); }, nullptr),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("stop here")));
}

TEST(DividePropertyTest, EachPairIsInOnePart) {
  ForEachRandom(4000, [](std::mt19937& gen) {
    const StridedMap map = loadplan::testing::RandomInner(gen, 96, false);
    const StridedLayout region = loadplan::testing::RandomLayout(gen, 96);
    if (map.empty() || region.empty()) return;
    SCOPED_TRACE(ToString(map) + " by " + ToString(region));
    const std::set<Index> bytes = loadplan::testing::ByteSet(region);
    std::vector<Pair> all;
    const auto append = [&](const Grid& grid, bool inside) {
      for (const Pair& pair : Pairs(MapOf(grid, Side::kTo, {}))) {
        EXPECT_EQ(bytes.count(pair.first) != 0, inside);
        all.push_back(pair);
      }
    };
    std::vector<Grid> rest;
    Index pieces_left = 1 << 20;
    const auto on_common = [&](const CommonPart& part) {
      append(part.OnA(), true);
      return absl::OkStatus();
    };
    // `region` may repeat bytes: still each pair comes once.
    ASSERT_THAT(
        Divide(GridOf(map, Side::kTo, nullptr), GridOf(region), &pieces_left, on_common, &rest),
        IsOk());
    for (const Grid& grid : rest) append(grid, false);
    std::sort(all.begin(), all.end());
    EXPECT_EQ(all, loadplan::testing::SortedPairs(map));
  });
}

}  // namespace
}  // namespace loadplan::geometry_internal
