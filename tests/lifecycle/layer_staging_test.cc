#include "lifecycle/layer_staging.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lifecycle/execute.h"
#include "tests/lifecycle/live_log.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using ::loadplan::testing::IsOk;
using ::loadplan::testing::LiveLog;
using ::loadplan::testing::StatusIs;
using ::loadplan::testing::View;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

// The targets of `log`, those of `names` on meta.
std::shared_ptr<const TargetSet> OnMeta(LiveLog& log, const std::vector<std::string>& names) {
  std::vector<LiveTarget> targets = log.live();
  for (LiveTarget& target : targets) {
    if (std::ranges::find(names, target.name) != names.end()) {
      target.tensor = target.tensor.to(at::kMeta);
    }
  }
  return std::make_shared<const TargetSet>(TargetSet::Create(std::move(targets)).value());
}

// Three layers of one tensor each, 16 bytes; `a` and `b` come in two halves, `c` has a row that
// nothing writes.
class LayerStagingTest : public ::testing::Test {
 protected:
  LayerStagingTest() {
    const View a = log_.Target("a", {2, 2});
    const View b = log_.Target("b", {2, 2});
    const View c = log_.Target("c", {2, 2});
    for (const auto& [target, name] : {std::pair{a, "a"}, {b, "b"}}) {
      log_.Copy(target.Slice(0, 0, 1), log_.Source(std::string(name) + "0", {1, 2}));
      log_.Copy(target.Slice(0, 1, 2), log_.Source(std::string(name) + "1", {1, 2}));
    }
    log_.Copy(c.Slice(0, 1, 2), log_.Source("c1", {1, 2}));
    plan_ = log_.Bind().value();
    targets_ = OnMeta(log_, {"a", "b", "c"});
    spec_.targets = {{"a", 0, at::kCPU, {}}, {"b", 1, at::kCPU, {}}, {"c", 2, at::kCPU, {}}};
  }
  void Make() {
    absl::StatusOr<std::unique_ptr<LayerStaging>> staging =
        LayerStaging::Create(plan_->traced, targets_, spec_);
    ASSERT_THAT(staging.status(), IsOk());
    staging_ = *std::move(staging);
    executor_ = std::make_unique<PlanExecutor>(plan_->traced, targets_, staging_.get());
    ASSERT_THAT(executor_->Begin(), IsOk());
  }
  void Send(const std::string& name, double value) {
    at::Tensor sent = at::full({1, 2}, value);
    ASSERT_THAT(executor_->Deliver(*plan_->plan().Find(name), sent), IsOk());
    sent.zero_();
  }
  // The next ready group, or -1.
  std::int32_t Take(bool finishing = false) {
    return staging_->TakeReady(finishing).value().value_or(-1);
  }
  at::Tensor TensorOf(std::int32_t group) {
    return staging_->TensorsOf(group).value().front().tensor;
  }
  static at::Tensor Rows(double first, double second) {
    return at::stack({at::full({2}, first), at::full({2}, second)});
  }

  LiveLog log_;
  std::shared_ptr<const BoundPlan> plan_;
  std::shared_ptr<const TargetSet> targets_;
  StagingSpec spec_;
  std::unique_ptr<LayerStaging> staging_;
  std::unique_ptr<PlanExecutor> executor_;
};

TEST_F(LayerStagingTest, GivesALayerWhenItsLastByteIsThere) {
  Make();
  Send("b1", 1);
  EXPECT_EQ(Take(), -1);
  Send("b0", 2);
  ASSERT_EQ(Take(), 1);
  EXPECT_TRUE(at::equal(TensorOf(1), Rows(2, 1)));
  staging_->Release(1);
  EXPECT_EQ(Take(), -1);
  EXPECT_EQ(staging_->peak_nbytes(), 16);
}

TEST_F(LayerStagingTest, NeverGivesALayerWithoutItsBytes) {
  Make();
  Send("a0", 1);
  EXPECT_THAT(staging_->TakeReady(true).status(),
              StatusIs(kPrecondition, HasSubstr("the layer of `a` got 8 of 16 bytes")));
  // Another one may have written the rest where it belongs.
  Make();
  Send("a0", 1);
  staging_->WroteElsewhere(*plan_->plan().Find("a1"));
  EXPECT_EQ(Take(true), 0);
}

