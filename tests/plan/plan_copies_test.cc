#include "plan/plan_copies.h"

#include <utility>
#include <vector>

#include "bench/cases.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/oracle.h"

namespace loadplan {
namespace {

using ::loadplan::testing::kBFloat16;
using ::loadplan::testing::kFloat16;
using ::loadplan::testing::kFloat32;
using ::loadplan::testing::Map;

WriteItem Item(StorageId target, StridedMap map) {
  return {{OriginKind::kCheckpoint, 0, 0}, target, std::move(map), {}};
}
// Columns [start, start + width) of a target of 4 rows of 32 bytes.
WriteItem Columns(StorageId target, Index start, Index width) {
  return Item(target, Map({4}, {start, {32}, width}, {0, {64}, width}));
}

TEST(PlanCopiesTest, MakesJobsAtTheAddressesOfTheTargets) {
  const std::vector<WriteItem> writes = {Columns(0, 0, 16), Columns(2, 16, 16), Columns(1, 8, 8)};
  const PlanCopies copies(writes, {4096, 0, 65536});
  ASSERT_EQ(copies.jobs().size(), 2U);
  EXPECT_EQ(copies.JobsOf(writes[0]).count, 1U);
  EXPECT_EQ(copies.JobsOf(writes[1]).first, 1U);
  EXPECT_EQ(copies.jobs()[0].to, 4096U);
  EXPECT_EQ(copies.jobs()[1].to, 65536U + 16);
  EXPECT_EQ(copies.jobs()[1].nbytes, 64U);
  // Not on the device.
  EXPECT_EQ(copies.JobsOf(writes[2]).count, 0U);
}

TEST(PlanCopiesTest, MakesJobsOfCastsThatTheDeviceMakes) {
  std::vector<WriteItem> writes;
  for (const DType& from : {kFloat32, kFloat16, kFloat32}) {
    writes.push_back(Item(0, Map({4}, {8 * static_cast<Index>(writes.size()), {2}, 2},
                                 {0, {from.itemsize}, from.itemsize}, /*is_cast=*/true)));
    writes.back().casts = {from, kBFloat16};
  }
  writes[2].casts = {kFloat32, kFloat16, kBFloat16};  // several steps
  const PlanCopies copies(writes, {4096}, [](CopyCast cast) {
    return cast.from == kFloat32.code && cast.to == kBFloat16.code;
  });
  EXPECT_EQ(copies.JobsOf(writes[0]).count, 1U);
  EXPECT_EQ(copies.JobsOf(writes[1]).count, 0U);
  EXPECT_EQ(copies.JobsOf(writes[2]).count, 0U);
  ASSERT_EQ(copies.jobs().size(), 1U);
  EXPECT_EQ(copies.jobs()[0].cast.from, kFloat32.code);
  EXPECT_EQ(copies.jobs()[0].cast.to, kBFloat16.code);
  EXPECT_EQ(copies.jobs()[0].nbytes, 16U);  // of the larger items
}

TEST(PlanCopiesTest, LeavesCastsToTheirOwnWay) {
  std::vector<WriteItem> writes = {Item(0, Map({4}, {0, {2}, 2}, {0, {4}, 4}, /*is_cast=*/true))};
  writes[0].casts = {kFloat32, kBFloat16};
  const PlanCopies copies(writes, {4096});
  EXPECT_EQ(copies.JobsOf(writes[0]).count, 0U);
}

TEST(PlanCopiesTest, KnowsItsOwnItemsOnly) {
  const std::vector<WriteItem> writes = {Columns(0, 0, 16)};
  const WriteItem other = writes[0];
  const PlanCopies copies(writes, {4096});
  EXPECT_EQ(copies.JobsOf(other).count, 0U);
}

TEST(PlanCopiesTest, GivesWritesThatShareBytesBatchesOfTheirOwn) {
  const std::vector<WriteItem> writes = {Columns(0, 0, 8), Columns(0, 8, 8), Columns(0, 12, 8),
                                         Columns(1, 12, 8)};
  const PlanCopies copies(writes, {4096, 65536});
  EXPECT_FALSE(copies.JobsOf(writes[0]).is_alone);
  EXPECT_TRUE(copies.JobsOf(writes[1]).is_alone);
  EXPECT_TRUE(copies.JobsOf(writes[2]).is_alone);
  EXPECT_FALSE(copies.JobsOf(writes[3]).is_alone);
}

// A layer of Kimi-K2 on rank 1 of 8: every write is one job, moved by 16 bytes, in one batch.
TEST(PlanCopiesTest, TakesAnyWriteOfK2AsOneJobOfWideUnits) {
  const LoadPlan plan = *BuildLoadPlan(bench::MakeK2({.layers = 2}));
  std::size_t num_targets = 0;
  for (const TargetTensor& target : plan.targets()) {
    num_targets = std::max(num_targets, static_cast<std::size_t>(target.storage) + 1);
  }
  const PlanCopies copies(plan.writes(), std::vector<std::uint64_t>(num_targets, 4096));
  ASSERT_GT(plan.writes().size(), 1100U);
  for (const WriteItem& item : plan.writes()) {
    const PlanCopies::Jobs jobs = copies.JobsOf(item);
    ASSERT_EQ(jobs.count, 1U) << item;
    EXPECT_FALSE(jobs.is_alone) << item;
    EXPECT_EQ(copies.jobs()[jobs.first].unit, 16U) << item;
  }
}

}  // namespace
}  // namespace loadplan
