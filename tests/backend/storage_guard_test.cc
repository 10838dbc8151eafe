// Raw access to live memory during a pass, and passes in several threads.
#include <ATen/ATen.h>

#include <atomic>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "backend/storage_guard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/backend/traced_loader.h"
#include "tests/testing/status_matchers.h"

namespace loadplan::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(StorageGuard, PointerWritesRaiseUntilThePassEnds) {
  at::Tensor p = at::zeros({4});
  at::Tensor view = p.narrow(0, 2, 2);
  TracedLoader loader({{"w", {4}, at::kFloat}}, {{"p", p}});
  loader.Begin();
  EXPECT_THAT(ErrorOf([&] { p.mutable_data_ptr(); }),
              AllOf(HasSubstr("`p` is being traced"), HasSubstr("until the pass ends")));
  EXPECT_THAT(ErrorOf([&] { view.mutable_data_ptr<float>(); }), HasSubstr("`p` is being traced"));
  EXPECT_EQ(static_cast<const float*>(p.const_data_ptr())[0], 0);  // nothing was written yet
  p.copy_(loader["w"]);
  EXPECT_THAT(ErrorOf([&] { p.const_data_ptr(); }),
              AllOf(HasSubstr("`p` holds bytes of a checkpoint tensor that is only traced"),
                    HasSubstr("until the pass ends")));
  ASSERT_EQ(loader.End().kind, PassVerdict::kDone);
  EXPECT_NE(p.mutable_data_ptr(), nullptr);
  EXPECT_NE(view.mutable_data_ptr<float>(), nullptr);
}

TEST(StorageGuard, OpensWhenALoaderRaises) {
  at::Tensor p = at::zeros({4});
  TracedLoader loader({{"w", {4}, at::kFloat}}, {{"p", p}});
  loader.Begin();
  loader.tracer().SetCurrent(0);
  p.copy_(loader["w"]);
  const PassVerdict verdict = loader.End("KeyError: 'x'");
  EXPECT_EQ(verdict.kind, PassVerdict::kRefuse);
  EXPECT_EQ(verdict.message,
            "load_weights failed at checkpoint tensor `w` while it was traced: KeyError: 'x'; "
            "nothing was written");
  EXPECT_NE(p.mutable_data_ptr(), nullptr);
}

TEST(StorageGuard, WatchedOperatorsReadThroughIt) {
  at::Tensor p = at::arange(4, at::kFloat);
  TracedLoader loader({{"w", {4}, at::kFloat}}, {{"p", p}});
  loader.Begin();
  p.narrow(0, 0, 2).copy_(loader["w"].narrow(0, 0, 2));
  EXPECT_EQ(p.narrow(0, 2, 2).sum().item<float>(), 5);
  EXPECT_EQ(p.narrow(0, 2, 2).clone().sum().item<float>(), 5);
  EXPECT_THAT(ErrorOf([&] { p.const_data_ptr(); }), HasSubstr("only traced"));
}

TEST(StorageGuard, StaysOpenUntilTheLastLiftEnds) {
  const at::Tensor p = at::zeros({4});
  StorageGuards guards;
  ASSERT_THAT(guards.ForbidWrites(p.storage(), "p"), IsOk());
  {
    const StorageGuards::Lift outer(guards, {p.storage().unsafeGetStorageImpl()});
    { const StorageGuards::Lift inner(guards, {p.storage().unsafeGetStorageImpl()}); }
    EXPECT_EQ(ErrorOf([&] { p.mutable_data_ptr(); }), "");
    guards.ForbidReads(p.storage(), "`p` is only traced");
    EXPECT_EQ(ErrorOf([&] { p.const_data_ptr(); }), "") << "an operator is at work";
  }
  EXPECT_EQ(ErrorOf([&] { p.const_data_ptr(); }), "`p` is only traced");
}

TEST(StorageGuard, ACopyOnWriteTargetIsGuardedOverMemoryOfItsOwn) {
  const at::Tensor p = at::zeros({4});
  const at::Tensor lazy = at::_lazy_clone(p);
  {
    TracedLoader loader({{"w", {4}, at::kFloat}}, {{"p", lazy}});
    loader.Begin();
    EXPECT_THAT(ErrorOf([&] { lazy.mutable_data_ptr(); }), HasSubstr("`p` is being traced"));
    ASSERT_EQ(loader.End().kind, PassVerdict::kDone);
  }
  lazy.fill_(3);
  EXPECT_EQ(p.sum().item<float>(), 0);
}

