#include "lifecycle/reload_session.h"

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/lifecycle/live_log.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using ::loadplan::testing::IsOk;
using ::loadplan::testing::LiveLog;
using ::loadplan::testing::StatusIs;
using ::loadplan::testing::View;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

// `w` <- `x`; `v` <- `a * b`; a row of padding; `unused` goes nowhere.
class ReloadSessionTest : public ::testing::Test {
 protected:
  ReloadSessionTest() {
    const View w = log_.Target("w", {2, 3});
    const View v = log_.Target("v", {3});
    log_.Copy(w.Slice(0, 0, 1), log_.Source("x", {1, 3}));
    const View a = log_.Source("a", {3});
    log_.Copy(v, log_.Multiply(a, log_.Source("b", {3})));
    log_.Source("unused", {5});
    log_.Copy(w.Slice(0, 1, 2), log_.Constant(at::zeros({1, 3})));
    plan_ = log_.Bind().value();
  }

  absl::Status Begin() { return session_.Begin(plan_, log_.live()); }
  absl::Status Finish() {
    if (absl::Status status = session_.PrepareFinish(partial_, log_.live()); !status.ok()) {
      return status;
    }
    absl::StatusOr<Receipt> receipt = session_.Finish();
    if (receipt.ok()) receipt_ = *receipt;
    return receipt.status();
  }
  // A session with nothing delivered yet.
  void StartAndBegin() {
    ASSERT_THAT(session_.Start({}), IsOk());
    ASSERT_THAT(Begin(), IsOk());
  }
  void DeliverAll() {
    ASSERT_THAT(session_.Deliver("b", b_), IsOk());
    ASSERT_THAT(session_.Deliver("x", x_), IsOk());
    ASSERT_THAT(session_.Deliver("a", a_), IsOk());
  }
  void ExpectNewBytes() {
    EXPECT_TRUE(at::equal(log_.target(0), at::cat({x_, at::zeros({1, 3})})));
    EXPECT_TRUE(at::equal(log_.target(1), a_ * b_));
  }
  void ExpectOldBytes() {
    EXPECT_TRUE(at::equal(log_.target(0), at::full({2, 3}, 77.f)));
    EXPECT_TRUE(at::equal(log_.target(1), at::full({3}, 77.f)));
  }
  SessionState state() const { return session_.report().state; }

  LiveLog log_;
  std::shared_ptr<const BoundPlan> plan_;
  ReloadSession session_;
  std::optional<std::vector<std::string>> partial_;
  Receipt receipt_;
  const at::Tensor x_ = at::randn({1, 3});
  const at::Tensor a_ = at::randn({3});
  const at::Tensor b_ = at::randn({3});
};

TEST_F(ReloadSessionTest, FinishesACompleteUpdate) {
  for (int update = 0; update < 2; ++update) {
    StartAndBegin();
    EXPECT_EQ(state(), SessionState::kActive);
    DeliverAll();
    ASSERT_THAT(Finish(), IsOk());
    ExpectNewBytes();
    EXPECT_THAT(receipt_.names(), ElementsAre("b", "x", "a"));
    EXPECT_EQ(receipt_.nbytes, 36);
    ASSERT_EQ(receipt_.coverage.size(), 2U);
    EXPECT_EQ(receipt_.coverage[0].name, "w");
    EXPECT_EQ(receipt_.coverage[0].nbytes, 24);
    EXPECT_EQ(receipt_.coverage[1].nbytes, 12);
    EXPECT_GE(receipt_.seconds, 0);
    EXPECT_EQ(state(), SessionState::kIdle);
    log_.target(0).fill_(3);
  }
}

TEST_F(ReloadSessionTest, EveryCallOutsideItsStateIsRefused) {
  EXPECT_THAT(Begin(), StatusIs(kPrecondition, HasSubstr("needs an active reload")));
  EXPECT_THAT(session_.Deliver("x", x_), StatusIs(kPrecondition, HasSubstr("active reload")));
  EXPECT_THAT(session_.ReportDelivered("x"), StatusIs(kPrecondition, HasSubstr("active reload")));
  EXPECT_THAT(Finish(), StatusIs(kPrecondition, HasSubstr("nothing to finish")));
  EXPECT_THAT(session_.Abort(), StatusIs(kPrecondition, HasSubstr("nothing to abort")));
  ASSERT_THAT(session_.Start({}), IsOk());
  EXPECT_THAT(session_.Start({}), StatusIs(kPrecondition, HasSubstr("called before")));
}

