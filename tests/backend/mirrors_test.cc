// Tensors that are no targets, that the loader writes, and that outlive it.
#include "backend/mirrors.h"

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/backend/traced_loader.h"

namespace loadplan {
namespace {

using testing::BytesOf;
using testing::EntryOf;
using ::testing::HasSubstr;
using testing::TracedLoader;

class Mirrors : public ::testing::Test {
 protected:
  Mirrors() : p_(at::arange(4, at::kFloat)), loader_({{"w", {4}, at::kFloat}}, {{"p", p_}}) {}

  // Passes until one is complete, each running `load` with `w`, or with an undefined tensor
  // where it was given up.
  template <typename F>
  int Run(const F& load) {
    for (int passes = 1; passes < 6; ++passes) {
      loader_.Begin();
      load(loader_["w"]);
      const PassVerdict verdict = loader_.End();
      EXPECT_NE(verdict.kind, PassVerdict::kRefuse) << verdict.message;
      if (verdict.kind == PassVerdict::kDone) return passes;
    }
    return -1;
  }

  std::vector<std::string> NamesOfMirrors() {
    std::vector<std::string> names;
    for (const LiveTarget& target : loader_.tracer().targets()->targets()) {
      if (target.is_mirror) names.push_back(target.name);
    }
    return names;
  }

