#include "lifecycle/host_loader.h"

#include <ATen/ATen.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using ::loadplan::testing::IsOk;
using ::loadplan::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

// Two parameters; how a name is loaded is given by each test.
class HostLoaderTest : public ::testing::Test {
 protected:
  using LoadOne = std::function<void(const std::string& name, const at::Tensor& weight)>;

  LoadWeights Loader(LoadOne load_one) {
    return [load_one = std::move(load_one)](const NextWeight& next) {
      while (auto item = next()) load_one(item->first, item->second);
    };
  }
  std::vector<LiveTarget> Targets() { return {{"w", w_}, {"v", v_}}; }
  absl::StatusOr<std::shared_ptr<const BoundPlan>> Plan(const LoadWeights& loader) {
    return PlanLoads({{"a", {2, 3}, at::kFloat}, {"b", {3}, at::kFloat}}, Targets(), loader);
  }
  EntryKind KindOf(const BoundPlan& plan, std::size_t entry) {
    return plan.plan().entries()[entry].kind;
  }
  void Update(const std::shared_ptr<const BoundPlan>& plan, const LoadWeights& loader) {
    ReloadSession session;
    const std::vector<LiveTarget> targets = Targets();
    ASSERT_THAT(session.Start({}), IsOk());
    ASSERT_THAT(session.Begin(plan, targets), IsOk());
    ASSERT_THAT(session.Deliver("b", b_), IsOk());
    ASSERT_THAT(CallLoader(session, *plan, loader, targets), IsOk());
    ASSERT_THAT(session.Deliver("a", a_), IsOk());
    ASSERT_THAT(CallLoader(session, *plan, loader, targets), IsOk());
    ASSERT_THAT(session.PrepareFinish(std::nullopt, targets), IsOk());
    ASSERT_THAT(session.Finish().status(), IsOk());
  }

  const at::Tensor w_ = at::rand({3, 2});
  const at::Tensor v_ = at::rand({3});
  const at::Tensor a_ = at::rand({2, 3});
  const at::Tensor b_ = at::rand({3});
};

TEST_F(HostLoaderTest, PlansWithoutWriting) {
  const at::Tensor before = w_.clone();
  const LoadWeights loader = Loader([this](const std::string& name, const at::Tensor& weight) {
    name == "a" ? w_.copy_(weight.t()) : v_.copy_(weight * 2);
  });
  const auto plan = Plan(loader);
  ASSERT_THAT(plan.status(), IsOk());
  EXPECT_TRUE(at::equal(w_, before));
  EXPECT_EQ(KindOf(**plan, 0), EntryKind::kDirect);
  EXPECT_EQ(KindOf(**plan, 1), EntryKind::kDerived);
  Update(*plan, loader);
  EXPECT_TRUE(at::equal(w_, a_.t()));
  EXPECT_TRUE(at::equal(v_, b_ * 2));
}

TEST_F(HostLoaderTest, CallsTheLoaderForNamesThatFallBack) {
  const LoadWeights loader = Loader([this](const std::string& name, const at::Tensor& weight) {
    if (name == "a") {
      w_.copy_(weight.t());
    } else if (weight.sum().item<float>() > -100) {
      v_.copy_(weight);
    }
  });
  const auto plan = Plan(loader);
  ASSERT_THAT(plan.status(), IsOk());
  EXPECT_EQ(KindOf(**plan, 0), EntryKind::kDirect);
  EXPECT_EQ(KindOf(**plan, 1), EntryKind::kFallback);
  Update(*plan, loader);
  EXPECT_TRUE(at::equal(w_, a_.t()));
  EXPECT_TRUE(at::equal(v_, b_));
}

TEST_F(HostLoaderTest, TellsWhatTheLoaderThrows) {
  EXPECT_THAT(Plan(Loader([](const std::string& name, const at::Tensor&) {
                if (name == "b") throw std::runtime_error("no room for it");
              })).status(),
              StatusIs(kPrecondition, AllOf(HasSubstr("`b`"), HasSubstr("no room for it"))));
  bool throws = false;
  const LoadWeights loader = Loader([&](const std::string& name, const at::Tensor& weight) {
    if (name == "a") return;
    v_.fill_(weight.sum().item<float>());
    if (throws) throw std::runtime_error("too late");
  });
  const auto plan = Plan(loader);
  ASSERT_THAT(plan.status(), IsOk());
  throws = true;
  const at::Tensor before = v_.clone();
  for (const bool atomic : {true, false}) {
    ReloadSession session;
    ASSERT_THAT(session.Start({.atomic = atomic}), IsOk());
    ASSERT_THAT(session.Begin(*plan, Targets()), IsOk());
    ASSERT_THAT(session.Deliver("b", b_), IsOk());
    EXPECT_THAT(CallLoader(session, **plan, loader, Targets()),
                StatusIs(kPrecondition, HasSubstr("raised too late")));
    EXPECT_EQ(at::equal(v_, before), atomic);
    EXPECT_EQ(session.report().state, atomic ? SessionState::kIdle : SessionState::kFailed);
  }
}

TEST_F(HostLoaderTest, RefusesALoaderThatKeepsATensor) {
  at::Tensor kept;
  EXPECT_THAT(
      Plan(Loader([&](const std::string&, const at::Tensor& weight) { kept = weight; })).status(),
      StatusIs(kPrecondition, HasSubstr("kept the tensor of `b`")));
}

}  // namespace
}  // namespace loadplan
