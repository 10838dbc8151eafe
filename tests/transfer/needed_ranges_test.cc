#include "transfer/needed_ranges.h"

#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/lifecycle/random_log.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/seed.h"

namespace loadplan {
namespace {

using ::loadplan::testing::ForEachRandom;
using ::loadplan::testing::kUint8;
using ::loadplan::testing::LogBuilder;
using ::loadplan::testing::RandomLog;
using ::loadplan::testing::View;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(NeededRangesTest, ColumnsAreRowsUntilTheGapsAreReadAlong) {
  LogBuilder log;
  const View target = log.Target("t", {3, 4});
  log.Copy(target, log.Source("x", {3, 8}).Slice(1, 2, 6));
  const LoadPlan plan = log.Build().value();
  EXPECT_THAT(NeededRanges(plan, 0, 3),
              ElementsAre(ByteRange{2, 6}, ByteRange{10, 14}, ByteRange{18, 22}));
  EXPECT_THAT(NeededRanges(plan, 0, 4), ElementsAre(ByteRange{2, 22}));
}

TEST(NeededRangesTest, KindsDecide) {
  LogBuilder log;
  const View t = log.Target("t", {8});
  const View u = log.Target("u", {4});
  const View a = log.Source("a", {8});
  log.Copy(t, a);
  log.Copy(t, log.Source("b", {16}).Slice(0, 0, 16, 2));  // overlaps `a`: both fall back
  log.Source("unneeded", {5});
  const View c = log.Source("c", {20});
  log.Copy(u, log.Node("double", {c.Slice(0, 16, 20)}, {4}));
  log.Source("empty", {0});
  const LoadPlan plan = log.Build().value();
  EXPECT_THAT(NeededRanges(plan, 0, 0), ElementsAre(ByteRange{0, 8}));
  EXPECT_THAT(NeededRanges(plan, 1, 0), ElementsAre(ByteRange{0, 16}));
  EXPECT_THAT(NeededRanges(plan, 2, 100), IsEmpty());
  EXPECT_THAT(NeededRanges(plan, 3, 0), ElementsAre(ByteRange{16, 20}));
  EXPECT_THAT(NeededRanges(plan, 4, 0), IsEmpty());
}

TEST(NeededRangesTest, LargeNeighboursStayApart) {
  constexpr Index kHalf = kApartNbytes;
  LogBuilder log;
  const View x = log.Source("x", {2 * kHalf});
  log.Copy(log.Target("a", {kHalf}), x.Slice(0, 0, kHalf));
  log.Copy(log.Target("b", {kHalf}), x.Slice(0, kHalf, 2 * kHalf));
  log.Copy(log.Target("c", {3}), log.Source("y", {6}).Slice(0, 0, 3));
  const LoadPlan plan = log.Build().value();
  EXPECT_THAT(NeededRanges(plan, 0, 100),
              ElementsAre(ByteRange{0, kHalf}, ByteRange{kHalf, 2 * kHalf}));
}

// Every byte that a write or a program reads is in exactly one range, and gaps are over the limit.
TEST(NeededRangesPropertyTest, HoldEveryByteThatIsRead) {
  int checked = 0;
  ForEachRandom(300, [&](std::mt19937& gen) {
    RandomLog log(gen);
    const auto bound = log.Bind();
    if (bound == nullptr) return;
    const LoadPlan& plan = bound->plan();
    const auto gap = static_cast<Index>(gen() % 12);
    for (std::int32_t entry = 0; entry < 3; ++entry) {
      std::vector<int> count(static_cast<std::size_t>(RandomLog::kExtent * 4), 0);
      Index stop = -gap - 1;
      for (const ByteRange& range : NeededRanges(plan, entry, gap)) {
        ASSERT_GT(range.start, stop + gap);
        stop = range.stop;
        for (Index i = range.start; i < stop; ++i) ++count[static_cast<std::size_t>(i)];
      }
      const auto check = [&](const StridedMap& map) {
        ForEachRun(PackedTo(map), [&](Index, Index from, Index nbytes) {
          for (Index i = from; i < from + nbytes; ++i) {
            ++checked;
            ASSERT_EQ(count[static_cast<std::size_t>(i)], 1);
          }
        });
      };
      for (const WriteItem& item : plan.writes_of(entry)) check(item.map);
      for (const Program& program : plan.programs()) {
        for (const ProgramInput& input : program.inputs) {
          for (const WriteItem& piece : input.pieces) {
            if (piece.origin == Origin{OriginKind::kCheckpoint, entry, 0}) check(piece.map);
          }
        }
      }
    }
  });
  EXPECT_GT(checked, 1000);
}

}  // namespace
}  // namespace loadplan