TEST_F(ReloadSessionTest, RefusesTargetsThatMovedBeforeAnyWrite) {
  ASSERT_THAT(session_.Start({}), IsOk());
  std::vector<LiveTarget> moved = log_.live();
  moved[1].tensor = moved[1].tensor.clone();
  EXPECT_THAT(session_.Begin(plan_, moved), StatusIs(kPrecondition, HasSubstr("`v` has moved")));
  EXPECT_EQ(state(), SessionState::kActive);
  EXPECT_THAT(session_.Abort(), IsOk());
  EXPECT_EQ(state(), SessionState::kIdle);
  ExpectOldBytes();
}

TEST_F(ReloadSessionTest, RefusesTargetsThatMovedDuringTheUpdate) {
  StartAndBegin();
  DeliverAll();
  log_.live()[1].tensor = log_.target(1).clone();
  EXPECT_THAT(Finish(), StatusIs(kPrecondition, HasSubstr("`v` has moved")));
  EXPECT_EQ(state(), SessionState::kFailed);
}

TEST_F(ReloadSessionTest, RefusesASecondPlan) {
  StartAndBegin();
  EXPECT_THAT(Begin(), IsOk());
  EXPECT_TRUE(session_.HasPlan(plan_.get()));
  EXPECT_TRUE(session_.HasPlan(nullptr));
  EXPECT_THAT(session_.Begin(log_.Bind().value(), log_.live()),
              StatusIs(kPrecondition, HasSubstr("another plan")));
}

TEST_F(ReloadSessionTest, ABadArrivalWritesNothingOfItsNameAndFails) {
  StartAndBegin();
  ASSERT_THAT(session_.Deliver("b", b_), IsOk());
  EXPECT_THAT(session_.Deliver("x", at::zeros({3})),
              StatusIs(kInvalid, AllOf(HasSubstr("`x` arrived with shape [3], expected [1, 3]"),
                                       HasSubstr("1 of 4 names had landed: `b`"))));
  ExpectOldBytes();  // `b` alone computes nothing
  const SessionReport report = session_.report();
  EXPECT_EQ(report.state, SessionState::kFailed);
  EXPECT_THAT(report.landed, ElementsAre("b"));
  EXPECT_THAT(report.undefined, IsEmpty());
  EXPECT_THAT(report.error, HasSubstr("no byte of the model was written"));
  EXPECT_THAT(report.error, HasSubstr("`x` arrived"));
}

TEST_F(ReloadSessionTest, AFailureTellsWhichBytesAreUndefined) {
  StartAndBegin();
  ASSERT_THAT(session_.Deliver("x", x_), IsOk());
  ASSERT_THAT(session_.Deliver("b", b_), IsOk());
  EXPECT_THAT(session_.Deliver("b", b_), StatusIs(kInvalid, HasSubstr("undefined until")));
  const std::vector<TargetBytes> undefined = session_.report().undefined;
  ASSERT_EQ(undefined.size(), 1U);
  EXPECT_EQ(undefined[0].name, "w");
  EXPECT_EQ(undefined[0].nbytes, 12);
  EXPECT_EQ(undefined[0].total_nbytes, 24);
  EXPECT_THAT(undefined[0].ranges, ElementsAre(ByteRange{0, 12}));
}

TEST_F(ReloadSessionTest, AbortBeforeTheFirstWriteIsHarmless) {
  StartAndBegin();
  ASSERT_THAT(session_.Deliver("b", b_), IsOk());  // waits for `a`
  ASSERT_THAT(session_.Deliver("unused", at::zeros({5})), IsOk());
  ASSERT_THAT(session_.Abort(), IsOk());
  EXPECT_EQ(state(), SessionState::kIdle);
  ExpectOldBytes();
}

TEST_F(ReloadSessionTest, NamesThatAreUndeclaredOrComeTwiceAreBadArrivals) {
  StartAndBegin();
  EXPECT_THAT(session_.Deliver("y", x_),
              StatusIs(kInvalid, AllOf(HasSubstr("`y` arrived but was not declared"),
                                       HasSubstr("nothing had landed"))));
  StartAndBegin();
  ASSERT_THAT(session_.Deliver("x", x_), IsOk());
  EXPECT_THAT(session_.Deliver("x", x_), StatusIs(kInvalid, HasSubstr("`x` arrived twice")));
}

