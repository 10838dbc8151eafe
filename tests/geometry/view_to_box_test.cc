#include "geometry/view_to_box.h"

#include <algorithm>
#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/oracle.h"
#include "tests/testing/random_geometry.h"
#include "tests/testing/seed.h"

namespace loadplan {
namespace {

using testing::Elements;
using testing::ForEachRandom;
using testing::Layout;
using testing::Map;
using testing::Pair;
using testing::Uniform;

constexpr int kIterations = 6000;

// Elements of `base` of which the layout touches a byte.
std::set<Index> TouchedElements(const StridedLayout& layout, const DenseTensor& base) {
  std::set<Index> elements;
  for (const Index byte : testing::Bytes(layout)) elements.insert(byte / base.itemsize);
  return elements;
}

// Contract: executing the boxes is executing the map, byte for byte.
void CheckRegions(const StridedMap& map, const DenseTensor& base,
                  const std::vector<BoxRegion>& regions) {
  std::vector<Pair> pairs;
  for (const BoxRegion& part : regions) {
    SCOPED_TRACE(ToString(part.box) + " -> " + ToString(part.region));
    EXPECT_TRUE(part.box.IsWithin(base.shape));
    EXPECT_EQ(part.region.itemsize(), base.itemsize);
    const std::vector<Index> elements = Elements(part.box, base.shape);
    const std::vector<Index> bytes = testing::Bytes(part.region);
    ASSERT_EQ(static_cast<Index>(bytes.size()), part.box.num_elements() * base.itemsize);
    for (size_t i = 0; i < bytes.size(); ++i) {
      const Index byte = static_cast<Index>(i);
      pairs.emplace_back(
          bytes[i],
          elements[i / static_cast<size_t>(base.itemsize)] * base.itemsize + byte % base.itemsize);
    }
  }
  std::sort(pairs.begin(), pairs.end());
  EXPECT_EQ(pairs, testing::SortedPairs(map));
}

void CheckBoxes(const StridedLayout& layout, const DenseTensor& base, Index max_boxes) {
  SCOPED_TRACE(ToString(layout));
  const std::set<Index> expected = TouchedElements(layout, base);
  const auto boxes = BoxesOf(layout, base, max_boxes);
  if (!boxes) {
    // As many elements as that always give few enough boxes.
    EXPECT_GT(static_cast<Index>(expected.size()), max_boxes);
  } else {
    EXPECT_LE(static_cast<Index>(boxes->size()), max_boxes);
    std::vector<Index> elements;
    for (const Box& box : *boxes) {
      const std::vector<Index> more = Elements(box, base.shape);
      elements.insert(elements.end(), more.begin(), more.end());
    }
    std::sort(elements.begin(), elements.end());
    EXPECT_EQ(elements, std::vector<Index>(expected.begin(), expected.end()));
  }
  const auto hull = BoundingBoxOf(layout, base);
  ASSERT_EQ(hull.has_value(), !expected.empty());
  if (!hull) return;
  // The smallest: each coordinate range is that of the elements.
  absl::InlinedVector<Interval, 4> want(base.shape.size(), Interval{Index{1} << 60, 0});
  for (Index element : expected) {
    for (size_t d = base.shape.size(); d-- > 0;) {
      const Index c = element % base.shape[d];
      element /= base.shape[d];
      want[d] = {std::min(want[d].start, c), std::max(want[d].stop, c + 1)};
    }
  }
  EXPECT_EQ(*hull, Box(want));
}

struct RegionsCase {
  std::string name;
  DenseTensor base;
  StridedMap map;
  std::string boxes;  // printed boxes and regions; "none" for nullopt

