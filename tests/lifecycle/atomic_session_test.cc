#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lifecycle/reload_session.h"
#include "tests/lifecycle/live_log.h"
#include "tests/lifecycle/no_memory.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using ::loadplan::testing::IsOk;
using ::loadplan::testing::LiveLog;
using ::loadplan::testing::NoMemory;
using ::loadplan::testing::StatusIs;
using ::loadplan::testing::View;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr auto kInternal = absl::StatusCode::kInternal;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

// `w` <- `x` and a row of padding; `v` <- `a * b`; `tail` <- live bytes of `w`.
class AtomicSessionTest : public ::testing::TestWithParam<Index> {
 protected:
  AtomicSessionTest() {
    const View w = log_.Target("w", {3, 3});
    const View v = log_.Target("v", {3});
    const View tail = log_.Target("tail", {1, 3});
    log_.Copy(tail, w.Slice(0, 2, 3));
    log_.Copy(w.Slice(0, 0, 1), log_.Source("x", {1, 3}));
    log_.Copy(v, log_.Multiply(log_.Source("a", {3}), log_.Source("b", {3})));
    log_.Copy(w.Slice(0, 1, 2), log_.Constant(at::zeros({1, 3})));
    plan_ = log_.Bind().value();
    for (const LiveTarget& target : log_.live()) {
      target.tensor.copy_(at::rand(target.tensor.sizes()));
      before_.push_back(target.tensor.clone());
    }
  }
  void StartAndBegin() {
    ASSERT_THAT(session_.Start({.atomic = true, .undo = {.memory_nbytes = GetParam()}}), IsOk());
    ASSERT_THAT(session_.Begin(plan_, log_.live()), IsOk());
  }
  void DeliverAll() {
    for (const auto& [name, tensor] : weights_) ASSERT_THAT(session_.Deliver(name, tensor), IsOk());
  }
  void ExpectOldBytes() {
    for (std::size_t i = 0; i < before_.size(); ++i) {
      EXPECT_TRUE(at::equal(log_.target(i), before_[i])) << log_.live()[i].name;
    }
    EXPECT_EQ(session_.report().state, SessionState::kIdle);
    EXPECT_THAT(session_.report().undefined, IsEmpty());
    EXPECT_FALSE(session_.MayHaveWritten());
  }

  LiveLog log_;
  std::shared_ptr<const BoundPlan> plan_;
  std::vector<at::Tensor> before_;
  ReloadSession session_;
  const std::vector<std::pair<std::string, at::Tensor>> weights_ = {
      {"x", at::rand({1, 3})}, {"a", at::rand({3})}, {"b", at::rand({3})}};
};

TEST_P(AtomicSessionTest, AnUpdateThatEndsWellStays) {
  StartAndBegin();
  DeliverAll();
  ASSERT_THAT(session_.PrepareFinish(std::nullopt, log_.live()), IsOk());
  ASSERT_THAT(session_.Finish().status(), IsOk());
  EXPECT_TRUE(at::equal(log_.target(0)[0], weights_[0].second[0]));
  EXPECT_TRUE(at::equal(log_.target(1), weights_[1].second * weights_[2].second));
  EXPECT_TRUE(at::equal(log_.target(2), before_[0].slice(0, 2, 3)));
}

TEST_P(AtomicSessionTest, ABadArrivalPutsTheOldBytesBack) {
  for (std::size_t good = 0; good <= weights_.size(); ++good) {
    StartAndBegin();
    for (std::size_t i = 0; i < good; ++i) {
      ASSERT_THAT(session_.Deliver(weights_[i].first, weights_[i].second), IsOk());
    }
    EXPECT_THAT(session_.Deliver("z", weights_[0].second),
                StatusIs(kInvalid, AllOf(HasSubstr("`z` arrived but was not declared"),
                                         HasSubstr(good == 0 ? "nothing was written"
                                                             : "the old bytes are back"))));
    ExpectOldBytes();
    EXPECT_THAT(session_.report().error, HasSubstr("`z` arrived"));
  }
}

TEST_P(AtomicSessionTest, AbortAtAnyTimePutsTheOldBytesBack) {
  StartAndBegin();
  DeliverAll();
  ASSERT_THAT(session_.Abort(), IsOk());
  ExpectOldBytes();
  StartAndBegin();
  DeliverAll();
  ASSERT_THAT(session_.PrepareFinish(std::nullopt, log_.live()), IsOk());
  ASSERT_THAT(session_.Complete(), IsOk());
  ASSERT_THAT(session_.Abort(), IsOk());
  ExpectOldBytes();
}

TEST_P(AtomicSessionTest, AHookMayDestroyEverything) {
  StartAndBegin();
  ASSERT_THAT(session_.BeforeHook(log_.live()), IsOk());
  DeliverAll();
  for (const LiveTarget& target : log_.live()) target.tensor.fill_(5);
  EXPECT_THAT(session_.HookFailed("a hook raised", log_.live()),
              StatusIs(kPrecondition, HasSubstr("the old bytes are back")));
  ExpectOldBytes();
}

