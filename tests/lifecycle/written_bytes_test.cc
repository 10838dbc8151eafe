#include "lifecycle/written_bytes.h"

#include <ATen/ATen.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lifecycle/undefined_bytes.h"
#include "tests/lifecycle/live_log.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using ::loadplan::testing::IsOk;
using ::loadplan::testing::kFloat32;
using ::loadplan::testing::LiveLog;
using ::loadplan::testing::StatusIs;
using ::loadplan::testing::View;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

StridedLayout Range(Index start, Index stop) {
  return StridedLayout::Unchecked(start, {stop - start}, {1}, 1);
}

TEST(WrittenBytesTest, CountsBytesOncePerTarget) {
  // `w` is 4 by 8 bytes; `row` shows its second row.
  const std::vector<TargetTensor> targets = {
      {"w", 0, StridedLayout::Unchecked(0, {4, 8}, {8, 1}, 1), kFloat32},
      {"row", 0, Range(8, 16), kFloat32},
      {"v", 1, Range(0, 4), kFloat32}};
  WrittenBytes written;
  EXPECT_TRUE(written.empty());
  written.Add(0, StridedLayout::Unchecked(2, {4}, {8}, 2));  // a column
  written.Add(0, Range(0, 4));
  const std::vector<TargetBytes> bytes = written.PerTarget(targets);
  ASSERT_EQ(bytes.size(), 3U);
  EXPECT_EQ(bytes[0].nbytes, 10);
  EXPECT_EQ(bytes[0].total_nbytes, 32);
  EXPECT_THAT(bytes[0].ranges, ElementsAre(ByteRange{0, 28}));
  EXPECT_EQ(bytes[1].nbytes, 2);
  EXPECT_THAT(bytes[1].ranges, ElementsAre(ByteRange{8, 16}));
  EXPECT_EQ(bytes[2].nbytes, 0);
  EXPECT_THAT(bytes[2].ranges, IsEmpty());
}

TEST(WrittenBytesTest, MergesRanges) {
  EXPECT_THAT(MergedRanges({{4, 6}, {0, 2}, {2, 3}, {9, 9}}, 8),
              ElementsAre(ByteRange{0, 3}, ByteRange{4, 6}));
  EXPECT_THAT(MergedRanges({{0, 1}, {2, 3}, {4, 5}}, 2),
              ElementsAre(ByteRange{0, 1}, ByteRange{2, 5}));
}

// `w` <- `x` (its second half), `v` <- live `w` times `y`.
class UndefinedBytesTest : public ::testing::Test {
 protected:
  UndefinedBytesTest() {
    const View w = log_.Target("w", {4});
    const View v = log_.Target("v", {2});
    log_.Copy(v, log_.Multiply(w.Slice(0, 0, 2), log_.Source("y", {2})));
    log_.Copy(w.Slice(0, 2, 4), log_.Source("x", {2}));
    bound_ = log_.Bind().value();
  }
  const std::vector<TargetTensor>& targets() const { return bound_->plan().targets(); }
  absl::Status CheckCovered() const {
    return undefined_.CheckCovered(targets(), WrittenBytes::OfPlan(bound_->plan()));
  }
  void Add(StorageId storage, Index start, Index stop) {
    WrittenBytes written;
    written.Add(storage, Range(start, stop));
    undefined_.Add(targets(), written);
  }

  LiveLog log_;
  std::shared_ptr<const BoundPlan> bound_;
  UndefinedBytes undefined_;
};

TEST_F(UndefinedBytesTest, AreMadeGoodByThoseBytesAndNoOthers) {
  Add(0, 8, 12);
  EXPECT_THAT(CheckCovered(), IsOk());
  EXPECT_THAT(undefined_.CheckNotRead(bound_->plan()), IsOk());
  ASSERT_EQ(undefined_.targets().size(), 1U);
  EXPECT_EQ(undefined_.targets()[0].name, "w");
  EXPECT_EQ(undefined_.targets()[0].nbytes, 4);
  EXPECT_THAT(undefined_.targets()[0].ranges, ElementsAre(ByteRange{8, 12}));
  Add(0, 4, 12);
  EXPECT_EQ(undefined_.targets()[0].nbytes, 8);
  EXPECT_THAT(CheckCovered(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                       HasSubstr("left bytes of `w` undefined")));
  undefined_.Clear();
  EXPECT_THAT(CheckCovered(), IsOk());
  EXPECT_THAT(undefined_.targets(), IsEmpty());
}

TEST_F(UndefinedBytesTest, MustNotBeComputedFrom) {
  Add(0, 4, 8);
  EXPECT_THAT(undefined_.CheckNotRead(bound_->plan()),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("computes from the bytes that `w` held before")));
}

TEST_F(UndefinedBytesTest, RefusesAPlanWithoutTheTarget) {
  Add(1, 0, 4);
  LiveLog other;
  const View w = other.Target("w", {4});
  other.Copy(w, other.Source("x", {4}));
  const auto plan = other.Bind().value();
  EXPECT_THAT(undefined_.CheckCovered(plan->plan().targets(), WrittenBytes::OfPlan(plan->plan())),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("`v`")));
}

}  // namespace
}  // namespace loadplan
