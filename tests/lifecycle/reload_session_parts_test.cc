#include <ATen/ATen.h>

#include <string>
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

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

StridedMap RunMap(Index start, Index stop) {
  return StridedMap::Unchecked({}, {start, {}, stop - start}, {start, {}, stop - start}, false);
}

// `w` <- `x`; `v` <- `a * b`; `unused` goes nowhere; two names that overlap: fallbacks.
class ReloadSessionPartsTest : public ::testing::Test {
 protected:
  void SetUp() override { Plan(/*with_fallbacks=*/false); }
  void Plan(bool with_fallbacks) {
    log_.emplace();
    const View w = log_->Target("w", {4});
    const View v = log_->Target("v", {3});
    const View u = log_->Target("u", {4});
    log_->Copy(w, log_->Source("x", {4}));
    const View a = log_->Source("a", {3});
    log_->Copy(v, log_->Multiply(a, log_->Source("b", {3})));
    log_->Source("unused", {5});
    if (with_fallbacks) {
      log_->Copy(u, log_->Source("f", {4}));
      log_->Copy(u, log_->Source("g", {4}));
    }
    session_.emplace();
    plan_ = log_->Bind(OverlapPolicy::kFallback).value();
    ASSERT_THAT(session_->Start({}), IsOk());
    ASSERT_THAT(session_->Begin(plan_, log_->live()), IsOk());
  }
  absl::Status Begin(const std::string& name, Index extent, at::ScalarType dtype = at::kFloat) {
    return session_->BeginParts(name, {extent}, dtype);
  }
  absl::Status Part(const std::string& name, const at::Tensor& tensor, Index start, Index stop) {
    return session_->DeliverPart(name, RunMap(start, stop), ByteSide::OfElements(tensor));
  }
  absl::Status Finish() {
    absl::Status status = session_->PrepareFinish(std::nullopt, log_->live());
    return status.ok() ? session_->Finish().status() : status;
  }

  std::optional<LiveLog> log_;
  std::shared_ptr<const BoundPlan> plan_;
  std::optional<ReloadSession> session_;
  const at::Tensor x_ = at::randn({4});
  const at::Tensor a_ = at::randn({3});
  const at::Tensor b_ = at::randn({3});
};

TEST_F(ReloadSessionPartsTest, LandsNamesSideBySide) {
  ASSERT_THAT(Begin("x", 4), IsOk());
  ASSERT_THAT(Begin("a", 3), IsOk());
  ASSERT_THAT(Part("x", x_, 7, 16), IsOk());
  ASSERT_THAT(Part("a", a_, 0, 12), IsOk());
  ASSERT_THAT(session_->Deliver("b", b_), IsOk());
  EXPECT_TRUE(at::equal(log_->target(1), at::full({3}, 77.f)));  // `a` is not complete
  ASSERT_THAT(session_->CompleteParts("a"), IsOk());
  EXPECT_TRUE(at::equal(log_->target(1), a_ * b_));
  EXPECT_THAT(Finish(), StatusIs(kPrecondition, HasSubstr("`x` arrived in part")));
  ASSERT_THAT(Part("x", x_, 0, 7), IsOk());
  ASSERT_THAT(session_->CompleteParts("x"), IsOk());
  ASSERT_THAT(Begin("unused", 5), IsOk());
  ASSERT_THAT(session_->CompleteParts("unused"), IsOk());
  EXPECT_THAT(session_->report().landed, ElementsAre("b", "a", "x", "unused"));
  ASSERT_THAT(Finish(), IsOk());
  EXPECT_TRUE(at::equal(log_->target(0), x_));
}

TEST_F(ReloadSessionPartsTest, TakesBytesThatWereWrittenInPlace) {
  ASSERT_THAT(Begin("x", 4), IsOk());
  const auto place = session_->InPlace("x", {4, 16});
  ASSERT_THAT(place, IsOk());
  ASSERT_TRUE(place->has_value());
  ASSERT_THAT(CopyMapped(RunMap(0, 12), {}, **place, ByteSide::OfElements(x_.slice(0, 1))), IsOk());
  ASSERT_THAT(session_->DeliveredInPlace("x", {4, 16}), IsOk());
  ASSERT_THAT(Part("x", x_, 0, 4), IsOk());
  ASSERT_THAT(session_->CompleteParts("x"), IsOk());
  EXPECT_TRUE(at::equal(log_->target(0), x_));
}