TEST_F(LayerStagingTest, HoldsBytesForWhichThereIsNoRoom) {
  spec_.max_nbytes = 20;
  Make();
  Send("a0", 1);
  Send("b0", 2);
  Send("b1", 3);
  EXPECT_EQ(Take(), -1);
  EXPECT_EQ(staging_->peak_held_nbytes(), 16);
  Send("a1", 4);
  ASSERT_EQ(Take(), 0);
  EXPECT_TRUE(at::equal(TensorOf(0), Rows(1, 4)));
  EXPECT_EQ(Take(), -1);  // `b` waits for the room of `a`
  staging_->Release(0);
  Send("c1", 5);  // `c` takes it; `b` is complete all the same
  ASSERT_EQ(Take(), 2);
  staging_->Release(2);
  ASSERT_EQ(Take(), 1);
  EXPECT_TRUE(at::equal(TensorOf(1), Rows(2, 3)));
  staging_->Release(1);
  EXPECT_EQ(staging_->peak_nbytes(), 16);
}

TEST_F(LayerStagingTest, DeferredLayersComeLast) {
  spec_.deferred_layers = {0};
  Make();
  for (const char* name : {"a0", "a1"}) Send(name, 1);
  EXPECT_EQ(Take(), -1);
  for (const char* name : {"b0", "b1", "c1"}) Send(name, 1);
  ASSERT_EQ(Take(true), 1);
  staging_->Release(1);
  ASSERT_EQ(Take(true), 2);
  staging_->Release(2);
  ASSERT_EQ(Take(true), 0);
  staging_->Release(0);
  EXPECT_EQ(Take(true), -1);
}

TEST_F(LayerStagingTest, AllCanWaitForTheEnd) {
  spec_.defer_processing = true;
  Make();
  for (const char* name : {"a0", "a1"}) Send(name, 1);
  EXPECT_EQ(Take(), -1);
  EXPECT_EQ(Take(true), 0);
}

TEST_F(LayerStagingTest, ALayerThatGotNothingIsNotGiven) {
  Make();
  EXPECT_EQ(Take(true), -1);
  EXPECT_EQ(staging_->peak_nbytes(), 0);
}

TEST_F(LayerStagingTest, UnwrittenBytesAreThoseOfANewModel) {
  spec_.targets[2].initial = at::full({1}, 9.0);
  Make();
  Send("c1", 5);
  ASSERT_EQ(Take(), 2);
  EXPECT_TRUE(at::equal(TensorOf(2), Rows(9, 5)));
}

TEST_F(LayerStagingTest, UnwrittenBytesOfUnknownValueAreZero) {
  Make();
  Send("c1", 5);
  ASSERT_EQ(Take(), 2);
  EXPECT_TRUE(at::equal(TensorOf(2), Rows(0, 5)));
}

TEST_F(LayerStagingTest, RefusesALayerBeyondTheBound) {
  spec_.max_nbytes = 15;
  EXPECT_THAT(LayerStaging::Create(plan_->traced, targets_, spec_).status(),
              StatusIs(kPrecondition, AllOf(HasSubstr("the layer of `a` needs 16 staged bytes"),
                                            HasSubstr("max_staging_bytes=15"))));
}

TEST_F(LayerStagingTest, RefusesATargetThatThePlanDoesNotKnow) {
  spec_.targets.push_back({"late", 3, at::kCPU, {}});
  EXPECT_THAT(LayerStaging::Create(plan_->traced, targets_, spec_).status(),
              StatusIs(kPrecondition, HasSubstr("`late` came after the plan was made")));
}

TEST_F(LayerStagingTest, AHalfCoveredLayerIsNotWhole) {
  Make();
  EXPECT_THAT(staging_->CheckWhole(), IsOk());
  Send("a0", 1);
  EXPECT_THAT(staging_->CheckWhole(),
              StatusIs(kPrecondition, HasSubstr("the layer of `a` got 8 of 16 bytes")));
  Send("a1", 1);
  EXPECT_THAT(staging_->CheckWhole(), IsOk());
}

