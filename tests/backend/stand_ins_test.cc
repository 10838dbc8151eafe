#include "backend/stand_ins.h"

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/backend/traced_loader.h"

namespace loadplan::testing {
namespace {

TEST(StandInsTest, RoundsDecideTheOtherWay) {
  StandIns first(0);
  StandIns second(1);
  EXPECT_NE(first.Decide("a > b"), second.Decide("a > b"));
  EXPECT_EQ(first.Decide("a > b"), first.Decide("a > b"));
  EXPECT_EQ(first.num_answers(), 3);
}

TEST(StandInsTest, OnlyTheLastSiteOfThePassTurns) {
  StandIns answers(0);
  EXPECT_FALSE(answers.Turn());
  answers.Choose("one");
  answers.Choose("two");
  EXPECT_TRUE(answers.Turn());
  answers.Rewind();
  EXPECT_FALSE(answers.Turn());
  EXPECT_EQ(answers.Choose("one"), 0);
  EXPECT_EQ(answers.Choose("two"), 1);
}

TEST(StandInsTest, MadeTensorsHaveOneValue) {
  StandIns answers(0);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kByte, at::kLong, at::kBool}) {
    const at::Tensor like = at::empty({2, 3}, dtype);
    const at::Tensor made = answers.Make(like, 1);
    EXPECT_EQ(made.sizes(), like.sizes());
    EXPECT_EQ(made.scalar_type(), dtype);
    EXPECT_TRUE((made == made[0][0]).all().item<bool>());
    EXPECT_FALSE(at::equal(made, answers.Make(like, 0))) << dtype;
  }
}

// A loader with two names, of which `a` reads its value; explored as a host does it.
class ExploreTest : public ::testing::Test {
 protected:
  using Loader = void (*)(const std::vector<PassTensor>& given, at::Tensor p, at::Tensor q);

  std::shared_ptr<const TracedPlan> PlanOf(Loader load) {
    const at::Tensor p = at::zeros({4});
    const at::Tensor q = at::zeros({2});
    auto targets = std::make_shared<const TargetSet>(*TargetSet::Create({{"p", p}, {"q", q}}));
    auto tracer = *Tracer::Create({{"a", {2}, at::kFloat}, {"b", {2}, at::kFloat}}, targets);
    const auto call = [&] { return ErrorOf([&] { load(tracer->pass(), p, q); }); };
    PassVerdict verdict;
    do {
      EXPECT_TRUE(tracer->BeginPass().ok());
      verdict = tracer->EndPass(call());
    } while (verdict.kind == PassVerdict::kRepeat);
    EXPECT_EQ(verdict.kind, PassVerdict::kDone) << verdict.message;
    while (tracer->WantsExploring()) {
      EXPECT_TRUE(tracer->BeginExploring().ok());
      tracer->EndExploring(call());
      ++num_explored_;
    }
    EXPECT_FALSE(p.any().item<bool>() || q.any().item<bool>());
    return *tracer->BuildPlan(OverlapPolicy::kFallback);
  }

  int num_explored_ = 0;
};

TEST_F(ExploreTest, NothingToExploreWhereNoNameIsLeftOut) {
  const auto plan = PlanOf([](const std::vector<PassTensor>& given, at::Tensor p, at::Tensor) {
    for (const PassTensor& item : given) p.narrow(0, 2 * item.source, 2).copy_(item.tensor);
  });
  EXPECT_EQ(num_explored_, 0);
  EXPECT_EQ(EntryOf(*plan, "a").kind, EntryKind::kDirect);
}

TEST_F(ExploreTest, ANameThatIsDroppedWithoutItsPartner) {
  const auto plan = PlanOf([](const std::vector<PassTensor>& given, at::Tensor p, at::Tensor q) {
    at::Tensor held;
    for (const PassTensor& item : given) {
      if (item.source == 0) {
        q.fill_(item.tensor[0].item());
        held = item.tensor;
      } else if (held.defined()) {
        p.copy_(at::cat({held, item.tensor}));
      }
    }
  });
  EXPECT_EQ(num_explored_, StandIns::kNumRounds);
  EXPECT_EQ(EntryOf(*plan, "a").kind, EntryKind::kFallback);
  EXPECT_EQ(EntryOf(*plan, "b").kind, EntryKind::kFallback);
}

TEST_F(ExploreTest, ANameThatHasNothingToDoWithIt) {
  const auto plan = PlanOf([](const std::vector<PassTensor>& given, at::Tensor, at::Tensor q) {
    for (const PassTensor& item : given) {
      if (item.source == 0) {
        TORCH_CHECK(item.tensor.isfinite().all().item<bool>(), "not finite");
        TORCH_CHECK(!(item.tensor > 9).any().item<bool>(), "too large");
      } else {
        q.copy_(item.tensor);
      }
    }
  });
  EXPECT_GT(num_explored_, StandIns::kNumRounds);
  EXPECT_EQ(EntryOf(*plan, "a").kind, EntryKind::kFallback);
  EXPECT_EQ(EntryOf(*plan, "b").kind, EntryKind::kDirect);
}

TEST_F(ExploreTest, ALoaderThatNothingSatisfies) {
  const auto plan = PlanOf([](const std::vector<PassTensor>& given, at::Tensor, at::Tensor q) {
    for (const PassTensor& item : given) {
      if (item.source == 1) q.copy_(item.tensor);
      TORCH_CHECK(item.source == 1 || item.tensor[0].item<float>() == 0.25F, "no quarter");
    }
  });
  EXPECT_EQ(EntryOf(*plan, "b").kind, EntryKind::kFallback);
  EXPECT_THAT(EntryOf(*plan, "b").reason, ::testing::HasSubstr("no quarter"));
}

}  // namespace
}  // namespace loadplan::testing