  friend std::ostream& operator<<(std::ostream& s, const RegionsCase& c) { return s << c.name; }
};

class BoxRegionsOfTest : public ::testing::TestWithParam<RegionsCase> {};

TEST_P(BoxRegionsOfTest, SaysTheSameAsTheMap) {
  const RegionsCase& c = GetParam();
  const auto regions = BoxRegionsOf(c.map, c.base);
  std::string printed = regions ? "" : "none";
  if (regions) {
    CheckRegions(c.map, c.base, *regions);
    for (const BoxRegion& part : *regions) {
      printed +=
          (printed.empty() ? "" : "; ") + ToString(part.box) + " -> " + ToString(part.region);
    }
  }
  EXPECT_EQ(printed, c.boxes);
}

// `from` views of a 4x6 tensor of two-byte elements; `to` is dense from byte 0 on.
INSTANTIATE_TEST_SUITE_P(
    Cases, BoxRegionsOfTest,
    ::testing::ValuesIn(std::vector<RegionsCase>{
        {"Whole",
         {{4, 6}, 2},
         Map({24}, {0, {2}, 2}, {0, {2}, 2}),
         "[0:4, 0:6] -> 0 + (24):(2) x 2"},
        {"NarrowRows",
         {{4, 6}, 2},
         Map({2, 6}, {0, {12, 2}, 2}, {12, {12, 2}, 2}),
         "[1:3, 0:6] -> 0 + (12):(2) x 2"},
        {"NarrowColumns",
         {{4, 6}, 2},
         Map({4, 2}, {0, {4, 2}, 2}, {4, {12, 2}, 2}),
         "[0:4, 2:4] -> 0 + (4, 2):(4, 2) x 2"},
        {"Transpose",
         {{4, 6}, 2},
         Map({6, 4}, {0, {8, 2}, 2}, {0, {2, 12}, 2}),
         "[0:4, 0:6] -> 0 + (4, 6):(2, 8) x 2"},
        {"FlatRangeCutsRows",
         {{4, 6}, 2},
         Map({14}, {0, {2}, 2}, {6, {2}, 2}),
         "[0:1, 3:6] -> 0 + (3):(2) x 2; [1:2, 0:6] -> 6 + (6):(2) x 2; "
         "[2:3, 0:5] -> 18 + (5):(2) x 2"},
        {"ReshapeOfANarrow",
         {{4, 6}, 2},
         Map({3, 4}, {0, {20, 2}, 2}, {0, {8, 2}, 2}),
         "[0:2, 0:6] -> 0 + (3, 4):(20, 2) x 2"},
        {"ReshapeAcrossRows",
         {{4, 6}, 2},
         Map({2, 7}, {0, {20, 2}, 2}, {0, {14, 2}, 2}),
         "[0:1, 0:6] -> 0 + (6):(2) x 2; [1:2, 0:1] -> 12 + ():() x 2; "
         "[1:2, 1:6] -> 20 + (5):(2) x 2; [2:3, 0:2] -> 30 + (2):(2) x 2"},
        {"OneElement",
         {{4, 6}, 2},
         Map({}, {8, {}, 2}, {16, {}, 2}),
         "[1:2, 2:3] -> 8 + ():() x 2"},
        {"Scalar", {{}, 4}, Map({}, {8, {}, 4}, {0, {}, 4}), "[] -> 8 + ():() x 4"},
        {"UnitDimensions",
         {{1, 4, 1, 6, 1}, 2},
         Map({4, 3}, {0, {6, 2}, 2}, {6, {12, 2}, 2}),
         "[0:1, 0:4, 0:1, 3:6, 0:1] -> 0 + (4, 3):(6, 2) x 2"},
        {"BytesOfWholeElements",
         {{4, 6}, 2},
         Map({4}, {0, {1}, 1}, {4, {1}, 1}),
         "[0:1, 2:4] -> 0 + (2):(2) x 2"},
        {"MiddleOfThree",
         {{2, 3, 4}, 1},
         Map({2, 2, 4}, {0, {8, 4, 1}, 1}, {4, {12, 4, 1}, 1}),
         "[0:2, 1:3, 0:4] -> 0 + (2, 8):(8, 1) x 1"},
        {"Nothing", {{4, 6}, 2}, Map({0}, {0, {2}, 2}, {0, {2}, 2}), ""},
        {"CutElement", {{4, 6}, 2}, Map({}, {0, {}, 1}, {0, {}, 1}), "none"},
        {"CutAtTheOffset", {{4, 6}, 2}, Map({2}, {0, {2}, 2}, {1, {2}, 2}), "none"},
        {"ByteOfEachElement", {{4, 6}, 2}, Map({24}, {0, {1}, 1}, {0, {2}, 1}), "none"},
        {"SwappedBytes", {{4, 6}, 2}, Map({12, 2}, {0, {2, 1}, 1}, {1, {2, -1}, 1}), "none"},
        {"Broadcast", {{4, 6}, 2}, Map({3, 6}, {0, {12, 2}, 2}, {0, {0, 2}, 2}), "none"},
        {"Flip", {{4, 6}, 2}, Map({24}, {0, {2}, 2}, {46, {-2}, 2}), "none"},
        {"SteppedColumns", {{4, 6}, 2}, Map({12}, {0, {2}, 2}, {0, {4}, 2}), "none"},
        {"SteppedRows", {{4, 6}, 2}, Map({2, 6}, {0, {12, 2}, 2}, {0, {24, 2}, 2}), "none"},
        {"TwoRowBlocks", {{8, 6}, 2}, Map({2, 12}, {0, {24, 2}, 2}, {0, {48, 2}, 2}), "none"},
        {"Diagonal", {{4, 6}, 2}, Map({4}, {0, {2}, 2}, {0, {14}, 2}), "none"},
        {"Unfold", {{4, 6}, 2}, Map({3, 4}, {0, {8, 2}, 2}, {0, {4, 2}, 2}), "none"},
        {"Cast", {{4, 6}, 2}, Map({24}, {0, {4}, 4}, {0, {2}, 2}, true), "none"},
    }),
    [](const auto& test) { return test.param.name; });

TEST(BoxRegionsOfTest, ManyCutsAreNone) {
  // 90 runs of 103 elements over rows of 101: each boundary is a cut.
  const StridedMap map = Map({90, 103}, {0, {110, 1}, 1}, {0, {103, 1}, 1});
  EXPECT_FALSE(BoxRegionsOf(map, {{200, 101}, 1}).has_value());
}

TEST(BoxRegionsOfPropertyTest, ExecutesAsTheMap) {
  int found = 0;
  ForEachRandom(kIterations, [&](std::mt19937& gen) {
    const Index itemsize = testing::Pick<Index>(gen, {1, 2, 4});
    const DenseTensor base{testing::RandomShapeOf(gen, 96 / itemsize), itemsize};
    const StridedMap map = testing::RandomOuter(gen, 96, Uniform(gen, 0, 20) == 0);
    SCOPED_TRACE(ToString(map) + " base " + ToString(Box::Whole(base.shape)));
    const auto regions = BoxRegionsOf(map, base);
    if (!regions) return;
    ++found;
    CheckRegions(map, base, *regions);
  });
  EXPECT_GT(found, kIterations / 10);
}

// A view of plain narrows and transposes always has one box.
TEST(BoxRegionsOfPropertyTest, NarrowsAndTransposesHaveOneBox) {
  ForEachRandom(kIterations, [](std::mt19937& gen) {
    const Index itemsize = testing::Pick<Index>(gen, {1, 2, 4});
    const DenseTensor base{testing::RandomShapeOf(gen, 96 / itemsize), itemsize};
    const StridedLayout whole = *StridedLayout::Contiguous(0, base.shape, itemsize);
    Index offset = 0;
    DimVector shape = base.shape;
    absl::InlinedVector<Interval, 4> box;
    for (size_t d = 0; d < shape.size(); ++d) {
      const Index start = Uniform(gen, 0, shape[d] - 1);
      offset += start * whole.byte_strides()[d];
      shape[d] = Uniform(gen, 1, shape[d] - start);
      box.push_back({start, start + shape[d]});
    }
    const StridedMap map = Map(shape, testing::RandomDenseSide(gen, shape, itemsize),
                               {offset, whole.byte_strides(), itemsize});
    SCOPED_TRACE(ToString(map) + " base " + ToString(Box::Whole(base.shape)));
    const auto regions = BoxRegionsOf(map, base);
    ASSERT_TRUE(regions.has_value());
    ASSERT_EQ(regions->size(), 1u);
    EXPECT_EQ(regions->front().box, Box(box));
    CheckRegions(map, base, *regions);
  });
}

struct BoxesCase {
  std::string name;
  DenseTensor base;
  StridedLayout layout;
  std::string boxes;
  std::string hull;

