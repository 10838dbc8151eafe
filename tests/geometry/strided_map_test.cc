#include "geometry/strided_map.h"

#include <algorithm>
#include <concepts>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/oracle.h"
#include "tests/testing/random_geometry.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using testing::ForEachRandom;
using ::testing::HasSubstr;
using testing::Layout;
using testing::Map;
using testing::Pair;
using testing::Pairs;
using testing::SortedPairs;
using testing::StatusIs;
using testing::Uniform;

static_assert(std::regular<StridedMap>);
static_assert(std::regular<MapSide>);

TEST(StridedMapTest, CreatePairsItems) {
  const absl::StatusOr<StridedMap> map =
      StridedMap::Create(Layout(8, {2, 3}, {12, 4}, 4), Layout(0, {2, 3}, {4, 8}, 4));
  ASSERT_TRUE(map.ok());
  EXPECT_EQ(map->num_elements(), 6);
  EXPECT_EQ(map->nbytes(), 24);
  EXPECT_EQ(map->ToLayout(), Layout(8, {2, 3}, {12, 4}, 4));
  EXPECT_EQ(map->ToSpan(), (ByteRange{8, 32}));
  EXPECT_EQ(map->FromSpan(), (ByteRange{0, 24}));
  EXPECT_EQ(ToString(*map), "8 + (2, 3):(12, 4) x 4 <- 0 + (2, 3):(4, 8) x 4");
  std::ostringstream stream;
  stream << *map;
  EXPECT_EQ(stream.str(), ToString(*map));
}

TEST(StridedMapTest, CreateReportsShapes) {
  EXPECT_THAT(StridedMap::Create(Layout(0, {2, 3}, {3, 1}, 1), Layout(0, {3, 2}, {2, 1}, 1)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("`to` has shape (2, 3) and `from` (3, 2)")));
}

TEST(StridedMapTest, CreateReportsItemsizes) {
  const StridedLayout to = Layout(0, {2}, {4}, 4);
  const StridedLayout from = Layout(0, {2}, {2}, 2);
  EXPECT_THAT(StridedMap::Create(to, from),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("items of 4 bytes and `from` of 2; only a cast may differ")));
  EXPECT_TRUE(StridedMap::Create(to, from, /*is_cast=*/true).ok());
}

TEST(StridedMapTest, CreateReportsBytesWrittenTwice) {
  const StridedLayout broadcast = Layout(0, {1, 3}, {0, 0}, 1);
  const StridedLayout dense = Layout(0, {1, 3}, {3, 1}, 1);
  EXPECT_THAT(StridedMap::Create(broadcast, dense),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("`to` has stride 0 in dimension 1 of extent 3")));
  EXPECT_TRUE(StridedMap::Create(dense, broadcast).ok());
}

TEST(StridedMapTest, DefaultIsOneByte) {
  EXPECT_EQ(ToString(StridedMap()), "0 + ():() x 1 <- 0 + ():() x 1");
}

TEST(StridedMapTest, IdentityPairsEachByteWithItself) {
  for (const Pair& pair : Pairs(StridedMap::Identity(Layout(3, {2, 2}, {9, 2}, 2)))) {
    EXPECT_EQ(pair.first, pair.second);
  }
}

TEST(StridedMapTest, SpansOfFlipsAndEmptyMaps) {
  EXPECT_EQ(Map({3}, {0, {2}, 2}, {10, {-4}, 2}).FromSpan(), (ByteRange{2, 12}));
  const StridedMap empty = Map({3, 0}, {5, {2, 2}, 2}, {10, {-4, 2}, 2});
  EXPECT_TRUE(empty.empty());
  EXPECT_TRUE(empty.ToSpan().empty());
  EXPECT_TRUE(empty.FromSpan().empty());
}

TEST(StridedMapTest, HugeEmptyMapHasNoElements) {
  const Index huge = Index{1} << 62;
  EXPECT_EQ(Map({huge, huge, 0}, {0, {1, 1, 1}, 1}, {0, {1, 1, 1}, 1}).num_elements(), 0);
}

