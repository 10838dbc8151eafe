#include "geometry/digits.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/oracle.h"
#include "tests/testing/random_geometry.h"
#include "tests/testing/seed.h"

namespace loadplan::geometry_internal {
namespace {

using loadplan::testing::ForEachRandom;
using loadplan::testing::Layout;
using loadplan::testing::Pair;
using loadplan::testing::Uniform;

// Pairs (T byte, O byte) of a box, digit by digit.
std::vector<Pair> PairsOf(const DigitBox& box, const DigitSystem& system) {
  DimVector shape;
  for (const Digit& digit : box.digits) shape.push_back(digit.extent());
  std::vector<Pair> pairs;
  loadplan::testing::ForEachCoordinate(shape, [&](const DimVector& c) {
    Index t = system.base;
    Index o = box.other_offset;
    for (size_t j = 0; j < c.size(); ++j) {
      t += (box.digits[j].start + c[j]) * system.weights[j];
      o += c[j] * box.digits[j].other;
    }
    pairs.emplace_back(t, o);
  });
  return pairs;
}

std::vector<Pair> SortedPairsOf(const DigitBoxes& boxes, const DigitSystem& system) {
  std::vector<Pair> pairs;
  for (const DigitBox& box : boxes) {
    const std::vector<Pair> more = PairsOf(box, system);
    pairs.insert(pairs.end(), more.begin(), more.end());
  }
  std::sort(pairs.begin(), pairs.end());
  return pairs;
}

std::vector<Pair> SortedPairsOf(const Grid& grid) {
  return loadplan::testing::SortedPairs(MapOf(grid, Side::kTo, {}));
}

void ExpectDigitsInRange(const DigitBox& box, const DigitSystem& system) {
  for (size_t j = 0; j + 1 < system.size(); ++j) {
    EXPECT_LE(0, box.digits[j].start);
    EXPECT_LT(box.digits[j].start, box.digits[j].stop);
    EXPECT_LE(box.digits[j].stop, system.radix(j));
  }
}

std::string Print(const DigitBoxes& boxes) {
  return absl::StrJoin(boxes, "; ", [](std::string* out, const DigitBox& box) {
    absl::StrAppend(out, absl::StrJoin(box.digits, " x ", [](std::string* o, const Digit& digit) {
                      absl::StrAppend(o, digit.start, ":", digit.stop);
                    }));
  });
}

DigitSystem System(absl::InlinedVector<Index, 6> weights, Index base) {
  DigitSystem system;
  system.weights = std::move(weights);
  system.base = base;
  return system;
}

struct SplitCase {
  std::string name;
  StridedLayout layout;
  DigitSystem system;
  std::string boxes;