TEST_F(ReloadSessionPartsTest, TakesAPartThatWasWrittenToItsPlaces) {
  ASSERT_THAT(Begin("x", 4), IsOk());
  const auto places = session_->PlacesOf("x", RunMap(0, 16));
  ASSERT_THAT(places, IsOk());
  EXPECT_EQ(session_->HasPlaces("x"), places->has_value());
  EXPECT_FALSE(session_->HasPlaces("no such name"));
  if (const char* const batch = std::getenv("LOADPLAN_CUDA_BATCH");
      batch != nullptr && *batch != 0) {
    EXPECT_FALSE(places->has_value());
    GTEST_SKIP() << "batches of a device give no places";
  }
  ASSERT_TRUE(places->has_value());
  EXPECT_TRUE(session_->MayHaveWritten());  // from now on
  EXPECT_THAT(session_->CompleteParts("x"), StatusIs(kPrecondition, HasSubstr("0 of the 16")));
  Plan(/*with_fallbacks=*/true);
  for (const std::string name : {"x", "g"}) {
    ASSERT_THAT(Begin(name, 4), IsOk());
    for (const StridedMap& part : {RunMap(0, 7), RunMap(7, 16)}) {
      const auto placed = session_->PlacesOf(name, part);
      ASSERT_THAT(placed, IsOk());
      (*placed)->Write(static_cast<const std::byte*>(x_.const_data_ptr()));
      ASSERT_THAT(session_->DeliveredPart(name, part, **placed), IsOk());
    }
    ASSERT_THAT(session_->CompleteParts(name), IsOk());
  }
  EXPECT_TRUE(at::equal(log_->target(0), x_));
  ASSERT_THAT(session_->Deliver("f", a_.new_zeros({4})), IsOk());
  EXPECT_TRUE(at::equal((*session_->TakeFallbackCall())[0].second, x_));
}

// What a batch has not written yet, and what comes after it reads: a fallback name, a part of one,
// a part that an operator reads.
TEST_F(ReloadSessionPartsTest, ReadsLiveTensorsInTheirTurn) {
  Plan(/*with_fallbacks=*/true);
  const at::Tensor live = log_->target(0);
  const std::vector<std::string> names = {"x", "f"};
  const std::vector<at::Tensor> tensors = {x_, live};
  ASSERT_THAT(session_->Deliver(names, tensors), IsOk());
  ASSERT_THAT(session_->Deliver("g", a_.new_zeros({4})), IsOk());
  EXPECT_TRUE(at::equal((*session_->TakeFallbackCall())[0].second, x_));

  for (const std::string name : {"g", "a"}) {
    Plan(/*with_fallbacks=*/true);
    const at::Tensor w = log_->target(0);
    const Index extent = name == "g" ? 4 : 3;
    session_->BeginBatch();
    ASSERT_THAT(Begin("x", 4), IsOk());
    ASSERT_THAT(Part("x", x_, 0, 16), IsOk());
    ASSERT_THAT(Begin(name, extent), IsOk());
    ASSERT_THAT(Part(name, w, 0, 4 * extent), IsOk());
    ASSERT_THAT(session_->CompleteParts(name), IsOk());
    ASSERT_THAT(session_->EndBatch(), IsOk());
    ASSERT_THAT(session_->Deliver("b", a_.new_ones({3})), IsOk());
    ASSERT_THAT(session_->Deliver("f", a_.new_zeros({4})), IsOk());
    if (name == "g") {
      EXPECT_TRUE(at::equal((*session_->TakeFallbackCall())[0].second, x_));
    } else {
      EXPECT_TRUE(at::equal(log_->target(1), x_.slice(0, 0, 3)));
    }
  }
}

TEST_F(ReloadSessionPartsTest, AnAtomicUpdateGivesNoPlaces) {
  Plan(/*with_fallbacks=*/true);
  ASSERT_THAT(session_->Abort(), IsOk());
  ASSERT_THAT(session_->Start({.atomic = true}), IsOk());
  ASSERT_THAT(session_->Begin(plan_, log_->live()), IsOk());
  EXPECT_FALSE(session_->HasPlaces("x"));
  EXPECT_TRUE(session_->HasPlaces("f"));  // not in a target yet
  ASSERT_THAT(Begin("x", 4), IsOk());
  const auto places = session_->PlacesOf("x", RunMap(0, 16));
  ASSERT_THAT(places, IsOk());
  EXPECT_FALSE(places->has_value());
}