TEST_F(ReloadSessionTest, AFailedSessionTakesOnlyACompleteUpdate) {
  StartAndBegin();
  ASSERT_THAT(session_.Deliver("x", x_), IsOk());
  ASSERT_THAT(session_.Deliver("y", x_), StatusIs(kInvalid, HasSubstr("undefined until")));
  EXPECT_THAT(Begin(),
              StatusIs(kPrecondition, AllOf(HasSubstr("cannot go on"), HasSubstr("`y` arrived"))));
  EXPECT_THAT(session_.Deliver("a", a_), StatusIs(kPrecondition, HasSubstr("cannot go on")));
  EXPECT_THAT(Finish(), StatusIs(kPrecondition, HasSubstr("cannot finish a failed")));
  EXPECT_THAT(session_.Abort(), StatusIs(kPrecondition, HasSubstr("cannot undo a failed")));
  // Aborted before its first write, a new update leaves the model as failed as it was.
  StartAndBegin();
  ASSERT_THAT(session_.Abort(), IsOk());
  EXPECT_EQ(state(), SessionState::kFailed);
  StartAndBegin();
  ASSERT_THAT(session_.Deliver("x", x_), IsOk());
  partial_ = {"x"};
  EXPECT_THAT(Finish(), StatusIs(kPrecondition, HasSubstr("`partial` after a failed update")));
  partial_.reset();
  ASSERT_THAT(session_.Deliver("a", a_), IsOk());
  ASSERT_THAT(session_.Deliver("b", b_), IsOk());
  ASSERT_THAT(Finish(), IsOk());
  ExpectNewBytes();
  EXPECT_THAT(session_.report().undefined, IsEmpty());
}

TEST_F(ReloadSessionTest, AFailedSessionRefusesAPlanThatCoversLess) {
  StartAndBegin();
  ASSERT_THAT(session_.Deliver("x", x_), IsOk());
  ASSERT_THAT(session_.Abort(), IsOk());
  EXPECT_EQ(state(), SessionState::kFailed);
  EXPECT_THAT(session_.report().error, HasSubstr("aborted after its first write"));
  LiveLog less;
  less.Target("w", {2, 3});
  const View v_view = less.Target("v", {3});
  less.Copy(v_view, less.Source("v", {3}));
  const auto plan = less.Bind().value();
  ASSERT_THAT(session_.Start({}), IsOk());
  EXPECT_THAT(session_.Begin(plan, less.live()),
              StatusIs(kPrecondition, HasSubstr("left bytes of `w` undefined")));
}

TEST_F(ReloadSessionTest, FinishListsWhatDidNotArriveAndGoesOn) {
  StartAndBegin();
  ASSERT_THAT(session_.Deliver("x", x_), IsOk());
  EXPECT_THAT(Finish(),
              StatusIs(kPrecondition, HasSubstr("2 planned name(s) did not arrive: `a`, `b`")));
  EXPECT_EQ(state(), SessionState::kActive);
  ASSERT_THAT(session_.Deliver("a", a_), IsOk());
  ASSERT_THAT(session_.Deliver("b", b_), IsOk());
  ASSERT_THAT(Finish(), IsOk());
  ExpectNewBytes();
}

TEST_F(ReloadSessionTest, APartialUpdateTakesTheNamesOfItsList) {
  StartAndBegin();
  ASSERT_THAT(session_.Deliver("x", x_), IsOk());
  partial_ = {"x", "nobody"};
  EXPECT_THAT(Finish(), StatusIs(kInvalid, HasSubstr("`nobody`, which was not declared")));
  partial_ = {"unused"};
  EXPECT_THAT(Finish(), StatusIs(kInvalid, HasSubstr("`x` arrived but `partial` does not")));
  partial_ = {"x", "a"};
  EXPECT_THAT(Finish(), StatusIs(kInvalid, HasSubstr("`a` without `b`")));
  partial_ = {"x", "a", "b"};
  EXPECT_THAT(Finish(), StatusIs(kPrecondition, HasSubstr("did not arrive: `a`, `b`")));
  partial_ = {"x"};
  ASSERT_THAT(Finish(), IsOk());
  EXPECT_EQ(receipt_.coverage[1].nbytes, 0);
  EXPECT_TRUE(at::equal(log_.target(0), at::cat({x_, at::zeros({1, 3})})));
  EXPECT_TRUE(at::equal(log_.target(1), at::full({3}, 77.f)));
}

