#include "plan/coverage.h"

#include <random>
#include <set>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/plan/byte_oracle.h"
#include "tests/testing/random_geometry.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"

namespace loadplan::testing {
namespace {

using ::testing::ElementsAre;

StridedLayout Range(Index start, Index nbytes) {
  return StridedLayout::Unchecked(start, {}, {}, nbytes);
}

std::set<Index> DistinctBytes(const StridedLayout& layout) {
  std::set<Index> bytes;
  for (const Index offset : ItemOffsets(layout)) {
    for (Index i = 0; i < layout.itemsize(); ++i) bytes.insert(offset + i);
  }
  return bytes;
}

TEST(DistinctNbytesTest, CountsEachByteOnce) {
  EXPECT_THAT(DistinctNbytes(Range(3, 8)), IsOkAndHolds(8));
  EXPECT_THAT(DistinctNbytes(StridedLayout::Unchecked(0, {3, 2}, {0, 4}, 4)), IsOkAndHolds(8));
  EXPECT_THAT(DistinctNbytes(StridedLayout::Unchecked(0, {3, 2}, {1, 1}, 1)), IsOkAndHolds(4));
  EXPECT_THAT(DistinctNbytes(StridedLayout::Unchecked(0, {0, 2}, {1, 1}, 1)), IsOkAndHolds(0));
}

TEST(UntouchedNbytesTest, TargetsMayAlias) {
  EXPECT_THAT(UntouchedNbytes({Range(0, 8), Range(4, 4), Range(8, 2)}, {Range(0, 3), Range(5, 1)}),
              ElementsAre(4, 3, 2));
}

TEST(UntouchedNbytesTest, RegionsMayOverlap) {
  EXPECT_THAT(UntouchedNbytes({Range(0, 8)}, {Range(0, 4), Range(2, 4), Range(0, 1)}),
              ElementsAre(2));
}

TEST(UntouchedNbytesTest, NothingTouchedNothingThere) {
  EXPECT_THAT(UntouchedNbytes({Range(0, 8)}, {}), ElementsAre(8));
  EXPECT_THAT(UntouchedNbytes({}, {Range(0, 8)}), ElementsAre());
}

TEST(UntouchedNbytesPropertyTest, IsTheDifferenceOfByteSets) {
  ForEachRandom(500, [](std::mt19937& generator) {
    std::vector<StridedLayout> targets;
    std::vector<StridedLayout> regions;
    const auto draw = [&] { return RandomViewOf(generator, RandomDense(generator, 48)); };
    for (Index n = Uniform(generator, 1, 3); n-- > 0;) targets.push_back(draw());
    for (Index n = Uniform(generator, 0, 6); n-- > 0;) regions.push_back(draw());
    std::set<Index> touched;
    for (const StridedLayout& region : regions) touched.merge(DistinctBytes(region));
    std::vector<Index> expected;
    for (const StridedLayout& target : targets) {
      std::set<Index> bytes = DistinctBytes(target);
      EXPECT_THAT(DistinctNbytes(target), IsOkAndHolds(static_cast<Index>(bytes.size())));
      for (const Index byte : touched) bytes.erase(byte);
      expected.push_back(static_cast<Index>(bytes.size()));
    }
    EXPECT_EQ(UntouchedNbytes(targets, regions), expected);
  });
}

}  // namespace
}  // namespace loadplan::testing
