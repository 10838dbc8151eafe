#include "geometry/overlap.h"

#include <algorithm>
#include <ctime>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/oracle.h"
#include "tests/testing/random_geometry.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using testing::ByteSet;
using ::testing::ElementsAre;
using testing::ForEachRandom;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOk;
using testing::IsOkAndHolds;
using testing::Layout;
using testing::StatusIs;
using testing::Uniform;

// Every pair, byte by byte.
std::vector<OverlapPair> BruteForce(const std::vector<StridedLayout>& layouts) {
  std::vector<std::set<Index>> bytes;
  for (const StridedLayout& layout : layouts) bytes.push_back(ByteSet(layout));
  std::vector<OverlapPair> pairs;
  for (size_t i = 0; i < layouts.size(); ++i) {
    for (size_t k = i + 1; k < layouts.size(); ++k) {
      const auto common = std::count_if(bytes[i].begin(), bytes[i].end(),
                                        [&](Index byte) { return bytes[k].count(byte) != 0; });
      if (common > 0) pairs.push_back({static_cast<Index>(i), static_cast<Index>(k), common});
    }
  }
  return pairs;
}

void CheckFindOverlaps(const std::vector<StridedLayout>& layouts) {
  std::string trace;
  for (const StridedLayout& layout : layouts) trace += ToString(layout) + "\n";
  SCOPED_TRACE(trace);
  const absl::StatusOr<std::vector<OverlapPair>> pairs = FindOverlaps(layouts);
  ASSERT_THAT(pairs, IsOk());
  const std::vector<OverlapPair> expected = BruteForce(layouts);
  EXPECT_EQ(pairs->size(), expected.size());
  EXPECT_TRUE(*pairs == expected);
}

struct OverlapsCase {
  std::string name;
  StridedLayout a;
  StridedLayout b;
  bool overlaps;

  friend std::ostream& operator<<(std::ostream& s, const OverlapsCase& c) { return s << c.name; }
};

class OverlapsTest : public ::testing::TestWithParam<OverlapsCase> {};

TEST_P(OverlapsTest, IsSymmetricAndExact) {
  const OverlapsCase& c = GetParam();
  EXPECT_EQ(!BruteForce({c.a, c.b}).empty(), c.overlaps) << "the case itself is wrong";
  EXPECT_THAT(Overlaps(c.a, c.b), IsOkAndHolds(c.overlaps));
  EXPECT_THAT(Overlaps(c.b, c.a), IsOkAndHolds(c.overlaps));
  CheckFindOverlaps({c.a, c.b});
  CheckFindOverlaps({c.b, c.a, c.b});
}

INSTANTIATE_TEST_SUITE_P(
    Cases, OverlapsTest,
    ::testing::ValuesIn(std::vector<OverlapsCase>{
        {"Same", Layout(0, {4}, {4}, 4), Layout(0, {4}, {4}, 4), true},
        {"SideBySide", Layout(0, {4}, {4}, 4), Layout(16, {4}, {4}, 4), false},
        {"LastByte", Layout(0, {4}, {4}, 4), Layout(15, {4}, {4}, 4), true},
        {"Inside", Layout(0, {}, {}, 100), Layout(50, {}, {}, 1), true},
        {"NeighbourColumns", Layout(0, {4, 3}, {12, 1}, 1), Layout(3, {4, 3}, {12, 1}, 1), false},
        {"SharedColumn", Layout(0, {4, 4}, {12, 1}, 1), Layout(3, {4, 3}, {12, 1}, 1), true},
        {"OddAndEven", Layout(0, {9}, {4}, 2), Layout(2, {9}, {4}, 2), false},
        {"RowInGap", Layout(0, {4, 3}, {12, 1}, 1), Layout(3, {}, {}, 9), false},
        {"DiagonalMeetsColumn", Layout(0, {5}, {6}, 1), Layout(2, {5}, {5}, 1), true},
        {"DiagonalMissesCorner", Layout(0, {5}, {6}, 1), Layout(3, {2, 2}, {5, 1}, 1), false},
        {"UnfoldTouchesItsEnd", Layout(0, {5, 3}, {2, 1}, 1), Layout(10, {}, {}, 4), true},
        {"UnfoldEndsBefore", Layout(0, {5, 3}, {2, 1}, 1), Layout(11, {}, {}, 4), false},
        {"CoprimeSteps", Layout(0, {20}, {7}, 1), Layout(1, {20}, {11}, 1), true},
        {"CoprimeStepsThatMiss", Layout(0, {3}, {7}, 1), Layout(1, {2}, {11}, 1), false},
        {"Broadcast", Layout(5, {9}, {0}, 1), Layout(0, {4}, {5}, 1), true},
        {"EmptyNever", Layout(0, {0, 4}, {4, 1}, 1), Layout(0, {4}, {1}, 1), false},
        {"BothEmpty", Layout(0, {0}, {1}, 1), Layout(0, {0}, {1}, 1), false},
    }),
    [](const auto& test) { return test.param.name; });

