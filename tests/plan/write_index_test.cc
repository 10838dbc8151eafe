#include "plan/write_index.h"

#include <algorithm>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/seed.h"

namespace loadplan::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<Index> Meeting(const WriteIndex& index, ByteRange range, Index before) {
  std::vector<Index> times;
  index.ForEachMeeting(range, before, [&](Index time) { times.push_back(time); });
  std::sort(times.begin(), times.end());
  return times;
}

TEST(WriteIndexTest, FindsNothingInNothing) {
  EXPECT_EQ(WriteIndex().NewestMeeting({0, 10}, 0, 10), -1);
  EXPECT_THAT(Meeting(WriteIndex(std::vector<TimedSpan>{}), {0, 10}, 10), IsEmpty());
}

TEST(WriteIndexTest, NeighboursDoNotMeet) {
  const WriteIndex index({{3, {0, 4}}, {5, {4, 8}}});
  EXPECT_EQ(index.NewestMeeting({0, 4}, 0, 9), 3);
  EXPECT_EQ(index.NewestMeeting({3, 5}, 0, 9), 5);
  EXPECT_EQ(index.NewestMeeting({8, 9}, 0, 9), -1);
  EXPECT_EQ(index.NewestMeeting({4, 4}, 0, 9), -1);
}

TEST(WriteIndexTest, TimesAreHalfOpen) {
  const WriteIndex index({{3, {0, 4}}, {5, {0, 4}}});
  EXPECT_EQ(index.NewestMeeting({0, 1}, 0, 5), 3);
  EXPECT_EQ(index.NewestMeeting({0, 1}, 3, 5), 3);
  EXPECT_EQ(index.NewestMeeting({0, 1}, 4, 5), -1);
  EXPECT_EQ(index.NewestMeeting({0, 1}, 5, 6), 5);
  EXPECT_THAT(Meeting(index, {0, 1}, 5), ElementsAre(3));
}

// The answers are those of a walk over all writes, for spread, stacked and random
// spans alike.
TEST(WriteIndexPropertyTest, AnswersAsAWalkDoes) {
  ForEachRandom(300, [](std::mt19937& generator) {
    const auto draw = [&](Index low, Index high) {
      return std::uniform_int_distribution<Index>(low, high)(generator);
    };
    std::vector<TimedSpan> writes;
    const Index width = draw(1, 200);
    Index time = 0;
    for (Index n = draw(0, 200); n-- > 0;) {
      const Index start = draw(0, 200);
      writes.push_back({time += draw(1, 3), {start, start + draw(1, width)}});
    }
    const WriteIndex index(writes);
    for (int query = 0; query < 50; ++query) {
      const Index start = draw(0, 400);
      const ByteRange range{start, start + draw(0, 30)};
      const Index since = draw(0, 100);
      const Index before = draw(0, 400);
      Index newest = -1;
      std::vector<Index> all;
      for (const TimedSpan& write : writes) {
        if (range.empty() || write.span.start >= range.stop || range.start >= write.span.stop ||
            write.time >= before) {
          continue;
        }
        all.push_back(write.time);
        if (write.time >= since) newest = std::max(newest, write.time);
      }
      EXPECT_EQ(index.NewestMeeting(range, since, before), newest);
      EXPECT_EQ(Meeting(index, range, before), all);
    }
  });
}

}  // namespace
}  // namespace loadplan::testing
