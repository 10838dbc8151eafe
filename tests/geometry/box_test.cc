#include "geometry/box.h"

#include <algorithm>
#include <concepts>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

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

static_assert(std::regular<Box>);
static_assert(std::regular<Interval>);

TEST(BoxTest, ShapeAndCount) {
  const Box box({{2, 4}, {0, 3}});
  EXPECT_EQ(box.rank(), 2);
  EXPECT_EQ(box[0], (Interval{2, 4}));
  EXPECT_EQ(box[0].extent(), 2);
  EXPECT_EQ(box.shape(), DimVector({2, 3}));
  EXPECT_EQ(box.num_elements(), 6);
}

TEST(BoxTest, ScalarHasOneElement) {
  EXPECT_EQ(Box().rank(), 0);
  EXPECT_EQ(Box().num_elements(), 1);
  EXPECT_EQ(Box().shape(), DimVector());
  EXPECT_TRUE(Box().IsWithin({}));
}

TEST(BoxTest, EmptyIntervalsHaveNoElements) {
  EXPECT_EQ(Box({{0, 4}, {2, 2}}).num_elements(), 0);
  EXPECT_EQ(Box({{0, 4}, {3, 2}}).num_elements(), 0);
  // The other extents do not fit in 64 bits together.
  EXPECT_EQ(Box({{0, Index{1} << 62}, {0, Index{1} << 62}, {1, 1}}).num_elements(), 0);
}

TEST(BoxTest, WholeHoldsEveryCoordinate) {
  EXPECT_EQ(Box::Whole({4, 3}), Box({{0, 4}, {0, 3}}));
  EXPECT_EQ(Box::Whole({}), Box());
}

TEST(BoxTest, IsWithinLooksAtBothEnds) {
  EXPECT_TRUE(Box({{0, 4}, {1, 3}}).IsWithin({4, 3}));
  EXPECT_FALSE(Box({{0, 5}, {1, 3}}).IsWithin({4, 3}));
  EXPECT_FALSE(Box({{0, 4}, {-1, 3}}).IsWithin({4, 3}));
  EXPECT_FALSE(Box({{0, 4}}).IsWithin({4, 3}));
}

TEST(BoxTest, PrintsAsPythonSlices) {
  EXPECT_EQ(ToString(Box({{2, 4}, {0, 3}})), "[2:4, 0:3]");
  EXPECT_EQ(ToString(Box()), "[]");
  std::ostringstream stream;
  stream << Box({{0, 1}});
  EXPECT_EQ(stream.str(), "[0:1]");
}

struct IntersectCase {
  std::string name;
  Box a;
  Box b;
  std::optional<Box> common;

  friend std::ostream& operator<<(std::ostream& s, const IntersectCase& c) { return s << c.name; }
};

class IntersectBoxTest : public ::testing::TestWithParam<IntersectCase> {};

TEST_P(IntersectBoxTest, IsSymmetric) {
  const IntersectCase& c = GetParam();
  EXPECT_EQ(Intersect(c.a, c.b), c.common);
  EXPECT_EQ(Intersect(c.b, c.a), c.common);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, IntersectBoxTest,
    ::testing::ValuesIn(std::vector<IntersectCase>{
        {"Scalars", Box::Whole({}), Box::Whole({}), Box::Whole({})},
        {"Same", Box({{1, 3}}), Box({{1, 3}}), Box({{1, 3}})},
        {"Corner", Box({{0, 3}, {0, 3}}), Box({{2, 5}, {1, 9}}), Box({{2, 3}, {1, 3}})},
        {"Inside", Box({{0, 9}, {0, 9}}), Box({{2, 5}, {1, 9}}), Box({{2, 5}, {1, 9}})},
        {"Touching", Box({{0, 3}}), Box({{3, 5}}), std::nullopt},
        {"ApartInOneDimension", Box({{0, 3}, {0, 3}}), Box({{0, 3}, {5, 6}}), std::nullopt},
        {"Empty", Box({{0, 3}}), Box({{1, 1}}), std::nullopt},
    }),
    [](const auto& test) { return test.param.name; });

TEST(BoxPropertyTest, IntersectionHoldsTheCommonElements) {
  ForEachRandom(2000, [](std::mt19937& gen) {
    const DimVector shape{5, 4, 3};
    const auto random_box = [&] {
      absl::InlinedVector<Interval, 4> intervals;
      for (const Index extent : shape) {
        const Index start = Uniform(gen, 0, extent);
        intervals.push_back({start, Uniform(gen, start, extent)});
      }
      return Box(intervals);
    };
    const Box a = random_box();
    const Box b = random_box();
    const std::vector<Index> in_a = Elements(a, shape);
    const std::vector<Index> in_b = Elements(b, shape);
    std::vector<Index> expected;
    std::set_intersection(in_a.begin(), in_a.end(), in_b.begin(), in_b.end(),
                          std::back_inserter(expected));
    const std::optional<Box> common = Intersect(a, b);
    EXPECT_EQ(common ? Elements(*common, shape) : std::vector<Index>{}, expected)
        << a << " and " << b;
  });
}

}  // namespace
}  // namespace loadplan