TEST_F(ReloadSessionTest, ARequiredTargetMustBeCovered) {
  LiveLog bare;
  bare.Target("w", {2});
  const View v_view = bare.Target("v", {2});
  bare.Copy(v_view, bare.Source("x", {2}));
  const auto plan = bare.Bind().value();
  ASSERT_THAT(session_.Start({.required = {"*"}}), IsOk());
  EXPECT_THAT(session_.Begin(plan, bare.live()), StatusIs(kPrecondition, HasSubstr("`w` (8 of 8")));
  EXPECT_THAT(Finish(), StatusIs(kPrecondition, HasSubstr("`*` is required")));
  EXPECT_THAT(session_.Abort(), IsOk());
}

TEST_F(ReloadSessionTest, NothingToDoIsDone) {
  ASSERT_THAT(session_.Start({}), IsOk());
  EXPECT_THAT(Finish(), IsOk());
  EXPECT_THAT(receipt_.names(), IsEmpty());
}

TEST_F(ReloadSessionTest, AnEngineReportsWhatItWroteThroughDestinations) {
  plan_->handed_out.Add(0);
  StartAndBegin();
  ASSERT_THAT(session_.ReportDelivered("x"), IsOk());
  EXPECT_THAT(Finish(), StatusIs(kPrecondition, HasSubstr("did not arrive: `a`, `b`")));
  ASSERT_THAT(session_.Deliver("a", a_), IsOk());
  ASSERT_THAT(session_.Deliver("b", b_), IsOk());
  ASSERT_THAT(Finish(), IsOk());
  // The constants are set, also around bytes that another one wrote.
  EXPECT_TRUE(at::equal(log_.target(0)[1], at::zeros({3})));
  StartAndBegin();
  EXPECT_THAT(session_.ReportDelivered("a"), StatusIs(kInvalid, HasSubstr("has no destination")));
  StartAndBegin();
  EXPECT_THAT(session_.ReportDelivered("y"), StatusIs(kInvalid, HasSubstr("was not declared")));
  StartAndBegin();
  ASSERT_THAT(session_.ReportDelivered("x"), IsOk());
  EXPECT_THAT(session_.ReportDelivered("x"), StatusIs(kInvalid, HasSubstr("delivered twice")));
}

TEST_F(ReloadSessionTest, AnEngineThatReportsNothingIsTrustedWhereItCouldHaveWritten) {
  plan_->handed_out.Add(0);
  StartAndBegin();
  EXPECT_THAT(Finish(), StatusIs(kPrecondition, HasSubstr("did not arrive: `a`, `b`")));
  ASSERT_THAT(session_.Deliver("a", a_), IsOk());
  ASSERT_THAT(session_.Deliver("b", b_), IsOk());
  EXPECT_THAT(Finish(), IsOk());
}

TEST_F(ReloadSessionTest, AnEngineThatReportsNothingMayHaveWrittenWhenItAborts) {
  plan_->handed_out.Add(0);
  StartAndBegin();
  ASSERT_THAT(session_.Abort(), IsOk());
  EXPECT_EQ(state(), SessionState::kFailed);
  ASSERT_EQ(session_.report().undefined.size(), 1U);
  EXPECT_EQ(session_.report().undefined[0].nbytes, 12);
}

TEST_F(ReloadSessionTest, WhileHooksRunOnlyTheEndIsAllowed) {
  StartAndBegin();
  DeliverAll();
  ASSERT_THAT(session_.PrepareFinish(partial_, log_.live()), IsOk());
  ASSERT_THAT(session_.Complete(), IsOk());
  EXPECT_THAT(session_.Deliver("x", x_), StatusIs(kPrecondition, HasSubstr("runs the hooks")));
  EXPECT_THAT(session_.Start({}), StatusIs(kPrecondition, HasSubstr("called before")));
  ASSERT_THAT(Finish(), IsOk());
  ExpectNewBytes();
}

TEST_F(ReloadSessionTest, AHookThatRaisesLeavesEveryTargetUndefined) {
  StartAndBegin();
  EXPECT_THAT(
      session_.HookFailed("the hook `restore` raised", log_.live()),
      StatusIs(kPrecondition, AllOf(HasSubstr("`restore` raised"), HasSubstr("undefined until"))));
  EXPECT_EQ(state(), SessionState::kFailed);
  EXPECT_TRUE(session_.MayHaveWritten());
  ASSERT_EQ(session_.report().undefined.size(), 2U);
  EXPECT_EQ(session_.report().undefined[1].nbytes, 24);
}