  friend std::ostream& operator<<(std::ostream& s, const SplitCase& c) { return s << c.name; }
};

class SplitTest : public ::testing::TestWithParam<SplitCase> {};

TEST_P(SplitTest, KeepsThePairs) {
  const SplitCase& c = GetParam();
  const Grid grid = GridOf(c.layout);
  DigitBoxes boxes;
  ASSERT_TRUE(Split(grid, c.system, 1000, &boxes));
  EXPECT_EQ(Print(boxes), c.boxes);
  for (const DigitBox& box : boxes) ExpectDigitsInRange(box, c.system);
  EXPECT_EQ(SortedPairsOf(boxes, c.system), SortedPairsOf(grid));
  DigitBoxes few;
  EXPECT_FALSE(Split(grid, c.system, static_cast<Index>(boxes.size()) - 1, &few));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, SplitTest,
    ::testing::ValuesIn(std::vector<SplitCase>{
        {"InOneRow", Layout(20, {}, {}, 40), System({1, 100}, 0), "20:60 x 0:1"},
        {"ColumnsOfRows", Layout(320, {2}, {100}, 40), System({1, 100}, 0), "20:60 x 3:5"},
        {"HeadBodyTail", Layout(250, {}, {}, 200), System({1, 100}, 0),
         "50:100 x 2:3; 0:100 x 3:4; 0:50 x 4:5"},
        {"HeadAndTail", Layout(250, {}, {}, 100), System({1, 100}, 0), "50:100 x 2:3; 0:50 x 3:4"},
        {"BodyOfSeveralRows", Layout(200, {}, {}, 300), System({1, 100}, 0), "0:100 x 2:5"},
        {"ColumnsThatWrap", Layout(90, {3}, {100}, 20), System({1, 100}, 0),
         "90:100 x 0:3; 0:10 x 1:4"},
        {"BaseMovesTheRows", Layout(90, {3}, {100}, 20), System({1, 100}, 90), "0:20 x 0:3"},
        {"BeforeTheBase", Layout(0, {}, {}, 30), System({1, 20}, 50),
         "10:20 x -3:-2; 0:20 x -2:-1"},
        {"ThreeLevels", Layout(5, {}, {}, 25), System({1, 4, 12}, 0),
         "1:4 x 1:2 x 0:1; 0:4 x 2:3 x 0:1; 0:4 x 0:3 x 1:2; 0:4 x 0:1 x 2:3; 0:2 x 1:2 x 2:3"},
        {"OverlappingWindows", Layout(0, {5, 4}, {2, 1}, 1), System({1, 2}, 0),
         "0:2 x 0:5; 0:2 x 1:6"},
    }),
    [](const auto& test) { return test.param.name; });

TEST(FindWeightsTest, TakesTheStridesOfBoth) {
  DigitSystem system;
  std::optional<Offender> offender;
  EXPECT_TRUE(FindWeights(GridOf(Layout(0, {3, 5}, {100, 10}, 2)), GridOf(Layout(0, {4}, {20}, 5)),
                          &system, &offender));
  EXPECT_THAT(system.weights, ::testing::ElementsAre(1, 10, 20, 100));
}

TEST(FindWeightsTest, NamesTheShortestDimensionInTheWay) {
  DigitSystem system;
  std::optional<Offender> offender;
  // 12 does not divide 100; dimension 1 of `a` has 3 items, of `b` 7.
  EXPECT_FALSE(FindWeights(GridOf(Layout(0, {3}, {100}, 2)), GridOf(Layout(0, {7}, {12}, 5)),
                           &system, &offender));
  ASSERT_TRUE(offender.has_value());
  EXPECT_TRUE(offender->in_first);
  EXPECT_EQ(offender->dim, 1u);
  EXPECT_FALSE(FindWeights(GridOf(Layout(0, {9}, {100}, 2)), GridOf(Layout(0, {7}, {12}, 5)),
                           &system, &offender));
  ASSERT_TRUE(offender.has_value());
  EXPECT_FALSE(offender->in_first);
}

TEST(FindWeightsTest, AtomsAreWeights) {
  DigitSystem system;
  std::optional<Offender> offender;
  Grid cast =
      GridOf(loadplan::testing::Map({3}, {0, {8}, 4}, {0, {2}, 2}, true), Side::kTo, nullptr);
  EXPECT_TRUE(FindWeights(cast, GridOf(Layout(0, {}, {}, 9)), &system, &offender));
  EXPECT_THAT(system.weights, ::testing::ElementsAre(1, 4, 8));
  // Items of the other in steps that are no multiple: only those can be unrolled.
  EXPECT_FALSE(FindWeights(cast, GridOf(Layout(0, {900}, {6}, 2)), &system, &offender));
  ASSERT_TRUE(offender.has_value());
  EXPECT_FALSE(offender->in_first);
}

TEST(ChooseBaseTest, ColumnsOfBothAreWhole) {
  DigitSystem system = System({1, 100}, 0);
  // 80..100 and 60..100 of each row, shifted by 7: bases 67 and 87 split nothing.
  const Grid a = GridOf(Layout(87, {5}, {100}, 20));
  const Grid b = GridOf(Layout(67, {5}, {100}, 40));
  ChooseBase(a, b, &system);
  DigitBoxes boxes;
  EXPECT_TRUE(Split(a, system, 10, &boxes));
  EXPECT_TRUE(Split(b, system, 10, &boxes));
  EXPECT_EQ(boxes.size(), 2u);
}

TEST(DigitsPropertyTest, SplittingKeepsThePairs) {
  ForEachRandom(4000, [](std::mt19937& gen) {
    const Grid a = GridOf(loadplan::testing::Layout(0, {1}, {1}, 1));
    StridedLayout layout = loadplan::testing::RandomLayout(gen, 96);
    if (layout.empty()) return;
    const Grid grid = GridOf(layout);
    DigitSystem system;
    std::optional<Offender> offender;
    if (!FindWeights(grid, a, &system, &offender)) return;
    system.base = Uniform(gen, 0, 50);
    DigitBoxes boxes;
    ASSERT_TRUE(Split(grid, system, 100000, &boxes));
    for (const DigitBox& box : boxes) {
      ExpectDigitsInRange(box, system);
      EXPECT_EQ(SortedPairsOf(GridOf(box, system, 0, 0)), SortedPairsOf({box}, system));
    }
    EXPECT_EQ(SortedPairsOf(boxes, system), SortedPairsOf(grid)) << layout;
  });
}

TEST(DigitsPropertyTest, DifferenceAndCommonPartAreTheWhole) {
  ForEachRandom(4000, [](std::mt19937& gen) {
    const DigitSystem system = System({1, 4, 12}, 0);
    const auto random_box = [&] {
      DigitBox box;
      for (const Index radix : {4, 3, 5}) {
        const Index start = Uniform(gen, 0, radix - 1);
        box.digits.push_back({start, Uniform(gen, start + 1, radix), Uniform(gen, -3, 9)});
      }
      box.other_offset = Uniform(gen, 0, 9);
      return box;
    };
    const DigitBox a = random_box();
    const DigitBox b = random_box();
    absl::InlinedVector<Digit, 5> common;
    std::vector<Pair> inside;
    std::vector<Pair> outside;
    for (const Pair& pair : PairsOf(a, system)) {
      bool in_b = false;
      for (const Pair& other : PairsOf(b, system)) in_b |= other.first == pair.first;
      (in_b ? inside : outside).push_back(pair);
    }
    std::sort(outside.begin(), outside.end());
    ASSERT_EQ(Intersect(a, b, &common), !inside.empty());
    if (inside.empty()) return;
    Index count = 1;
    for (const Digit& digit : common) count *= digit.extent();
    EXPECT_EQ(count, static_cast<Index>(inside.size()));
    DigitBoxes rest;
    AppendDifference(a, common, &rest);
    EXPECT_LE(rest.size(), 6u);
    EXPECT_EQ(SortedPairsOf(rest, system), outside);
  });
}

}  // namespace
}  // namespace loadplan::geometry_internal