TEST(StorageGuard, PassesOverOneStorageExcludeEachOther) {
  at::Tensor p = at::zeros({4});
  TracedLoader loader({{"w", {4}, at::kFloat}}, {{"p", p}});
  loader.Begin();
  std::thread([&] {
    auto targets =
        std::make_shared<const TargetSet>(*TargetSet::Create({{"row", p.narrow(0, 0, 2)}}));
    auto other = *Tracer::Create({{"w", {4}, at::kFloat}}, targets);
    EXPECT_THAT(other->BeginPass(),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         "`row` is being traced by another pass; wait until that pass ends"));
    EXPECT_EQ(TraceSession::Current(), nullptr);
  }).join();
  EXPECT_THAT(ErrorOf([&] { p.mutable_data_ptr(); }), HasSubstr("`p` is being traced"));
  ASSERT_EQ(loader.End().kind, PassVerdict::kDone);
  TracedLoader later({{"w", {4}, at::kFloat}}, {{"p", p}});
  later.Begin();
}

TEST(StorageGuard, OnePassPerThread) {
  at::Tensor p = at::zeros({4});
  at::Tensor q = at::zeros({4});
  TracedLoader loader({{"w", {4}, at::kFloat}}, {{"p", p}});
  TracedLoader other({{"w", {4}, at::kFloat}}, {{"q", q}});
  loader.Begin();
  EXPECT_THAT(other.tracer().BeginPass(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       "a trace pass is active in this thread already"));
  EXPECT_THAT(loader.tracer().BeginPass(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                                    "the tracer's pass has not ended yet"));
}

TEST(StorageGuard, PassesOverDisjointStoragesDoNotSeeEachOther) {
  constexpr int kRounds = 50;
  const auto trace = [](int salt) {
    for (int round = 0; round < kRounds; ++round) {
      at::Tensor p = at::full({6}, salt, at::kFloat);
      TracedLoader loader({{"w", {6}, at::kFloat}}, {{"p", p}});
      loader.Begin();
      p.copy_(loader["w"].clone());
      p.narrow(0, 0, salt).mul_(2);
      EXPECT_EQ(loader.log().copies.size(), 3U);
      EXPECT_EQ(loader.log().nodes.size(), 1U);
      EXPECT_EQ(loader.End().kind, PassVerdict::kDone);
    }
  };
  std::thread first(trace, 2);
  std::thread second(trace, 3);
  const at::Tensor a = at::ones({3});
  for (int round = 0; round < kRounds; ++round) EXPECT_EQ((a + a).sum().item<float>(), 6);
  first.join();
  second.join();
}

// A thread that was there before the pass: a kernel of ours finds the switch missing.
TEST(StorageGuard, ThreadsOfAPoolJoin) {
  at::Tensor p = at::zeros({4, 4});
  TracedLoader loader({{"w", {4, 4}, at::kFloat}}, {{"p", p}});
  std::promise<at::Tensor> given;
  std::thread pool([&, w = given.get_future()]() mutable {
    const at::Tensor tensor = w.get();
    for (int row = 0; row < 4; ++row) p[row].copy_(tensor[3 - row]);
    p[0].mul_(2);  // now it takes part: no trace tensor is among the arguments
  });
  loader.Begin();
  given.set_value(loader["w"]);
  pool.join();
  EXPECT_EQ(loader.log().copies.size(), 5U);
  EXPECT_EQ(loader.log().nodes.size(), 1U);
  ASSERT_EQ(loader.End().kind, PassVerdict::kDone);
  EXPECT_EQ(EntryOf(**loader.Plan(), "w").kind, EntryKind::kDerived);
}

TEST(StorageGuard, ThreadsThatDoNotTakePartCannotWrite) {
  at::Tensor p = at::zeros({4});
  TracedLoader loader({{"w", {4}, at::kFloat}}, {{"p", p}});
  loader.Begin();
  std::thread([&] {
    EXPECT_THAT(ErrorOf([&] { p.fill_(1); }), HasSubstr("`p` is being traced"));
  }).join();
  std::thread([&] {
    loader.tracer().JoinThread();
    p.fill_(1);
  }).join();
  EXPECT_EQ(loader.log().copies.size(), 1U);
}

// The switch of a thread goes off with the pass it joined.
TEST(StorageGuard, JoinedThreadsLeaveWithThePass) {
  at::Tensor p = at::zeros({4});
  TracedLoader loader({{"w", {4}, at::kFloat}}, {{"p", p}});
  std::promise<void> joined;
  std::promise<void> ended;
  loader.Begin();
  std::thread thread([&] {
    loader.tracer().JoinThread();
    joined.set_value();
    ended.get_future().wait();
    const at::Tensor real = at::ones({4});
    EXPECT_EQ((real * 2).sum().item<float>(), 8);
    EXPECT_EQ(TraceSession::Current(), nullptr);
  });
  joined.get_future().wait();
  ASSERT_EQ(loader.End().kind, PassVerdict::kDone);
  ended.set_value();
  thread.join();
}

}  // namespace
}  // namespace loadplan::testing