TEST_F(ReloadSessionTest, AfterAHookThatRaisedTheSamePlanIsEnough) {
  // A buffer that no plan writes: a hook may have, and no update can be asked to bring it.
  std::vector<LiveTarget> all = log_.live();
  all.push_back({"buffer", at::ones({5})});
  StartAndBegin();
  DeliverAll();
  ASSERT_THAT(session_.PrepareFinish(partial_, log_.live()), IsOk());
  ASSERT_THAT(session_.Complete(), IsOk());
  ASSERT_FALSE(session_.HookFailed("the hook `process` raised", all).ok());
  EXPECT_EQ(session_.report().undefined.size(), 3U);
  EXPECT_EQ(session_.report().undefined[0].name, "buffer");
  StartAndBegin();
  DeliverAll();
  ASSERT_THAT(Finish(), IsOk());
  EXPECT_THAT(session_.report().undefined, IsEmpty());
}

TEST_F(ReloadSessionTest, AHookThatRaisedBeforeAPlanWasChosen) {
  ASSERT_THAT(session_.Start({}), IsOk());
  ASSERT_FALSE(session_.HookFailed("the hook `restore` raised", log_.live(), plan_).ok());
  EXPECT_EQ(session_.report().undefined.size(), 2U);
  ASSERT_THAT(session_.Start({}), IsOk());
  EXPECT_THAT(Finish(), StatusIs(kPrecondition, HasSubstr("has to be made good")));
}

// ---------------------------------------------------------------- plans with fallbacks
class FallbackSessionTest : public ReloadSessionTest {
 protected:
  FallbackSessionTest() {
    log_.log().input().fallbacks.emplace_back(0, "it reads a value");
    plan_ = log_.Bind().value();
  }
  // Row 0 of `w`: what the loader does with `x`.
  std::vector<TargetRegion> WrittenByLoader() const {
    return {{0, StridedLayout::Unchecked(0, {12}, {1}, 1)}};
  }
  void CallLoader() {
    const auto call = session_.TakeFallbackCall();
    ASSERT_THAT(call.status(), IsOk());
    for (const auto& [name, tensor] : *call) log_.target(0).narrow(0, 0, 1).copy_(tensor);
  }
};

TEST_F(FallbackSessionTest, CollectsTheFallbackNamesForOneCall) {
  StartAndBegin();
  ASSERT_THAT(session_.Deliver("b", b_), IsOk());
  EXPECT_FALSE(session_.FallbackCallReady());
  EXPECT_FALSE(session_.NeedsFallbackCall());
  ASSERT_THAT(session_.Deliver("x", x_), IsOk());
  EXPECT_THAT(session_.report().landed, ElementsAre("b"));
  EXPECT_TRUE(session_.FallbackCallReady());
  EXPECT_TRUE(session_.NeedsFallbackCall());
  std::vector<std::string> names;
  const auto call = session_.TakeFallbackCall();
  ASSERT_THAT(call, IsOk());
  for (const auto& [name, tensor] : *call) names.push_back(name);
  EXPECT_THAT(names, ElementsAre("x"));
  EXPECT_FALSE(session_.NeedsFallbackCall());
  ASSERT_THAT(session_.FallbackCallDone("", WrittenByLoader(), log_.live()), IsOk());
  EXPECT_THAT(session_.report().landed, ElementsAre("b", "x"));
  ASSERT_THAT(session_.Deliver("a", a_), IsOk());
  ASSERT_THAT(Finish(), IsOk());
  EXPECT_EQ(receipt_.names().size(), 3U);
  EXPECT_EQ(receipt_.coverage[0].nbytes, 24);
}

TEST_F(FallbackSessionTest, TakesTheFallbackNamesOfABucketFirst) {
  StartAndBegin();
  const std::vector<std::string> names = {"a", "x", "b"};
  const std::vector<at::Tensor> tensors = {a_, x_, b_};
  ASSERT_THAT(session_.DeliverFallbacks(names, tensors), IsOk());
  EXPECT_TRUE(session_.FallbackCallReady());
  EXPECT_THAT(session_.report().landed, IsEmpty());
  CallLoader();
  ASSERT_THAT(session_.FallbackCallDone("", WrittenByLoader(), log_.live()), IsOk());
  ASSERT_THAT(session_.DeliverPlanned(names, tensors), IsOk());
  ASSERT_THAT(Finish(), IsOk());
  ExpectNewBytes();
}