TEST_F(ReloadSessionPartsTest, PutsFallbackNamesTogether) {
  Plan(/*with_fallbacks=*/true);
  const at::Tensor g = at::randn({4});
  ASSERT_THAT(Begin("f", 4), IsOk());
  ASSERT_THAT(Part("f", x_, 8, 16), IsOk());
  ASSERT_THAT(Part("f", x_, 0, 8), IsOk());
  ASSERT_THAT(session_->CompleteParts("f"), IsOk());
  EXPECT_FALSE(session_->FallbackCallReady());
  ASSERT_THAT(Begin("g", 4), IsOk());
  const auto place = session_->InPlace("g", {0, 16});
  ASSERT_THAT(place, IsOk());
  ASSERT_THAT(CopyMapped(RunMap(0, 16), {}, **place, ByteSide::OfElements(g)), IsOk());
  ASSERT_THAT(session_->DeliveredInPlace("g", {0, 16}), IsOk());
  ASSERT_THAT(session_->CompleteParts("g"), IsOk());
  EXPECT_TRUE(session_->FallbackCallReady());
  const auto call = *session_->TakeFallbackCall();
  ASSERT_EQ(call.size(), 2U);
  EXPECT_TRUE(at::equal(call[0].second, x_));
  EXPECT_TRUE(at::equal(call[1].second, g));
}

TEST_F(ReloadSessionPartsTest, AFallbackNameNeedsAllItsBytes) {
  Plan(/*with_fallbacks=*/true);
  ASSERT_THAT(Begin("f", 4), IsOk());
  ASSERT_THAT(Part("f", x_, 0, 15), IsOk());
  EXPECT_THAT(session_->CompleteParts("f"),
              StatusIs(kPrecondition, HasSubstr("`f` is not complete: 15 of its 16 bytes came")));
}

TEST_F(ReloadSessionPartsTest, BadArrivalsFailBeforeAWrite) {
  EXPECT_THAT(Begin("x", 5), StatusIs(kInvalid, AllOf(HasSubstr("`x` arrived with shape [5]"),
                                                      HasSubstr("nothing had landed"))));
  SetUp();
  EXPECT_THAT(Begin("x", 4, at::kHalf), StatusIs(kInvalid, HasSubstr("`x` arrived as float16")));
  SetUp();
  EXPECT_THAT(Begin("y", 4), StatusIs(kInvalid, HasSubstr("`y` arrived but was not declared")));
  EXPECT_TRUE(session_->report().undefined.empty());
  SetUp();
  EXPECT_THAT(session_->CheckArriving("x"), IsOk());
  EXPECT_THAT(session_->CheckArriving("y"), StatusIs(kInvalid, HasSubstr("was not declared")));
  ASSERT_THAT(Begin("x", 4), IsOk());
  EXPECT_THAT(session_->CheckArriving("x"), StatusIs(kInvalid, HasSubstr("arrived twice")));
}

TEST_F(ReloadSessionPartsTest, ANameArrivesOnceHoweverItComes) {
  ASSERT_THAT(Begin("x", 4), IsOk());
  EXPECT_THAT(Begin("x", 4), StatusIs(kInvalid, HasSubstr("`x` arrived twice")));
  SetUp();
  ASSERT_THAT(Begin("x", 4), IsOk());
  EXPECT_THAT(session_->Deliver("x", x_), StatusIs(kInvalid, HasSubstr("`x` arrived twice")));
  SetUp();
  ASSERT_THAT(Begin("x", 4), IsOk());
  EXPECT_THAT(session_->ReportDelivered("x"), StatusIs(kInvalid, HasSubstr("delivered twice")));
  SetUp();
  ASSERT_THAT(session_->Deliver("x", x_), IsOk());
  EXPECT_THAT(Begin("x", 4), StatusIs(kInvalid, HasSubstr("`x` arrived twice")));
}

TEST_F(ReloadSessionPartsTest, AnErrorOfAPartFailsTheSession) {
  ASSERT_THAT(Begin("x", 4), IsOk());
  ASSERT_THAT(Part("x", x_, 0, 8), IsOk());
  EXPECT_THAT(Part("x", x_, 4, 12),
              StatusIs(kInvalid, AllOf(HasSubstr("`x` in parts: "), HasSubstr("two parts"),
                                       HasSubstr("undefined until a complete"))));
  EXPECT_EQ(session_->report().state, SessionState::kFailed);
  SetUp();
  ASSERT_THAT(Begin("x", 4), IsOk());
  EXPECT_THAT(session_->CompleteParts("x"),
              StatusIs(kPrecondition, HasSubstr("`x` is not complete: 0 of the 16 bytes")));
  SetUp();
  EXPECT_THAT(session_->FailWith(absl::DataLossError("`f.safetensors` ended early")),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr("ended early"), HasSubstr("nothing had landed"))));
  EXPECT_EQ(session_->report().state, SessionState::kFailed);
  EXPECT_THAT(session_->FailWith(absl::DataLossError("again")),
              StatusIs(absl::StatusCode::kDataLoss, ::testing::StrEq("again")));
  SetUp();
  EXPECT_THAT(Part("x", x_, 0, 8),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("before BeginParts")));
}

}  // namespace
}  // namespace loadplan