// Postconditions of Coalesce.
void CheckCoalesce(const StridedMap& map) {
  SCOPED_TRACE(ToString(map));
  const StridedMap result = Coalesce(map);
  EXPECT_EQ(SortedPairs(result), SortedPairs(map));
  EXPECT_EQ(Coalesce(result), result);
  if (map.empty()) {
    EXPECT_EQ(result, Map({0}, {0, {1}, 1}, {0, {1}, 1}));
    return;
  }
  EXPECT_EQ(result.is_cast(), map.is_cast());
  EXPECT_THAT(result.shape(), ::testing::Each(::testing::Ne(1)));
  const DimVector& to = result.to().byte_strides;
  const DimVector& from = result.from().byte_strides;
  for (size_t d = 0; d < to.size(); ++d) {
    EXPECT_GT(to[d], 0);
    if (d == 0) continue;
    EXPECT_GE(to[d - 1], to[d]) << "`to` strides must descend";
    EXPECT_FALSE(to[d - 1] == result.shape()[d] * to[d] &&
                 from[d - 1] == result.shape()[d] * from[d]);
  }
  if (!map.is_cast() && !to.empty()) {
    EXPECT_FALSE(to.back() == result.to().itemsize && from.back() == result.from().itemsize);
  }
}

struct CoalesceCase {
  std::string name;
  StridedMap map;
  std::string result;

  friend std::ostream& operator<<(std::ostream& s, const CoalesceCase& c) { return s << c.name; }
};

class CoalesceMapTest : public ::testing::TestWithParam<CoalesceCase> {};

TEST_P(CoalesceMapTest, KeepsThePairs) {
  CheckCoalesce(GetParam().map);
  EXPECT_EQ(ToString(Coalesce(GetParam().map)), GetParam().result);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, CoalesceMapTest,
    ::testing::ValuesIn(std::vector<CoalesceCase>{
        {"DenseBothSides", Map({3, 4}, {0, {8, 2}, 2}, {6, {8, 2}, 2}),
         "0 + ():() x 24 <- 6 + ():() x 24"},
        {"RowsOfAMatrix", Map({3, 4}, {0, {8, 2}, 2}, {0, {20, 2}, 2}),
         "0 + (3):(8) x 8 <- 0 + (3):(20) x 8"},
        {"TransposeIsSortedByTo", Map({3, 4}, {0, {2, 6}, 2}, {0, {8, 2}, 2}),
         "0 + (4, 3):(6, 2) x 2 <- 0 + (4, 3):(2, 8) x 2"},
        {"TransposeOfBothIsDense", Map({3, 4}, {0, {2, 6}, 2}, {0, {2, 6}, 2}),
         "0 + ():() x 24 <- 0 + ():() x 24"},
        {"FlipOfToIsTurned", Map({3}, {4, {-2}, 2}, {0, {2}, 2}),
         "0 + (3):(2) x 2 <- 4 + (3):(-2) x 2"},
        {"FlipOfBothIsACopy", Map({3}, {4, {-2}, 2}, {14, {-2}, 2}),
         "0 + ():() x 6 <- 10 + ():() x 6"},
        {"BroadcastStays", Map({3, 2}, {0, {4, 2}, 2}, {0, {0, 2}, 2}),
         "0 + (3):(4) x 4 <- 0 + (3):(0) x 4"},
        {"BroadcastsMerge", Map({3, 2}, {0, {4, 2}, 2}, {0, {0, 0}, 2}),
         "0 + (6):(2) x 2 <- 0 + (6):(0) x 2"},
        {"UnitExtentsGo", Map({1, 3, 1}, {0, {0, 8, -3}, 2}, {0, {5, 2, 0}, 2}),
         "0 + (3):(8) x 2 <- 0 + (3):(2) x 2"},
        {"CastKeepsItems", Map({3, 4}, {0, {16, 4}, 4}, {0, {8, 2}, 2}, true),
         "0 + (12):(4) x 4 <-cast- 0 + (12):(2) x 2"},
        {"CastOfEqualSizes", Map({4}, {0, {2}, 2}, {0, {2}, 2}, true),
         "0 + (4):(2) x 2 <-cast- 0 + (4):(2) x 2"},
        {"Empty", Map({4, 0}, {8, {2, 2}, 2}, {8, {2, 2}, 2}),
         "0 + (0):(1) x 1 <- 0 + (0):(1) x 1"},
        {"Scalar", Map({}, {8, {}, 2}, {4, {}, 2}), "8 + ():() x 2 <- 4 + ():() x 2"},
    }),
    [](const auto& test) { return test.param.name; });

