// ReloadSession where memory is short, an engine says nothing, or calls come at the wrong time.
#include <ATen/ATen.h>

#include <memory>
#include <string>

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

constexpr auto kInternal = absl::StatusCode::kInternal;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

// `w` <- `x`; `v` <- `a * b`; a row of padding.
class FailingSessionTest : public ::testing::Test {
 protected:
  FailingSessionTest() {
    const View w = log_.Target("w", {2, 3});
    const View v = log_.Target("v", {3});
    log_.Copy(w.Slice(0, 0, 1), log_.Source("x", {1, 3}));
    const View a = log_.Source("a", {3});
    log_.Copy(v, log_.Multiply(a, log_.Source("b", {3})));
    log_.Copy(w.Slice(0, 1, 2), log_.Constant(at::zeros({1, 3})));
    plan_ = log_.Bind().value();
  }

  absl::Status Begin() { return session_.Begin(plan_, log_.live()); }
  absl::Status Finish() {
    if (absl::Status status = session_.PrepareFinish({}, log_.live()); !status.ok()) {
      return status;
    }
    return session_.Finish().status();
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
  SessionState state() const { return session_.report().state; }

  LiveLog log_;
  std::shared_ptr<const BoundPlan> plan_;
  ReloadSession session_;
  const at::Tensor x_ = at::randn({1, 3});
  const at::Tensor a_ = at::randn({3});
  const at::Tensor b_ = at::randn({3});
};

TEST_F(FailingSessionTest, OnlyNamesWhoseDestinationsWereHandedOutAreTrusted) {
  LiveLog two;
  const View w_view = two.Target("w", {2});
  const View v_view = two.Target("v", {2});
  two.Copy(w_view, two.Source("x", {2}));
  two.Copy(v_view, two.Source("y", {2}));
  const auto plan = two.Bind().value();
  plan->handed_out.Add(0);
  ASSERT_THAT(session_.Start({}), IsOk());
  ASSERT_THAT(session_.Begin(plan, two.live()), IsOk());
  EXPECT_THAT(session_.PrepareFinish({}, two.live()),
              StatusIs(kPrecondition, HasSubstr("1 planned name(s) did not arrive: `y`")));
  plan->handed_out.Add(1);
  ASSERT_THAT(session_.PrepareFinish({}, two.live()), IsOk());
  ASSERT_THAT(session_.Finish().status(), IsOk());
}

TEST_F(FailingSessionTest, AnEngineThatReportsHasToReportInEveryUpdate) {
  plan_->handed_out.Add(0);
  for (const bool reports : {true, false}) {
    StartAndBegin();
    if (reports) {
      ASSERT_THAT(session_.ReportDelivered("x"), IsOk());
    }
    ASSERT_THAT(session_.Deliver("a", a_), IsOk());
    ASSERT_THAT(session_.Deliver("b", b_), IsOk());
    if (reports) {
      ASSERT_THAT(Finish(), IsOk());
    } else {
      EXPECT_THAT(Finish(), StatusIs(kPrecondition, HasSubstr("did not arrive: `x`")));
    }
  }
  // Half of a name may have been written before it would have been reported.
  ASSERT_THAT(session_.Abort(), IsOk());
  ASSERT_EQ(session_.report().undefined.size(), 2U);
  EXPECT_EQ(session_.report().undefined[1].name, "w");
  EXPECT_EQ(session_.report().undefined[1].nbytes, 12);
}

TEST_F(FailingSessionTest, WithoutMemoryTheUpdateFails) {
  StartAndBegin();
  {
    const NoMemory no_memory;
    EXPECT_THAT(session_.Deliver("a", a_),
                StatusIs(kInternal, AllOf(HasSubstr("no memory for"), HasSubstr("`a`"),
                                          HasSubstr("no byte of the model was written"))));
  }
  EXPECT_EQ(state(), SessionState::kFailed);
  EXPECT_THAT(session_.Deliver("a", a_), StatusIs(kPrecondition, HasSubstr("no memory for")));
  StartAndBegin();
  DeliverAll();
  ASSERT_THAT(Finish(), IsOk());
  ExpectNewBytes();
}

TEST_F(FailingSessionTest, DoesNotGoOnWhileTheCallRuns) {
  log_.log().input().fallbacks.emplace_back(0, "it reads a value");
  plan_ = log_.Bind().value();
  StartAndBegin();
  ASSERT_THAT(session_.Deliver("x", x_), IsOk());
  ASSERT_THAT(session_.Deliver("a", a_), IsOk());
  ASSERT_THAT(session_.TakeFallbackCall().status(), IsOk());
  log_.target(0).narrow(0, 0, 1).copy_(x_);
  for (const absl::Status& status :
       {Finish(), session_.Deliver("b", b_), session_.ReportDelivered("b")}) {
    EXPECT_THAT(status, StatusIs(kPrecondition, HasSubstr("while `load_weights` runs")));
  }
  ASSERT_THAT(
      session_.FallbackCallDone("", {{0, StridedLayout::Unchecked(0, {12}, {1}, 1)}}, log_.live()),
      IsOk());
  ASSERT_THAT(session_.Deliver("b", b_), IsOk());
  ASSERT_THAT(Finish(), IsOk());
  ExpectNewBytes();
}

}  // namespace
}  // namespace loadplan
