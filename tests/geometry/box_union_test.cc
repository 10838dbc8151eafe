// UnionOf of geometry/view_to_box.h.
#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "geometry/view_to_box.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/oracle.h"
#include "tests/testing/random_geometry.h"
#include "tests/testing/seed.h"

namespace loadplan {
namespace {

using testing::Elements;
using testing::ForEachRandom;
using testing::Uniform;

struct UnionCase {
  std::string name;
  std::vector<Box> boxes;
  std::vector<Box> result;

  friend std::ostream& operator<<(std::ostream& s, const UnionCase& c) { return s << c.name; }
};

class UnionOfTest : public ::testing::TestWithParam<UnionCase> {};

TEST_P(UnionOfTest, IsDisjointAndJoined) {
  const UnionCase& c = GetParam();
  const auto count = static_cast<Index>(c.result.size());
  EXPECT_EQ(UnionOf(c.boxes, count), c.result);
  std::vector<Box> reversed(c.boxes.rbegin(), c.boxes.rend());
  EXPECT_EQ(UnionOf(reversed, count), c.result);
  if (count > 0) {
    EXPECT_EQ(UnionOf(c.boxes, count - 1), std::nullopt);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, UnionOfTest,
    ::testing::ValuesIn(std::vector<UnionCase>{
        {"None", {}, {}},
        {"EmptyOnesGo", {Box({{0, 0}, {0, 3}}), Box({{1, 2}, {3, 3}})}, {}},
        {"Scalars", {Box(), Box()}, {Box()}},
        {"Same", {Box({{1, 3}, {0, 2}}), Box({{1, 3}, {0, 2}})}, {Box({{1, 3}, {0, 2}})}},
        {"Neighbours", {Box({{0, 2}, {0, 3}}), Box({{2, 4}, {0, 3}})}, {Box({{0, 4}, {0, 3}})}},
        {"Overlapping", {Box({{0, 3}, {0, 3}}), Box({{2, 4}, {0, 3}})}, {Box({{0, 4}, {0, 3}})}},
        {"Apart",
         {Box({{3, 4}, {0, 3}}), Box({{0, 2}, {0, 3}})},
         {Box({{0, 2}, {0, 3}}), Box({{3, 4}, {0, 3}})}},
        {"TouchingCorners",
         {Box({{0, 2}, {0, 2}}), Box({{2, 4}, {2, 4}})},
         {Box({{0, 2}, {0, 2}}), Box({{2, 4}, {2, 4}})}},
        {"FourQuarters",
         {Box({{0, 2}, {0, 2}}), Box({{2, 4}, {2, 4}}), Box({{0, 2}, {2, 4}}),
          Box({{2, 4}, {0, 2}})},
         {Box({{0, 4}, {0, 4}})}},
        {"Contained", {Box({{0, 5}, {0, 5}}), Box({{1, 2}, {1, 2}})}, {Box({{0, 5}, {0, 5}})}},
    }),
    [](const auto& test) { return test.param.name; });

TEST(UnionOfTest, CrossIsThreeBoxes) {
  const auto boxes = UnionOf({Box({{0, 5}, {2, 3}}), Box({{2, 3}, {0, 5}})}, 10);
  ASSERT_TRUE(boxes.has_value());
  EXPECT_EQ(boxes->size(), 3u);
}

TEST(UnionOfTest, ThousandsOfColumns) {
  std::vector<Box> columns;
  for (Index c = 0; c < 20000; ++c) columns.push_back(Box({{0, 7168}, {2 * c, 2 * c + 1}}));
  EXPECT_EQ(UnionOf(columns, 20000)->size(), 20000u);
  for (Index c = 0; c < 20000; ++c) columns.push_back(Box({{0, 7168}, {2 * c + 1, 2 * c + 2}}));
  EXPECT_EQ(UnionOf(columns, 1), (std::vector<Box>{Box({{0, 7168}, {0, 40000}})}));
}

TEST(UnionOfPropertyTest, CoversTheSameElementsOnce) {
  ForEachRandom(3000, [](std::mt19937& gen) {
    const DimVector shape{Uniform(gen, 1, 5), Uniform(gen, 1, 6), Uniform(gen, 1, 4)};
    std::vector<Box> boxes;
    std::set<Index> expected;
    std::string trace;
    for (Index i = Uniform(gen, 0, 8); i > 0; --i) {
      absl::InlinedVector<Interval, 4> intervals;
      for (const Index extent : shape) {
        const Index start = Uniform(gen, 0, extent - 1);
        intervals.push_back({start, Uniform(gen, start, extent)});
      }
      boxes.push_back(Box(intervals));
      trace += ToString(boxes.back()) + " ";
      for (const Index element : Elements(boxes.back(), shape)) expected.insert(element);
    }
    SCOPED_TRACE(trace);
    const auto result = UnionOf(boxes, 1000);
    ASSERT_TRUE(result.has_value());
    std::vector<Index> elements;
    for (const Box& box : *result) {
      const std::vector<Index> more = Elements(box, shape);
      elements.insert(elements.end(), more.begin(), more.end());
    }
    std::sort(elements.begin(), elements.end());
    EXPECT_EQ(elements, std::vector<Index>(expected.begin(), expected.end()));
  });
}

}  // namespace
}  // namespace loadplan