  friend std::ostream& operator<<(std::ostream& s, const BoxesCase& c) { return s << c.name; }
};

class BoxesOfTest : public ::testing::TestWithParam<BoxesCase> {};

TEST_P(BoxesOfTest, AreTheTouchedElements) {
  const BoxesCase& c = GetParam();
  CheckBoxes(c.layout, c.base, 64);
  const auto boxes = BoxesOf(c.layout, c.base, 64);
  ASSERT_TRUE(boxes.has_value());
  std::string printed;
  for (const Box& box : *boxes) printed += (printed.empty() ? "" : " ") + ToString(box);
  EXPECT_EQ(printed, c.boxes);
  const auto hull = BoundingBoxOf(c.layout, c.base);
  EXPECT_EQ(hull ? ToString(*hull) : "none", c.hull);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, BoxesOfTest,
    ::testing::ValuesIn(std::vector<BoxesCase>{
        {"Whole", {{4, 6}, 2}, Layout(0, {24}, {2}, 2), "[0:4, 0:6]", "[0:4, 0:6]"},
        {"Columns", {{4, 6}, 2}, Layout(4, {4, 2}, {12, 2}, 2), "[0:4, 2:4]", "[0:4, 2:4]"},
        {"FlatRange",
         {{4, 6}, 2},
         Layout(6, {14}, {2}, 2),
         "[0:1, 3:6] [1:2, 0:6] [2:3, 0:5]",
         "[0:3, 0:6]"},
        {"SteppedColumns",
         {{4, 6}, 2},
         Layout(0, {4, 3}, {12, 4}, 2),
         "[0:4, 0:1] [0:4, 2:3] [0:4, 4:5]",
         "[0:4, 0:5]"},
        {"SteppedRows",
         {{4, 6}, 2},
         Layout(0, {2, 6}, {24, 2}, 2),
         "[0:1, 0:6] [2:3, 0:6]",
         "[0:3, 0:6]"},
        {"Diagonal",
         {{3, 6}, 2},
         Layout(0, {3}, {14}, 2),
         "[0:1, 0:1] [1:2, 1:2] [2:3, 2:3]",
         "[0:3, 0:3]"},
        {"Unfold", {{4, 6}, 2}, Layout(0, {3, 4}, {2, 2}, 2), "[0:1, 0:6]", "[0:1, 0:6]"},
        {"FirstByteOfEach", {{4, 6}, 2}, Layout(0, {24}, {2}, 1), "[0:4, 0:6]", "[0:4, 0:6]"},
        {"EveryThirdByte",
         {{4, 6}, 2},
         Layout(0, {16}, {3}, 1),
         "[0:4, 0:2] [0:4, 3:5]",
         "[0:4, 0:5]"},
        {"SplitElement", {{4, 6}, 2}, Layout(3, {}, {}, 2), "[0:1, 1:3]", "[0:1, 1:3]"},
        {"Broadcast", {{4, 6}, 2}, Layout(2, {5}, {0}, 2), "[0:1, 1:2]", "[0:1, 1:2]"},
        {"Scalar", {{}, 4}, Layout(0, {}, {}, 4), "[]", "[]"},
        {"Nothing", {{4, 6}, 2}, Layout(0, {0}, {2}, 2), "", "none"},
    }),
    [](const auto& test) { return test.param.name; });

TEST(BoxesOfTest, TooManyAreNone) {
  // 10 columns, each a box.
  const StridedLayout stepped = Layout(0, {4, 10}, {20, 2}, 1);
  const DenseTensor base{{4, 20}, 1};
  EXPECT_EQ(BoxesOf(stepped, base, 9), std::nullopt);
  ASSERT_TRUE(BoxesOf(stepped, base, 10).has_value());
  EXPECT_EQ(BoxesOf(stepped, base, 10)->size(), 10u);
}

TEST(BoundingBoxOfTest, HugeDiagonalHasTheHullOfItsRange) {
  const Index n = Index{1} << 21;
  const StridedLayout diagonal = Layout(0, {n}, {n + 1}, 1);
  EXPECT_EQ(*BoundingBoxOf(diagonal, {{n, n}, 1}), Box({{0, n}, {0, n}}));
}

TEST(BoxesOfPropertyTest, AreTheTouchedElements) {
  ForEachRandom(kIterations, [](std::mt19937& gen) {
    const Index itemsize = testing::Pick<Index>(gen, {1, 2, 4});
    const DenseTensor base{testing::RandomShapeOf(gen, 96 / itemsize), itemsize};
    SCOPED_TRACE("base " + ToString(Box::Whole(base.shape)));
    CheckBoxes(testing::RandomLayout(gen, 96), base, testing::Pick<Index>(gen, {1, 8, 1000}));
  });
}

}  // namespace
}  // namespace loadplan