TEST_F(FallbackSessionTest, ARefusedArrivalOrAnAbortWritesNothing) {
  StartAndBegin();
  ASSERT_THAT(session_.Deliver("x", x_), IsOk());
  ASSERT_THAT(session_.Abort(), IsOk());
  EXPECT_EQ(state(), SessionState::kIdle);
  StartAndBegin();
  ASSERT_THAT(session_.Deliver("x", x_), IsOk());
  EXPECT_THAT(session_.Deliver("x", x_),
              StatusIs(kInvalid, HasSubstr("1 of 4 names had arrived for load_weights: `x`")));
  EXPECT_THAT(session_.report().undefined, IsEmpty());
  ExpectOldBytes();
}

TEST_F(FallbackSessionTest, TheLoadersErrorFailsTheSession) {
  StartAndBegin();
  DeliverAll();
  ASSERT_THAT(session_.TakeFallbackCall().status(), IsOk());
  EXPECT_THAT(session_.FallbackCallDone("KeyError: 'z'", WrittenByLoader(), log_.live()),
              StatusIs(kPrecondition,
                       AllOf(HasSubstr("raised KeyError: 'z'"), HasSubstr("undefined until"))));
  const std::vector<TargetBytes> undefined = session_.report().undefined;
  ASSERT_EQ(undefined.size(), 2U);
  EXPECT_EQ(undefined[0].name, "v");
  EXPECT_EQ(undefined[0].nbytes, 12);
  EXPECT_EQ(undefined[1].nbytes, 12);
  // The same plan makes it good, where its loader writes those bytes again.
  for (const bool again : {false, true}) {
    StartAndBegin();
    DeliverAll();
    CallLoader();
    const auto written = again ? WrittenByLoader() : std::vector<TargetRegion>();
    const absl::Status status = session_.FallbackCallDone("", written, log_.live());
    if (again) {
      ASSERT_THAT(status, IsOk());
    } else {
      EXPECT_THAT(status, StatusIs(kPrecondition, HasSubstr("left bytes of `w` undefined")));
    }
  }
  ASSERT_THAT(Finish(), IsOk());
  ExpectNewBytes();
}

TEST_F(FallbackSessionTest, ACallThatNeverCameBackLeavesEverythingUndefined) {
  StartAndBegin();
  DeliverAll();
  CallLoader();
  ASSERT_THAT(session_.Abort(), IsOk());
  EXPECT_EQ(session_.report().undefined.size(), 2U);
  EXPECT_EQ(session_.report().undefined[1].nbytes, 24);
}

TEST_F(FallbackSessionTest, ARequiredTargetMustBeCoveredByTheCall) {
  for (const bool covers : {false, true}) {
    ASSERT_THAT(session_.Start({.required = {"w"}}), IsOk());
    ASSERT_THAT(Begin(), IsOk());
    DeliverAll();
    CallLoader();
    const auto written = covers ? WrittenByLoader() : std::vector<TargetRegion>();
    const absl::Status status = session_.FallbackCallDone("", written, log_.live());
    if (covers) {
      ASSERT_THAT(status, IsOk());
    } else {
      EXPECT_THAT(status, StatusIs(kPrecondition, HasSubstr("`w` (12 of 24 bytes)")));
    }
  }
  EXPECT_THAT(Finish(), IsOk());
}

TEST_F(FallbackSessionTest, ALoaderThatMovesATargetFailsTheSession) {
  StartAndBegin();
  DeliverAll();
  ASSERT_THAT(session_.TakeFallbackCall().status(), IsOk());
  log_.live()[0].tensor = log_.target(0).clone();
  EXPECT_THAT(session_.FallbackCallDone("", {}, log_.live()),
              StatusIs(kPrecondition, HasSubstr("`w` has moved")));
}

TEST_F(FallbackSessionTest, DoesNotFinishBeforeTheCall) {
  StartAndBegin();
  DeliverAll();
  EXPECT_THAT(Finish(), StatusIs(kPrecondition, HasSubstr("has not been made")));
}

}  // namespace
}  // namespace loadplan
