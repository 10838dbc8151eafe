#include "lifecycle/session_state.h"

#include <ostream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using ::loadplan::testing::IsOk;
using ::loadplan::testing::StatusIs;
using ::testing::HasSubstr;

struct TransitionCase {
  std::string name;
  SessionState state;
  SessionEvent event;
  std::string refusal;  // empty: allowed
};
std::ostream& operator<<(std::ostream& stream, const TransitionCase& c) { return stream << c.name; }

class TransitionTest : public ::testing::TestWithParam<TransitionCase> {};

TEST_P(TransitionTest, IsAllowedOrRefusedInItsOwnWords) {
  const TransitionCase& c = GetParam();
  const absl::Status status = CheckTransition(c.state, c.event);
  if (c.refusal.empty()) {
    EXPECT_THAT(status, IsOk());
  } else {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(c.refusal)));
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(ToString(c.event))));
  }
}

constexpr auto kIdle = SessionState::kIdle;
constexpr auto kActive = SessionState::kActive;
constexpr auto kFailed = SessionState::kFailed;

INSTANTIATE_TEST_SUITE_P(
    Cases, TransitionTest,
    ::testing::Values(
        TransitionCase{"IdleStart", kIdle, SessionEvent::kStart, ""},
        TransitionCase{"IdleLoad", kIdle, SessionEvent::kLoad, "needs an active reload"},
        TransitionCase{"IdlePlan", kIdle, SessionEvent::kPlan, "needs an active reload of this"},
        TransitionCase{"IdleReport", kIdle, SessionEvent::kReport, "`delivered` needs an active"},
        TransitionCase{"IdleFinish", kIdle, SessionEvent::kFinish, "nothing to finish"},
        TransitionCase{"IdleAbort", kIdle, SessionEvent::kAbort, "nothing to abort"},
        TransitionCase{"ActiveStart", kActive, SessionEvent::kStart, "called before"},
        TransitionCase{"ActivePlan", kActive, SessionEvent::kPlan, ""},
        TransitionCase{"ActiveReport", kActive, SessionEvent::kReport, ""},
        TransitionCase{"ActiveLoad", kActive, SessionEvent::kLoad, ""},
        TransitionCase{"ActiveFinish", kActive, SessionEvent::kFinish, ""},
        TransitionCase{"ActiveAbort", kActive, SessionEvent::kAbort, ""},
        TransitionCase{"FailedStart", kFailed, SessionEvent::kStart, ""},
        TransitionCase{"FailedLoad", kFailed, SessionEvent::kLoad, "cannot go on after a failure"},
        TransitionCase{"FailedPlan", kFailed, SessionEvent::kPlan, "the last one failed"},
        TransitionCase{"FailedReport", kFailed, SessionEvent::kReport, "cannot go on after"},
        TransitionCase{"FailedFinish", kFailed, SessionEvent::kFinish, "cannot finish a failed"},
        TransitionCase{"FailedAbort", kFailed, SessionEvent::kAbort, "cannot undo a failed"}),
    [](const auto& test) { return test.param.name; });

TEST(SessionStateTest, WhileHooksRunOnlyTheEndIsAllowed) {
  for (const SessionEvent event :
       {SessionEvent::kStart, SessionEvent::kPlan, SessionEvent::kLoad, SessionEvent::kReport}) {
    EXPECT_THAT(CheckWhileFinishing(event), StatusIs(absl::StatusCode::kFailedPrecondition,
                                                     HasSubstr(std::string(ToString(event)))));
  }
  EXPECT_THAT(CheckWhileFinishing(SessionEvent::kFinish), IsOk());
  EXPECT_THAT(CheckWhileFinishing(SessionEvent::kAbort), IsOk());
}

TEST(SessionStateTest, StatesPrintAsTheyAreReported) {
  EXPECT_EQ(ToString(kIdle), "idle");
  EXPECT_EQ(ToString(kActive), "active");
  EXPECT_EQ(ToString(kFailed), "failed");
}

}  // namespace
}  // namespace loadplan