  at::Tensor p_;
  TracedLoader loader_;
};

TEST_F(Mirrors, CopiesIntoThemArePlanned) {
  const at::Tensor mirror = at::zeros({2, 4});
  const std::string before = BytesOf(mirror);
  EXPECT_EQ(Run([&](const at::Tensor& w) {
              mirror[1].copy_(w);
              p_.copy_(mirror[1]);
            }),
            2);
  EXPECT_EQ(BytesOf(mirror), before);
  const auto plan = *loader_.Plan();
  EXPECT_EQ(EntryOf(*plan, "w").kind, EntryKind::kDirect);
  EXPECT_EQ(plan->plan.writes().size(), 2U);
  EXPECT_THAT(NamesOfMirrors(), ::testing::ElementsAre("a tensor of shape [4] and dtype float32"));
  // Nobody asked for the row that nothing writes.
  EXPECT_TRUE(plan->plan.uncovered().empty());
  EXPECT_EQ(plan->plan.declared_targets().size(), 1U);
}

TEST_F(Mirrors, WhatRanOnThemIsPutBackAndRecorded) {
  const at::Tensor kept = at::ones({4});
  const at::Tensor calls = at::ones({1});
  EXPECT_EQ(Run([&](const at::Tensor& w) {
              kept.copy_(p_);
              calls.add_(1);
              p_.copy_(w);
            }),
            2);
  EXPECT_TRUE(at::equal(kept, at::ones({4})));
  EXPECT_TRUE(at::equal(calls, at::ones({1})));
  const auto plan = *loader_.Plan();
  EXPECT_EQ(EntryOf(*plan, "w").kind, EntryKind::kDirect);
  EXPECT_EQ(plan->plan.live_copies().size(), 1U);
  EXPECT_EQ(plan->plan.value_writes().size(), 1U);
}

TEST_F(Mirrors, ThePlanCallsOneByTheNameOfItsAttribute) {
  const at::Tensor calls = at::ones({1});
  EXPECT_EQ(Run([&](const at::Tensor& w) {
              calls.add_(1);
              p_.copy_(w);
              for (const c10::StorageImpl* const storage : loader_.tracer().Mirrors())
                loader_.tracer().NameMirror(storage, "calls");
            }),
            2);
  EXPECT_TRUE(at::equal(calls, at::ones({1})));
  EXPECT_THAT(NamesOfMirrors(), ::testing::ElementsAre("calls"));
}

TEST_F(Mirrors, ATableThatOnePassMakesKeepsItsBytes) {
  at::Tensor table;
  Run([&](const at::Tensor& w) {
    if (!table.defined()) table = at::empty({4}).fill_(3);
    p_.copy_(w * table);
  });
  EXPECT_TRUE(at::equal(table, at::full({4}, 3.0)));
  EXPECT_TRUE(NamesOfMirrors().empty());
  EXPECT_EQ(EntryOf(**loader_.Plan(), "w").kind, EntryKind::kDerived);
}

TEST_F(Mirrors, ACounterThatTheFirstPassMakesIsPlannedFromThere) {
  at::Tensor calls;
  Run([&](const at::Tensor& w) {
    if (!calls.defined()) calls = at::zeros({1});
    calls.add_(1);
    p_.copy_(w);
  });
  // What lay there before it was zero is nobody's.
  EXPECT_TRUE(at::equal(calls, at::ones({1})));
  EXPECT_EQ((*loader_.Plan())->plan.value_writes().size(), 1U);
}

TEST_F(Mirrors, NamesThatEachPassTakesIntoANewOneFallBack) {
  at::Tensor made;
  Run([&](const at::Tensor& w) {
    made = at::zeros({4});
    if (w.defined()) made.copy_(w);
  });
  EXPECT_THAT(EntryOf(**loader_.Plan(), "w").reason,
              HasSubstr("`aten::copy_` takes it into a tensor of shape [4] and dtype float32 that "
                        "is no target and outlives load_weights"));
}

TEST_F(Mirrors, OldBytesThatEachPassTakesIntoANewOneMakeEveryNameFallBack) {
  at::Tensor made;
  Run([&](const at::Tensor& w) {
    made = at::zeros({4});
    made.copy_(p_);
    if (w.defined()) p_.copy_(w);
  });
  EXPECT_THAT(EntryOf(**loader_.Plan(), "w").reason, HasSubstr("changes a tensor of shape [4]"));
}

TEST_F(Mirrors, ARandomOneMakesEveryNameFallBack) {
  const at::Tensor noise = at::zeros({4});
  Run([&](const at::Tensor& w) {
    noise.normal_();
    if (w.defined()) p_.copy_(w);
  });
  EXPECT_TRUE(at::equal(noise, at::zeros({4})));
  EXPECT_THAT(EntryOf(**loader_.Plan(), "w").reason, HasSubstr("draws random numbers"));
}

TEST_F(Mirrors, BytesThatOnlyAFirstCallWouldWriteRefuseThePlan) {
  at::Tensor made;
  const auto load = [&](const at::Tensor& w) {
    if (made.defined()) return;
    made = at::zeros({4});
    made.copy_(w);
  };
  loader_.Begin();
  load(loader_["w"]);
  EXPECT_EQ(loader_.End().kind, PassVerdict::kRepeat);
  loader_.Begin();
  load(loader_["w"]);
  const PassVerdict verdict = loader_.End();
  EXPECT_EQ(verdict.kind, PassVerdict::kRefuse);
  EXPECT_THAT(verdict.message, HasSubstr("in one call and keeps it for the next ones"));
}

TEST_F(Mirrors, APassThatNobodyRepeatsGivesTheirNamesUp) {
  const at::Tensor mirror = at::zeros({4});
  loader_.Begin();
  mirror.copy_(loader_["w"]);
  loader_.End();
  EXPECT_EQ(EntryOf(**loader_.Plan(), "w").kind, EntryKind::kFallback);
}

// However a pass ends.
TEST_F(Mirrors, APassThatFailsPutsThemBack) {
  const at::Tensor calls = at::ones({1});
  loader_.Begin();
  calls.add_(1);
  EXPECT_EQ(loader_.End("OverflowError: half way").kind, PassVerdict::kRefuse);
  EXPECT_TRUE(at::equal(calls, at::ones({1})));
  loader_.Begin();
  calls.add_(1);
  loader_.tracer().AbandonPass();
  EXPECT_TRUE(at::equal(calls, at::ones({1})));
}

TEST_F(Mirrors, ATracerThatGoesInAPassPutsThemBack) {
  const at::Tensor calls = at::ones({1});
  {
    TracedLoader loader({{"w", {4}, at::kFloat}}, {{"q", at::zeros({4})}});
    loader.Begin();
    calls.add_(1);
  }
  EXPECT_TRUE(at::equal(calls, at::ones({1})));
}

TEST_F(Mirrors, OneThatMovesIsPutBackAndMakesEveryNameFallBack) {
  const at::Tensor kept = at::ones({4});
  const void* const memory = kept.data_ptr();
  Run([&](const at::Tensor& w) {
    kept.set_(at::zeros({2, 3}));
    if (w.defined()) p_.copy_(w);
  });
  EXPECT_TRUE(at::equal(kept, at::ones({4})));
  EXPECT_EQ(kept.data_ptr(), memory);
  EXPECT_EQ(EntryOf(**loader_.Plan(), "w").reason,
            "`aten::set_.source_Tensor` moves a tensor of shape [4] that is no target and outlives "
            "load_weights");
}

TEST_F(Mirrors, ResultsOfOperatorsAreMadeByThePass) {
  at::Tensor table;
  const at::Tensor old = at::ones({4});
  Run([&](const at::Tensor& w) {
    if (!table.defined()) table = (old + 1).mul_(3);
    p_.copy_(w * table);
  });
  EXPECT_TRUE(at::equal(table, at::full({4}, 6.0)));
}

}  // namespace
}  // namespace loadplan
