#include "lifecycle/layer_progress.h"

#include <ATen/ATen.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/lifecycle/live_log.h"

namespace loadplan {
namespace {

using ::loadplan::testing::LiveLog;
using ::loadplan::testing::View;
using ::testing::ElementsAre;

// `a` [2, 3]: one row from `x`, one constant. `b` [4]: from `y`, half of it. `c` [2]: nothing.
// `d` [2]: a product.
class LayerProgressTest : public ::testing::Test {
 protected:
  LayerProgressTest() {
    const View a = log_.Target("a", {2, 3});
    const View b = log_.Target("b", {4});
    log_.Target("c", {2});
    const View d = log_.Target("d", {2});
    log_.Copy(a.Slice(0, 0, 1), log_.Source("x", {1, 3}));
    log_.Copy(a.Slice(0, 1, 2), log_.Constant(at::zeros({1, 3})));
    log_.Copy(b.Slice(0, 0, 2), log_.Source("y", {2}));
    log_.Copy(d, log_.Multiply(log_.Source("l", {2}), log_.Source("r", {2})));
    plan_ = log_.Bind().value();
  }
  LayerProgress Progress(std::vector<std::vector<std::int32_t>> layers) const {
    return LayerProgress(plan_->plan(), layers);
  }

  LiveLog log_;
  std::shared_ptr<const BoundPlan> plan_;
};

TEST_F(LayerProgressTest, CountsWhatEachLayerWaitsFor) {
  LayerProgress progress = Progress({{0}, {1}, {1}, {2}});
  ASSERT_EQ(progress.groups().size(), 3u);
  EXPECT_EQ(progress.group(0).expected_nbytes, 12);
  EXPECT_EQ(progress.group(0).constant_nbytes, 12);
  EXPECT_FALSE(progress.group(0).has_uncovered);
  EXPECT_EQ(progress.group(1).expected_nbytes, 8);
  EXPECT_TRUE(progress.group(1).has_uncovered);
  EXPECT_THAT(progress.group(1).storages, ElementsAre(1, 2));
  EXPECT_TRUE(progress.HasUncovered(1));
  EXPECT_TRUE(progress.HasUncovered(2));
  EXPECT_FALSE(progress.HasUncovered(0));
  EXPECT_EQ(progress.group(2).expected_nbytes, 8);
}

TEST_F(LayerProgressTest, IsCompleteWithTheLastByte) {
  LayerProgress progress = Progress({{0}, {1}, {1}, {2}});
  EXPECT_FALSE(progress.group(0).is_complete());
  progress.Count(0, 11);
  EXPECT_FALSE(progress.group(0).is_complete());
  progress.Count(0, 1);
  EXPECT_TRUE(progress.group(0).is_complete());
  EXPECT_FALSE(progress.group(1).is_complete());
}

TEST_F(LayerProgressTest, LayersThatShareAStorageAreOneGroup) {
  // 0 and 3 share `a`, 3 and 1 share `c`.
  LayerProgress progress = Progress({{0, 3}, {2}, {1, 3}, {2}});
  ASSERT_EQ(progress.groups().size(), 2u);
  EXPECT_THAT(progress.group(0).layers, ElementsAre(0, 1, 3));
  EXPECT_THAT(progress.group(0).storages, ElementsAre(0, 2));
  EXPECT_THAT(progress.group(1).layers, ElementsAre(2));
  EXPECT_EQ(progress.group(1).expected_nbytes, 16);
}

TEST_F(LayerProgressTest, StoragesOfNobodyCountNowhere) {
  LayerProgress progress = Progress({{}, {0}, {}, {}});
  ASSERT_EQ(progress.groups().size(), 1u);
  EXPECT_EQ(progress.GroupOf(0), -1);
  EXPECT_EQ(progress.GroupOf(1), 0);
  EXPECT_EQ(progress.group(0).expected_nbytes, 8);
}

}  // namespace
}  // namespace loadplan