TEST_F(LayerStagingTest, ADeferredLayerIsNotLeftOut) {
  spec_.deferred_layers = {0};
  Make();
  EXPECT_THAT(staging_->CheckWhole(), IsOk());
  Send("b0", 1);
  Send("b1", 1);
  EXPECT_THAT(staging_->CheckWhole(),
              StatusIs(kPrecondition, HasSubstr("the layer of `a` is processed in every update")));
  Send("a0", 1);
  Send("a1", 1);
  EXPECT_THAT(staging_->CheckWhole(), IsOk());
}

TEST_F(LayerStagingTest, TellsOfWhichTakenLayersNothingIsKnown) {
  spec_.targets[1].initial = at::full({1}, 9.0);
  Make();
  for (const char* name : {"a0", "a1", "b0", "b1"}) Send(name, 1);
  EXPECT_TRUE(staging_->TakenUnknown().empty());
  ASSERT_EQ(Take(), 0);
  staging_->Release(0);
  ASSERT_EQ(Take(), 1);
  ASSERT_EQ(staging_->TakenUnknown().size(), 1U);
  EXPECT_EQ(staging_->TakenUnknown()[0].name, "a");
}

// `c1` goes through the loader, which may write `c`.
TEST_F(LayerStagingTest, TheCallWaitsForRoom) {
  log_.log().input().fallbacks.emplace_back(4, "it reads a value");
  plan_ = log_.Bind().value();
  spec_.max_nbytes = 20;
  Make();
  EXPECT_TRUE(staging_->HasRoomForCall());
  Send("a0", 1);
  EXPECT_FALSE(staging_->HasRoomForCall());
  Send("a1", 1);
  ASSERT_EQ(Take(), 0);
  staging_->Release(0);
  EXPECT_TRUE(staging_->HasRoomForCall());
}

// `w` is staged; `b` is a buffer of the same layer, written where it is.
class LayerWithBufferTest : public ::testing::Test {
 protected:
  LayerWithBufferTest() {
    const View w = log_.Target("w", {2});
    const View b = log_.Target("b", {2, 2});
    log_.Copy(w, log_.Source("w", {2}));
    log_.Copy(b.Slice(0, 0, 1), log_.Source("b", {1, 2}));
    log_.Copy(b.Slice(0, 1, 2), log_.Constant(at::full({1, 2}, 3.0)));
    plan_ = log_.Bind().value();
    StagingSpec spec;
    spec.targets = {{"w", 0, at::kCPU, {}}, {"b", 0, at::kCPU, {}}};
    targets_ = OnMeta(log_, {"w"});
    staging_ = LayerStaging::Create(plan_->traced, targets_, spec).value();
    executor_ = std::make_unique<PlanExecutor>(plan_->traced, targets_, staging_.get());
  }

  LiveLog log_;
  std::shared_ptr<const BoundPlan> plan_;
  std::shared_ptr<const TargetSet> targets_;
  std::unique_ptr<LayerStaging> staging_;
  std::unique_ptr<PlanExecutor> executor_;
};

TEST_F(LayerWithBufferTest, WaitsForTheBufferAndSetsItsConstantsFirst) {
  ASSERT_THAT(executor_->Begin(), IsOk());
  ASSERT_THAT(executor_->Deliver(0, at::full({2}, 1.0)), IsOk());
  EXPECT_EQ(staging_->TakeReady(false).value(), std::nullopt);
  ASSERT_THAT(executor_->Deliver(1, at::full({1, 2}, 2.0)), IsOk());
  EXPECT_TRUE(staging_->WritesLiveConstants(0));
  EXPECT_EQ(staging_->TakeReady(false).value(), 0);
  const at::Tensor& b = log_.target(1);
  EXPECT_TRUE(at::equal(b, at::stack({at::full({2}, 2.0), at::full({2}, 3.0)})));
  // Only `w` is staged. What processing makes of `b` stays: the constants are not set again.
  EXPECT_EQ(staging_->TensorsOf(0).value().size(), 1u);
  EXPECT_EQ(staging_->peak_nbytes(), 8);
  b.fill_(9);
  staging_->Release(0);
  ASSERT_THAT(executor_->Finish(), IsOk());
  EXPECT_TRUE(at::equal(b, at::full({2, 2}, 9.0)));
}

