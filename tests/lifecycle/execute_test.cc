#include "lifecycle/execute.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/lifecycle/live_log.h"
#include "tests/lifecycle/random_log.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using ::loadplan::testing::ForEachRandom;
using ::loadplan::testing::IsOk;
using ::loadplan::testing::LiveLog;
using ::loadplan::testing::RandomLog;
using ::loadplan::testing::StatusIs;
using ::loadplan::testing::View;
using ::testing::HasSubstr;

// Runs an update with `tensors` (by source) in the given order.
absl::Status Update(const BoundPlan& bound, const std::vector<at::Tensor>& tensors,
                    const std::vector<std::int32_t>& order) {
  PlanExecutor executor(bound.traced, bound.targets);
  if (absl::Status status = executor.Begin(); !status.ok()) return status;
  for (const std::int32_t source : order) {
    // The sender's buffer, which is overwritten as soon as the call returns.
    at::Tensor buffer = tensors[static_cast<std::size_t>(source)].clone();
    if (absl::Status status = executor.Deliver(source, buffer); !status.ok()) return status;
    buffer.fill_(-1);
  }
  return executor.Finish();
}

TEST(PlanExecutorTest, LandsBoxesInTheirRegions) {
  LiveLog log;
  const View target = log.Target("w", {4, 3});
  const View source = log.Source("x", {3, 8});
  log.Copy(target, source.Slice(1, 4, 8).Transpose(0, 1));
  const auto bound = log.Bind().value();
  const at::Tensor x = at::randn({3, 8});
  ASSERT_THAT(Update(*bound, {x}, {0}), IsOk());
  EXPECT_TRUE(at::equal(log.target(0), x.slice(1, 4, 8).t()));
}

TEST(PlanExecutorTest, TakesTensorsThatAreNotContiguous) {
  LiveLog log;
  const View w_view = log.Target("w", {4, 3});
  log.Copy(w_view, log.Source("x", {4, 3}));
  const auto bound = log.Bind().value();
  const at::Tensor x = at::randn({3, 8}).slice(1, 2, 6).t();
  PlanExecutor executor(bound->traced, bound->targets);
  ASSERT_THAT(executor.Begin(), IsOk());
  ASSERT_THAT(executor.Deliver(0, x), IsOk());
  EXPECT_TRUE(at::equal(log.target(0), x));
  EXPECT_EQ(executor.written_nbytes(), 48);
}

TEST(PlanExecutorTest, SetsConstantsAtTheEnd) {
  LiveLog log;
  const View target = log.Target("w", {4, 3});
  log.Copy(target.Slice(0, 0, 2), log.Source("x", {2, 3}));
  log.Copy(target.Slice(0, 2, 4), log.Constant(at::zeros({2, 3})));
  const auto bound = log.Bind().value();
  const at::Tensor x = at::randn({2, 3});
  ASSERT_THAT(Update(*bound, {x}, {0}), IsOk());
  EXPECT_TRUE(at::equal(log.target(0), at::cat({x, at::zeros({2, 3})})));
}

TEST(PlanExecutorTest, CopiesLiveBytesAsTheyWereBeforeTheUpdate) {
  LiveLog log;
  const View head = log.Target("head", {3});
  const View old = log.Target("old", {3});
  log.Copy(old, head);
  log.Copy(head, log.Source("x", {3}));
  const auto bound = log.Bind().value();
  const at::Tensor before = log.target(0).clone();
  const at::Tensor x = at::randn({3});
  ASSERT_THAT(Update(*bound, {x}, {0}), IsOk());
  EXPECT_TRUE(at::equal(log.target(0), x));
  EXPECT_TRUE(at::equal(log.target(1), before));
}

TEST(PlanExecutorTest, RunsAProgramWhenItsLastInputArrives) {
  for (const std::vector<std::int32_t>& order :
       {std::vector<std::int32_t>{0, 1, 2}, {2, 1, 0}, {1, 0, 2}}) {
    LiveLog log;
    const View target = log.Target("w", {2, 3});
    const View a = log.Source("a", {2, 3});
    const View b = log.Source("b", {3, 2});
    const View c = log.Source("c", {3});
    // A program that reads another one's result, a transposed input and a broadcast one.
    const View product = log.Multiply(a, b.Transpose(0, 1));
    log.Copy(target, log.Multiply(product, c.Expand(0, 2)));
    const auto bound = log.Bind().value();
    ASSERT_EQ(bound->plan().programs().size(), 2U);
    const std::vector<at::Tensor> in = {at::randn({2, 3}), at::randn({3, 2}), at::randn({3})};
    ASSERT_THAT(Update(*bound, in, order), IsOk());
    EXPECT_TRUE(at::equal(log.target(0), in[0] * in[1].t() * in[2]));
  }
}

TEST(PlanExecutorTest, ComputesFromLiveBytesAtTheStart) {
  LiveLog log;
  const View target = log.Target("w", {3});
  log.Copy(target, log.Multiply(target, log.Source("x", {3})));
  const auto bound = log.Bind().value();
  const at::Tensor before = log.target(0).clone();
  const at::Tensor x = at::randn({3});
  ASSERT_THAT(Update(*bound, {x}, {0}), IsOk());
  EXPECT_TRUE(at::equal(log.target(0), before * x));
}

TEST(PlanExecutorTest, SaysWhichOperatorFailed) {
  LiveLog log;
  const View target = log.Target("w", {3});
  const View a = log.Source("a", {3});
  log.Copy(target, log.Multiply(a, a));
  log.ForgetNodes();
  const auto bound = log.Bind().value();
  EXPECT_THAT(Update(*bound, {at::randn({3})}, {0}),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("`aten::mul.Tensor` failed")));
}

// ---------------------------------------------------------------- against running the log itself
void RunRandomLog(std::mt19937& gen, int& planned) {
  RandomLog log(gen);
  const auto bound = log.Bind();
  if (bound == nullptr) return;
  ++planned;
  std::vector<std::int32_t> order = {0, 1, 2};
  std::shuffle(order.begin(), order.end(), gen);
  ASSERT_THAT(Update(*bound, log.weights(), order), IsOk());
  log.ExpectLeftAsRecorded();
}

TEST(PlanExecutorPropertyTest, LeavesWhatTheRecordsLeave) {
  int planned = 0;
  ForEachRandom(1000, [&](std::mt19937& gen) { RunRandomLog(gen, planned); });
  EXPECT_GT(planned, 500);
}

}  // namespace
}  // namespace loadplan