TEST(InvertTest, SwapsTheSides) {
  EXPECT_EQ(ToString(Invert(Map({3, 4}, {0, {8, 2}, 2}, {100, {2, 6}, 2}))),
            "100 + (4, 3):(6, 2) x 2 <- 0 + (4, 3):(2, 8) x 2");
  EXPECT_EQ(ToString(Invert(Map({3}, {0, {2}, 2}, {4, {-2}, 2}))),
            "0 + (3):(2) x 2 <- 4 + (3):(-2) x 2");
  EXPECT_EQ(ToString(Invert(Map({3}, {0, {4}, 4}, {0, {2}, 2}, true))),
            "0 + (3):(2) x 2 <-cast- 0 + (3):(4) x 4");
}

using Call = std::tuple<Index, Index, Index>;

std::vector<Call> CallsOf(const StridedMap& map) {
  std::vector<Call> runs;
  ForEachRun(map, [&](Index to, Index from, Index nbytes) { runs.emplace_back(to, from, nbytes); });
  return runs;
}

TEST(ForEachRunTest, VisitsMaximalRunsInOrder) {
  EXPECT_THAT(CallsOf(Map({2, 4}, {10, {8, 2}, 2}, {0, {20, 2}, 2})),
              ::testing::ElementsAre(Call{10, 0, 8}, Call{18, 20, 8}));
  EXPECT_THAT(CallsOf(Map({2, 2}, {0, {2, 4}, 2}, {0, {2, 8}, 2})),
              ::testing::ElementsAre(Call{0, 0, 4}, Call{4, 8, 4}));
}

TEST(ForEachRunTest, VisitsEachItemOfACast) {
  EXPECT_THAT(CallsOf(Map({3}, {0, {4}, 4}, {6, {2}, 2}, true)),
              ::testing::ElementsAre(Call{0, 6, 4}, Call{4, 8, 4}, Call{8, 10, 4}));
}

TEST(ForEachRunTest, VisitsNothingOfAnEmptyMap) {
  EXPECT_THAT(CallsOf(Map({0}, {0, {4}, 4}, {6, {2}, 4})), ::testing::IsEmpty());
}

TEST(StridedMapPropertyTest, CoalesceKeepsThePairs) {
  ForEachRandom(6000, [](std::mt19937& gen) {
    CheckCoalesce(testing::RandomInner(gen, 96, Uniform(gen, 0, 3) == 0));
    CheckCoalesce(testing::RandomOuter(gen, 96, Uniform(gen, 0, 3) == 0));
  });
}

TEST(StridedMapPropertyTest, InvertingTwiceGivesThePairsBack) {
  ForEachRandom(3000, [](std::mt19937& gen) {
    const StridedLayout from = testing::RandomUniqueLayout(gen, 96);
    const StridedMap map =
        Map(from.shape(), testing::RandomDenseSide(gen, from.shape(), from.itemsize()),
            testing::SideOf(from));
    SCOPED_TRACE(ToString(map));
    std::vector<Pair> swapped;
    for (const auto& [to, source] : Pairs(map)) swapped.emplace_back(source, to);
    std::sort(swapped.begin(), swapped.end());
    EXPECT_EQ(SortedPairs(Invert(map)), swapped);
    EXPECT_EQ(Invert(Invert(map)), Coalesce(map));
  });
}

TEST(StridedMapPropertyTest, RunsAreThePairs) {
  ForEachRandom(3000, [](std::mt19937& gen) {
    const StridedMap map = testing::RandomInner(gen, 96, false);
    SCOPED_TRACE(ToString(map));
    std::vector<Pair> pairs;
    for (const auto& [to, from, nbytes] : CallsOf(map)) {
      for (Index i = 0; i < nbytes; ++i) pairs.emplace_back(to + i, from + i);
    }
    std::sort(pairs.begin(), pairs.end());
    EXPECT_EQ(pairs, SortedPairs(map));
  });
}

}  // namespace
}  // namespace loadplan