// It counts the bytes that it waits for as they are written: nobody writes them past it.
TEST_F(LayerWithBufferTest, GivesNoPlaces) {
  ASSERT_THAT(executor_->Begin(), IsOk());
  const StridedMap all = StridedMap::Unchecked({}, {0, {}, 8}, {0, {}, 8}, false);
  for (const std::int32_t entry : {0, 1}) {
    EXPECT_FALSE(executor_->PlacesOf(entry, all)->has_value());
    EXPECT_FALSE(executor_->InPlace(entry, {0, 8})->has_value());
  }
}

TEST(LayerStagingReads, ALiveTensorThatComesIsReadAfterTheCopiesThatWait) {
  LiveLog log;
  const View p = log.Target("p", {2});
  const View b = log.Target("b", {2});
  log.Copy(p, log.Source("x", {2}));
  log.Copy(b, log.Source("y", {2}));
  const auto plan = log.Bind().value();
  StagingSpec spec;
  spec.targets = {{"b", 0, at::kCPU, {}}};
  const auto staging = LayerStaging::Create(plan->traced, plan->targets, spec).value();
  PlanExecutor executor(plan->traced, plan->targets, staging.get());
  const CopyDevice host = *HostCopyDevice(*plan->targets);
  executor.BatchOn(host, plan->on_device.Get(plan->plan(), *plan->targets, host));
  ASSERT_THAT(executor.Begin(), IsOk());
  executor.BeginBatch();
  ASSERT_THAT(executor.Deliver(0, at::full({2}, 3.0)), IsOk());
  ASSERT_THAT(executor.Deliver(1, log.target(0)), IsOk());
  ASSERT_THAT(executor.Flush(), IsOk());
  EXPECT_TRUE(at::equal(log.target(1), at::full({2}, 3.0)));
}

TEST(LayerStagingReads, LiveBytesAreCopiedBeforeTheLayerIsProcessed) {
  LiveLog log;
  const View w = log.Target("w", {2});
  const View from = log.Target("from", {2});
  const View to = log.Target("to", {2});
  log.Copy(to, from);
  log.Copy(w, log.Source("w", {2}));
  const auto plan = log.Bind().value();
  const auto targets = OnMeta(log, {"w"});
  StagingSpec spec;
  spec.targets = {{"w", 0, at::kCPU, {}}, {"from", 0, at::kCPU, {}}, {"to", 0, at::kCPU, {}}};
  const auto staging = LayerStaging::Create(plan->traced, targets, spec).value();
  PlanExecutor executor(plan->traced, targets, staging.get());
  log.target(1).fill_(5);
  ASSERT_THAT(executor.Begin(), IsOk());
  ASSERT_THAT(executor.Deliver(0, at::ones({2})), IsOk());
  ASSERT_EQ(staging->TakeReady(false).value(), 0);
  EXPECT_TRUE(at::equal(log.target(2), at::full({2}, 5.0)));
  // Processing may change it: it is not copied again.
  log.target(2).fill_(6);
  ASSERT_THAT(executor.Finish(), IsOk());
  EXPECT_TRUE(at::equal(log.target(2), at::full({2}, 6.0)));
}

TEST(LayerStagingReads, RefusesBytesOfBeforeTheUpdate) {
  LiveLog log;
  const View a = log.Target("a", {2});
  const View b = log.Target("b", {2});
  log.Copy(a, b);
  log.Copy(b, log.Source("b", {2}));
  const auto plan = log.Bind().value();
  StagingSpec spec;
  spec.targets = {{"b", 0, at::kCPU, {}}};
  EXPECT_THAT(LayerStaging::Create(plan->traced, OnMeta(log, {"b"}), spec).status(),
              StatusIs(kPrecondition, HasSubstr("the loader reads bytes that `b` had before")));
}

TEST(LayerStagingReads, RefusesATargetOnMetaThatWasNotRecorded) {
  LiveLog log;
  const View a = log.Target("a", {2});
  log.Copy(a, log.Source("a", {2}));
  const auto plan = log.Bind().value();
  EXPECT_THAT(LayerStaging::Create(plan->traced, OnMeta(log, {"a"}), {}).status(),
              StatusIs(kPrecondition, HasSubstr("target `a` is on meta and was not recorded")));
}

}  // namespace
}  // namespace loadplan
