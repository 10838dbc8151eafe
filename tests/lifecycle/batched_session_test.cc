// Sessions whose copies are batched: nothing waits any longer than the call that landed it.
#include <ATen/ATen.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lifecycle/reload_session.h"
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

constexpr char kVariable[] = "LOADPLAN_CUDA_BATCH";

// `w` <- columns 1..3 of `x`; `v` <- `y`.
class BatchedSessionTest : public ::testing::Test {
 protected:
  BatchedSessionTest() {
    if (const char* value = std::getenv(kVariable)) before_ = value;
    setenv(kVariable, "reference", /*overwrite=*/1);
    const View w = log_.Target("w", {2, 2});
    const View v = log_.Target("v", {3});
    log_.Copy(w, log_.Source("x", {2, 4}).Slice(1, 1, 3));
    log_.Copy(v, log_.Source("y", {3}));
    plan_ = log_.Bind().value();
  }
  ~BatchedSessionTest() override { setenv(kVariable, before_.c_str(), /*overwrite=*/1); }

  void Begin(bool atomic = false) {
    ASSERT_THAT(session_.Start({.atomic = atomic}), IsOk());
    ASSERT_THAT(session_.Begin(plan_, log_.live()), IsOk());
  }
  bool IsOld(std::size_t target) const {
    return at::equal(log_.target(target), at::full_like(log_.target(target), 77));
  }
  bool HasX() const { return at::equal(log_.target(0), x_.slice(1, 1, 3)); }
  bool HasY() const { return at::equal(log_.target(1), y_); }
  // All of `x`, as it lies in `bytes`.
  absl::Status DeliverX(const at::Tensor& bytes) {
    absl::Status status = session_.BeginParts("x", {2, 4}, at::kFloat);
    if (!status.ok()) return status;
    return session_.DeliverPart("x", StridedMap::Unchecked({}, {0, {}, 32}, {0, {}, 32}, false),
                                ByteSide::OfStorage(bytes));
  }

  std::string before_;
  LiveLog log_;
  std::shared_ptr<const BoundPlan> plan_;
  ReloadSession session_;
  const at::Tensor x_ = at::randn({2, 4});
  const at::Tensor y_ = at::randn({3});
};

TEST_F(BatchedSessionTest, LandsWhatAnyCallHands) {
  Begin();
  const at::Tensor sent = x_.clone();
  ASSERT_THAT(session_.Deliver("x", sent), IsOk());
  sent.fill_(-1);
  EXPECT_TRUE(HasX());
  const std::vector<std::string> names = {"y"};
  const std::vector<at::Tensor> tensors = {y_.clone()};
  ASSERT_THAT(session_.DeliverPlanned(names, tensors), IsOk());
  tensors[0].fill_(-1);
  EXPECT_TRUE(HasY());
  ASSERT_THAT(session_.PrepareFinish(std::nullopt, log_.live()), IsOk());
  EXPECT_EQ(session_.Finish().value().nbytes, 28);
}

TEST_F(BatchedSessionTest, LandsEachPartUnlessItIsToldToWait) {
  Begin();
  at::Tensor bytes = x_.clone();
  ASSERT_THAT(DeliverX(bytes), IsOk());
  EXPECT_TRUE(HasX());
  ASSERT_THAT(session_.CompleteParts("x"), IsOk());
}

TEST_F(BatchedSessionTest, WaitsForTheEndOfABatch) {
  Begin();
  session_.BeginBatch();
  ASSERT_THAT(DeliverX(x_.clone()), IsOk());
  ASSERT_THAT(session_.CompleteParts("x"), IsOk());
  ASSERT_THAT(session_.Deliver("y", y_), IsOk());
  EXPECT_TRUE(IsOld(0) && IsOld(1));
  ASSERT_THAT(session_.EndBatch(), IsOk());
  EXPECT_TRUE(HasX() && HasY());
}

TEST_F(BatchedSessionTest, NamesOfAnotherThreadDoNotWait) {
  Begin();
  session_.BeginBatch();
  std::thread([this] {
    const at::Tensor sent = y_.clone();
    EXPECT_THAT(session_.Deliver("y", sent), IsOk());
    sent.fill_(-1);
  }).join();
  EXPECT_TRUE(HasY());
  EXPECT_THAT(session_.EndBatch(), IsOk());
}

TEST_F(BatchedSessionTest, SaysOfNoNameThatItLandedBeforeItHas) {
  Begin();
  const std::vector<std::string> names = {"x", "y"};
  const std::vector<at::Tensor> tensors = {x_, at::ones({4})};
  EXPECT_THAT(session_.DeliverPlanned(names, tensors),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("had landed: `x`")));
  EXPECT_TRUE(HasX());
  EXPECT_TRUE(IsOld(1));
  EXPECT_THAT(session_.report().landed, ElementsAre("x"));
}

TEST_F(BatchedSessionTest, PutsOldBytesBackBehindWhatWaited) {
  Begin(/*atomic=*/true);
  session_.BeginBatch();
  ASSERT_THAT(session_.Deliver("x", x_), IsOk());
  EXPECT_THAT(session_.Deliver("x", x_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("the old bytes are back")));
  EXPECT_THAT(session_.EndBatch(), IsOk());
  EXPECT_TRUE(IsOld(0) && IsOld(1));

  Begin(/*atomic=*/true);
  session_.BeginBatch();
  ASSERT_THAT(session_.Deliver("x", x_), IsOk());
  ASSERT_THAT(session_.Abort(), IsOk());
  EXPECT_THAT(session_.EndBatch(), IsOk());
  EXPECT_TRUE(IsOld(0) && IsOld(1));
}

TEST_F(BatchedSessionTest, RefusesAnUnknownWishBeforeTheFirstWrite) {
  setenv(kVariable, "cuda", 1);
  ASSERT_THAT(session_.Start({}), IsOk());
  EXPECT_THAT(session_.Begin(plan_, log_.live()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("LOADPLAN_CUDA_BATCH is `cuda`"), HasSubstr("expected"))));
  EXPECT_EQ(session_.report().state, SessionState::kActive);
  setenv(kVariable, "0", 1);
  EXPECT_THAT(session_.Begin(plan_, log_.live()), IsOk());
}

}  // namespace
}  // namespace loadplan