TEST(OverlapsTest, FarApartAtTheEndOfTheIndexRange) {
  const Index far = (Index{1} << 62) + 7;
  const StridedLayout a = *StridedLayout::Create(0, {2, 4}, {far, 1}, 1);
  EXPECT_THAT(Overlaps(a, Layout(far + 3, {4}, {1}, 1)), IsOkAndHolds(true));
  EXPECT_THAT(Overlaps(a, Layout(far + 4, {4}, {1}, 1)), IsOkAndHolds(false));
}

TEST(OverlapsTest, WorkLimitIsAnError) {
  // Diagonals of two widths: one of them has to be unrolled.
  const StridedLayout a = Layout(0, {1000}, {1001}, 1);
  const StridedLayout b = Layout(1, {1000}, {1003}, 1);
  EXPECT_THAT(Overlaps(a, b, 100),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("max_pieces")));
  const std::vector<StridedLayout> both{a, b};
  EXPECT_THAT(FindOverlaps(both, 100),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("max_pieces")));
  EXPECT_THAT(Overlaps(a, b), IsOk());
}

TEST(OverlapsTest, WorkLimitHoldsForRepeatedBytes) {
  // No common digits within one layout, and bytes that repeat.
  const StridedLayout tangled = Layout(0, {50, 40, 30}, {7, 11, 13}, 3);
  const std::vector<StridedLayout> twice{tangled, tangled};
  EXPECT_THAT(FindOverlaps(twice, 10),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("repeats bytes")));
}

TEST(FindOverlapsTest, NoneAndOne) {
  EXPECT_THAT(FindOverlaps({}), IsOkAndHolds(IsEmpty()));
  CheckFindOverlaps({Layout(0, {4}, {4}, 4)});
}

TEST(FindOverlapsTest, CountsSharedBytesOnce) {
  // The unfold touches bytes 0..6, most of them twice.
  const std::vector<StridedLayout> layouts{Layout(0, {5, 3}, {1, 1}, 1), Layout(4, {}, {}, 10)};
  EXPECT_THAT(FindOverlaps(layouts), IsOkAndHolds(ElementsAre(OverlapPair{0, 1, 3})));
}

TEST(FindOverlapsTest, AllOverOneAnother) {
  CheckFindOverlaps(std::vector<StridedLayout>(20, Layout(3, {4, 2}, {6, 2}, 2)));
}

// Writes of `n` equal blocks, one after the other.
std::vector<StridedLayout> Blocks(Index n) {
  std::vector<StridedLayout> layouts;
  for (Index i = 0; i < n; ++i) layouts.push_back(Layout(i * 512, {16, 32}, {32, 1}, 1));
  return layouts;
}

// `n` column slices of a matrix of 7168 rows.
std::vector<StridedLayout> Columns(Index n) {
  std::vector<StridedLayout> layouts;
  for (Index i = 0; i < n; ++i) layouts.push_back(Layout(i * 32, {7168, 16}, {n * 32, 2}, 2));
  return layouts;
}

// Column slices that start at odd places, each in one of two halves of `n` experts.
std::vector<StridedLayout> ExpertColumns(Index n) {
  std::vector<StridedLayout> layouts;
  for (Index e = 0; e < n; ++e) {
    for (Index half = 0; half < 2; ++half) {
      layouts.push_back(Layout(640 + e * 64 * 512 + half * 256, {64, 128}, {512, 2}, 2));
    }
  }
  return layouts;
}