TEST_P(AtomicSessionTest, DestinationsAreKeptWhenTheyAreHandedOut) {
  plan_->handed_out.Add(0);
  ASSERT_THAT(session_.Start({.atomic = true, .destinations = {plan_}}), IsOk());
  log_.target(0).fill_(5);
  ASSERT_THAT(session_.Abort(), IsOk());
  ExpectOldBytes();
  ASSERT_THAT(session_.Start({.atomic = true}), IsOk());
  ASSERT_THAT(session_.HandOut(plan_), IsOk());
  log_.target(0).fill_(5);
  ASSERT_THAT(session_.Abort(), IsOk());
  ExpectOldBytes();
}

TEST_P(AtomicSessionTest, DestinationsThatAreHandedOutOneAfterTheOtherAreAllKept) {
  LiveLog two;
  const View w_view = two.Target("w", {2});
  const View v_view = two.Target("v", {2});
  two.Copy(w_view, two.Source("x", {2}));
  two.Copy(v_view, two.Source("y", {2}));
  const auto plan = two.Bind().value();
  ASSERT_THAT(session_.Start({.atomic = true, .undo = {.memory_nbytes = GetParam()}}), IsOk());
  for (const std::int32_t entry : {0, 1}) {
    plan->handed_out.Add(entry);
    ASSERT_THAT(session_.HandOut(plan), IsOk());
    two.target(static_cast<std::size_t>(entry)).fill_(5);
  }
  ASSERT_THAT(session_.Abort(), IsOk());
  for (const LiveTarget& target : two.live()) {
    EXPECT_TRUE(at::equal(target.tensor, at::full({2}, 77.f))) << target.name;
  }
}

TEST_P(AtomicSessionTest, WithoutMemoryForLiveBytesTheUpdateFails) {
  StartAndBegin();
  {
    const NoMemory no_memory;
    EXPECT_THAT(session_.Deliver("x", weights_[0].second),
                StatusIs(kInternal, AllOf(HasSubstr("before the first write could not be kept"),
                                          HasSubstr("no memory for 12 bytes"),
                                          HasSubstr("nothing was written"))));
  }
  EXPECT_FALSE(session_.Deliver("x", weights_[0].second).ok());
  ExpectOldBytes();
}

TEST_P(AtomicSessionTest, WithoutMemoryForOldBytesTheUpdateFails) {
  StartAndBegin();
  ASSERT_THAT(session_.Deliver("a", weights_[1].second), IsOk());
  {
    const NoMemory no_memory;
    EXPECT_THAT(session_.Deliver("x", weights_[0].second),
                StatusIs(kInternal, AllOf(HasSubstr("no memory for 12 bytes"), HasSubstr("`x`"),
                                          HasSubstr("nothing was written"))));
  }
  EXPECT_FALSE(session_.Deliver("x", weights_[0].second).ok());
  ExpectOldBytes();
}

TEST_P(AtomicSessionTest, AFailedModelStaysFailed) {
  ASSERT_THAT(session_.Start({}), IsOk());
  ASSERT_THAT(session_.Begin(plan_, log_.live()), IsOk());
  ASSERT_THAT(session_.Deliver("x", weights_[0].second), IsOk());
  ASSERT_THAT(session_.Abort(), IsOk());
  ASSERT_EQ(session_.report().state, SessionState::kFailed);
  const at::Tensor half = log_.target(0).clone();
  StartAndBegin();
  DeliverAll();
  ASSERT_THAT(session_.Abort(), IsOk());
  EXPECT_EQ(session_.report().state, SessionState::kFailed);
  EXPECT_TRUE(at::equal(log_.target(0), half));
  StartAndBegin();
  EXPECT_THAT(session_.Deliver("z", weights_[0].second),
              StatusIs(kInvalid, HasSubstr("an earlier failure has still to be made good")));
  EXPECT_EQ(session_.report().undefined.size(), 1U);
}

TEST_P(AtomicSessionTest, TheFallbackCallMayWriteAnything) {
  log_.log().input().fallbacks.emplace_back(0, "it reads a value");
  plan_ = log_.Bind().value();
  const at::Tensor mirror = at::rand({4});
  const at::Tensor mirror_before = mirror.clone();
  StartAndBegin();
  DeliverAll();
  ASSERT_THAT(session_.TakeFallbackCall().status(), IsOk());
  for (const LiveTarget& target : log_.live()) target.tensor.fill_(5);
  ASSERT_THAT(session_.KeepOther(mirror[1]), IsOk());
  mirror.fill_(5);
  EXPECT_THAT(session_.FallbackCallDone("ValueError: no", {}, log_.live()),
              StatusIs(kPrecondition, AllOf(HasSubstr("raised ValueError: no"),
                                            HasSubstr("the old bytes are back"))));
  ExpectOldBytes();
  EXPECT_TRUE(at::equal(mirror, mirror_before));
}

INSTANTIATE_TEST_SUITE_P(Places, AtomicSessionTest, ::testing::Values(-1, 0),
                         [](const auto& test) { return test.param < 0 ? "Memory" : "File"; });

}  // namespace
}  // namespace loadplan