TEST(FindOverlapsTest, DisjointRegularWritesHaveNone) {
  EXPECT_THAT(FindOverlaps(Blocks(768)), IsOkAndHolds(IsEmpty()));
  EXPECT_THAT(FindOverlaps(Columns(384)), IsOkAndHolds(IsEmpty()));
  EXPECT_THAT(FindOverlaps(ExpertColumns(384)), IsOkAndHolds(IsEmpty()));
}

TEST(FindOverlapsTest, WholeTensorMeetsEveryColumn) {
  std::vector<StridedLayout> layouts = Columns(384);
  layouts.push_back(Layout(0, {7168 * 384 * 16}, {2}, 2));
  const auto pairs = FindOverlaps(layouts);
  ASSERT_THAT(pairs, IsOk());
  ASSERT_EQ(pairs->size(), 384u);
  for (const OverlapPair& pair : *pairs) {
    EXPECT_EQ(pair.second, 384);
    EXPECT_EQ(pair.nbytes, 7168 * 32);
  }
}

// Best of nine runs, in seconds of CPU time: other programs do not count.
double Seconds(const std::vector<StridedLayout>& layouts) {
  double best = 1e9;
  for (int i = 0; i < 9; ++i) {
    const std::clock_t start = std::clock();
    EXPECT_THAT(FindOverlaps(layouts), IsOkAndHolds(IsEmpty()));
    best = std::min(best, static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
  }
  return best;
}

// Four times the writes: four to five times the time if n log n, sixteen if squared.
TEST(FindOverlapsTest, DisjointRegularWritesAreNotCompared) {
  EXPECT_LT(Seconds(Blocks(4 * 768)), 12 * Seconds(Blocks(768)) + 1e-4);
  EXPECT_LT(Seconds(Columns(4 * 384)), 12 * Seconds(Columns(384)) + 1e-4);
  EXPECT_LT(Seconds(ExpertColumns(4 * 384)), 12 * Seconds(ExpertColumns(384)) + 1e-4);
}

TEST(FindOverlapsPropertyTest, EqualsBruteForce) {
  ForEachRandom(3000, [](std::mt19937& gen) {
    std::vector<StridedLayout> layouts;
    const Index count = Uniform(gen, 2, 12);
    // Small ones at various places, so that some are disjoint.
    for (Index i = 0; i < count; ++i) {
      const StridedLayout layout =
          testing::RandomLayout(gen, testing::Pick<Index>(gen, {8, 24, 96}));
      layouts.push_back(Layout(layout.byte_offset() + Uniform(gen, 0, 8) * 12, layout.shape(),
                               layout.byte_strides(), layout.itemsize()));
    }
    CheckFindOverlaps(layouts);
  });
}

TEST(FindOverlapsPropertyTest, EqualsBruteForceForTilesOfAMatrix) {
  ForEachRandom(1000, [](std::mt19937& gen) {
    std::vector<StridedLayout> layouts;
    const Index width = Uniform(gen, 8, 20);
    for (Index i = Uniform(gen, 2, 30); i > 0; --i) {
      const Index row = Uniform(gen, 0, 10);
      const Index column = Uniform(gen, 0, width - 1);
      layouts.push_back(Layout(5 + row * width + column,
                               {Uniform(gen, 1, 3), Uniform(gen, 1, width - column)}, {width, 1},
                               1));
    }
    CheckFindOverlaps(layouts);
  });
}

TEST(MayShareBytesTest, TellsSpansAndInterleavedColumnsApart) {
  const StridedLayout left = Layout(0, {4, 2}, {4, 1}, 1);
  EXPECT_FALSE(MayShareBytes(left, Layout(2, {4, 2}, {4, 1}, 1)));
  EXPECT_TRUE(MayShareBytes(left, Layout(1, {4, 2}, {4, 1}, 1)));
  EXPECT_FALSE(MayShareBytes(left, Layout(16, {4}, {1}, 1)));
}

}  // namespace
}  // namespace loadplan
