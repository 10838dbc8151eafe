// What operators that only move bytes leave in the log of a pass.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <functional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/backend/traced_loader.h"

namespace loadplan::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CopyRecord : public ::testing::Test {
 protected:
  at::Tensor p_ = at::arange(24, at::kFloat).view({4, 6});
  at::Tensor q_ = at::arange(24, at::kFloat).view({4, 6}).neg();
  TracedLoader loader_{{{"w", {4, 6}, at::kFloat}, {"b", {4, 6}, at::kBFloat16}},
                       {{"p", p_}, {"q", q_}}};

  void SetUp() override { loader_.Begin(); }
  std::size_t num_copies() const { return loader_.log().copies.size(); }
};

TEST_F(CopyRecord, CopyOfAView) {
  p_.narrow(0, 1, 2).copy_(loader_["w"].narrow(0, 2, 2));
  ASSERT_EQ(num_copies(), 1U);
  const auto& copy = loader_.copy(0);
  EXPECT_EQ(copy.to, 0);
  EXPECT_EQ(loader_.KindOf(copy.from), StorageKind::kCheckpoint);
  EXPECT_FALSE(copy.map.is_cast());
  EXPECT_EQ(copy.map.nbytes(), 48);
  EXPECT_EQ(copy.map.ToSpan().start, 24);
  EXPECT_EQ(copy.map.FromSpan().start, 48);
}

TEST_F(CopyRecord, CastKeepsBothDtypes) {
  p_.copy_(loader_["b"]);
  ASSERT_EQ(num_copies(), 1U);
  EXPECT_TRUE(loader_.copy(0).map.is_cast());
  EXPECT_EQ(loader_.copy(0).from_dtype.name, "bfloat16");
  EXPECT_EQ(loader_.copy(0).to_dtype.name, "float32");
}

TEST_F(CopyRecord, BroadcastRepeatsTheSource) {
  p_.copy_(loader_["w"].narrow(0, 0, 1));
  ASSERT_EQ(num_copies(), 1U);
  EXPECT_EQ(loader_.copy(0).map.nbytes(), 96);
  EXPECT_EQ(loader_.copy(0).map.FromSpan().nbytes(), 24);
}

TEST_F(CopyRecord, FillAndZeroAreConstants) {
  p_.fill_(3);
  q_.zero_();
  p_.fill_(at::scalar_tensor(2.0));
  ASSERT_EQ(num_copies(), 3U);
  for (std::size_t i = 0; i < 3; ++i)
    EXPECT_EQ(loader_.KindOf(loader_.copy(i).from), StorageKind::kConstant) << i;
}

TEST_F(CopyRecord, FillFromACheckpointScalarIsACopy) {
  p_.fill_(loader_["w"].select(0, 0).select(0, 0));
  ASSERT_EQ(num_copies(), 1U);
  EXPECT_EQ(loader_.KindOf(loader_.copy(0).from), StorageKind::kCheckpoint);
}

TEST_F(CopyRecord, RealSourceIsCapturedByValue) {
  const at::Tensor real = at::ones({4, 6});
  p_.copy_(real);
  real.fill_(5);  // reused by the loader: what was copied stays
  ASSERT_EQ(num_copies(), 1U);
  const StorageRecord& from =
      loader_.log().storages[static_cast<std::size_t>(loader_.copy(0).from)];
  EXPECT_EQ(from.kind, StorageKind::kConstant);
  EXPECT_EQ(loader_.session().captured()[static_cast<std::size_t>(from.ref)].sum().item<float>(),
            24);
}

TEST_F(CopyRecord, EmptyCopiesLeaveNothing) {
  p_.narrow(0, 0, 0).copy_(loader_["w"].narrow(0, 0, 0));
  p_.narrow(1, 2, 0).zero_();
  EXPECT_EQ(num_copies(), 0U);
}

TEST_F(CopyRecord, LiveToLiveIsRecordedAndNotRun) {
  p_.copy_(q_);
  ASSERT_EQ(num_copies(), 1U);
  EXPECT_EQ(loader_.KindOf(loader_.copy(0).from), StorageKind::kTarget);
}

TEST_F(CopyRecord, CopyOntoItselfIsNothing) {
  p_.copy_(p_);
  EXPECT_EQ(num_copies(), 0U);
}

TEST_F(CopyRecord, OverlappingPartsOfOneTensorAreRefused) {
  EXPECT_THAT(ErrorOf([&] { p_.narrow(0, 1, 3).copy_(p_.narrow(0, 0, 3)); }),
              HasSubstr("between overlapping parts of target `p` depends on the order in which a "
                        "kernel copies and cannot be planned; copy through clone()"));
}

TEST_F(CopyRecord, WritesIntoACheckpointTensor) {
  const at::Tensor w = loader_["w"];
  w.zero_();
  p_.copy_(w);
  ASSERT_EQ(num_copies(), 2U);
  EXPECT_EQ(loader_.KindOf(loader_.copy(0).to), StorageKind::kCheckpoint);
  ASSERT_EQ(loader_.End().kind, PassVerdict::kDone);
  EXPECT_EQ(EntryOf(**loader_.Plan(), "w").kind, EntryKind::kUnneeded);
}

TEST_F(CopyRecord, AnOperatorsOutputThatIsWrittenMovesToACopy) {
  const at::Tensor y = loader_["w"] * 2;
  const at::Tensor view = y.narrow(0, 0, 2);
  p_.copy_(y);
  view.zero_();
  q_.copy_(y);
  for (const auto& copy : loader_.log().copies)
    EXPECT_NE(loader_.KindOf(copy.to), StorageKind::kValue) << "an output is immutable";
  ASSERT_EQ(loader_.End().kind, PassVerdict::kDone);
  EXPECT_EQ(EntryOf(**loader_.Plan(), "w").kind, EntryKind::kDerived);
}

TEST_F(CopyRecord, LazilyConjugatedSourcesAreComputed) {
  const at::Tensor z = at::view_as_complex(loader_["w"].view({4, 3, 2}));
  at::view_as_complex(p_.view({4, 3, 2})).copy_(z.conj());
  ASSERT_EQ(loader_.log().nodes.size(), 1U);
  EXPECT_EQ(loader_.log().nodes[0].op, "aten::_conj_physical");
  EXPECT_THAT(ErrorOf([&] {
                at::view_as_complex(q_.view({4, 3, 2})).conj().copy_(z);
              }),
              HasSubstr("lazily conjugated or negated view of target `q`"));
}

TEST_F(CopyRecord, ATensorThatIsThereAlreadyIsNotCopied) {
  const at::Tensor w = loader_["w"];
  EXPECT_TRUE(w.to(at::kCPU).is_same(w));
  EXPECT_TRUE(w.cpu().is_same(w));
  EXPECT_TRUE(w.to(p_.options()).is_same(w));
  EXPECT_FALSE(w.to(at::TensorOptions(at::kCPU), /*non_blocking=*/false, /*copy=*/true).is_same(w));
  EXPECT_FALSE(w.to(at::kDouble).is_same(w));
}

TEST_F(CopyRecord, ViewOfAnotherDtypeMovesBytes) {
  p_.narrow(1, 0, 3).copy_(loader_["b"].view(at::kFloat));
  ASSERT_EQ(num_copies(), 1U);
  EXPECT_FALSE(loader_.copy(0).map.is_cast());
  ASSERT_EQ(loader_.End().kind, PassVerdict::kDone);
  EXPECT_EQ(EntryOf(**loader_.Plan(), "b").kind, EntryKind::kDirect);
}

TEST_F(CopyRecord, ScratchTensorsFollowTheRecord) {
  {
    const at::Tensor scratch = at::empty({4, 6});
    scratch.narrow(0, 0, 2).copy_(loader_["w"].narrow(0, 2, 2));
    scratch.narrow(0, 2, 2).copy_(loader_["w"].narrow(0, 0, 2));
    p_.copy_(scratch);
  }
  ASSERT_EQ(num_copies(), 3U);
  EXPECT_EQ(loader_.KindOf(loader_.copy(2).from), StorageKind::kScratch);
  ASSERT_EQ(loader_.End().kind, PassVerdict::kDone);
  EXPECT_EQ(EntryOf(**loader_.Plan(), "w").kind, EntryKind::kDirect);
}

TEST_F(CopyRecord, RaisesEagersWords) {
  const at::Tensor w = loader_["w"];
  const at::Tensor real = at::zeros({4, 6});
  const auto same = [](const std::function<void()>& traced, const std::function<void()>& eager) {
    const std::string words = ErrorOf(eager);
    EXPECT_THAT(words, ::testing::Not(::testing::IsEmpty()));
    EXPECT_EQ(ErrorOf(traced), words);
  };
  const at::Tensor other = at::zeros({4, 6});
  same([&] { p_.copy_(w.narrow(1, 0, 5)); }, [&] { other.copy_(real.narrow(1, 0, 5)); });
  same(
      [&] {
        p_.narrow(0, 0, 1).expand({4, 6}).copy_(w);
      },
      [&] {
        other.narrow(0, 0, 1).expand({4, 6}).copy_(real);
      });
  same([&] { p_.fill_(w); }, [&] { other.fill_(real); });
  EXPECT_EQ(num_copies(), 0U);
}

struct Temporary {
  std::string name;
  std::function<at::Tensor(const at::Tensor&)> make;
};
std::ostream& operator<<(std::ostream& stream, const Temporary& t) { return stream << t.name; }

class CopyRecordTemporary : public ::testing::TestWithParam<Temporary> {};

// Each gives the same values as eager, in new memory with eager's strides, and the bytes go
// through it to a direct write.
TEST_P(CopyRecordTemporary, ResolvesThrough) {
  at::Tensor p = at::zeros({4, 6});
  TracedLoader loader({{"w", {4, 6}, at::kFloat}}, {{"p", p}});
  const at::Tensor real = GetParam().make(at::arange(24, at::kFloat).view({4, 6}));
  loader.Begin();
  {
    const at::Tensor made = GetParam().make(loader["w"]);
    EXPECT_EQ(made.sizes(), real.sizes());
    EXPECT_EQ(made.strides(), real.strides());
    EXPECT_EQ(loader.KindOf(loader.session().Find(made).storage), StorageKind::kTemporary);
    EXPECT_EQ(made.device().type(), c10::kPrivateUse1);
    p.view({24})
        .narrow(0, 0, made.numel() / 2)
        .copy_(made.reshape({-1}).slice(0, 0, made.numel() / 2));
  }
  ASSERT_EQ(loader.End().kind, PassVerdict::kDone);
  const auto plan = loader.Plan();
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(EntryOf(**plan, "w").kind, EntryKind::kDirect) << (*plan)->plan.Report();
}

INSTANTIATE_TEST_SUITE_P(
    , CopyRecordTemporary,
    ::testing::Values(
        Temporary{"clone", [](const at::Tensor& w) { return w.clone(); }},
        Temporary{"clone_of_transposed", [](const at::Tensor& w) { return w.t().clone(); }},
        Temporary{"contiguous", [](const at::Tensor& w) { return w.t().contiguous(); }},
        Temporary{"reshape",
                  [](const at::Tensor& w) {
                    return w.t().reshape({2, 12});
                  }},
        Temporary{"flatten", [](const at::Tensor& w) { return w.t().flatten(); }},
        Temporary{"cat",
                  [](const at::Tensor& w) {
                    return at::cat({w.narrow(0, 2, 2), w}, 0);
                  }},
        Temporary{"cat_of_columns",
                  [](const at::Tensor& w) {
                    return at::cat({w.narrow(1, 3, 3), w}, 1);
                  }},
        Temporary{"cat_with_legacy_empty",
                  [](const at::Tensor& w) {
                    return at::cat({at::empty({0}), w}, 0);
                  }},
        Temporary{"stack",
                  [](const at::Tensor& w) {
                    return at::stack({w, w}, 1);
                  }},
        Temporary{"to_copy",
                  [](const at::Tensor& w) {
                    return w.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
                  }},
        Temporary{"empty_like_and_copy",
                  [](const at::Tensor& w) {
                    at::Tensor made = at::empty_like(w);
                    made.copy_(w);
                    return made;
                  }},
        Temporary{"new_empty_in_parts",
                  [](const at::Tensor& w) {
                    at::Tensor made = w.new_empty({4, 6});
                    made.narrow(0, 0, 1).copy_(w.narrow(0, 3, 1));
                    made.narrow(0, 1, 3).copy_(w.narrow(0, 0, 3));
                    return made;
                  }}),
    [](const auto& param_info) { return param_info.param.name; });

TEST(CopyRecordTargets, MetaTargetsTakePart) {
  at::Tensor p = at::empty({4}, at::kMeta);
  TracedLoader loader({{"w", {8}, at::kFloat}}, {{"p", p}});
  loader.Begin();
  p.copy_(loader["w"].narrow(0, 4, 4));
  ASSERT_EQ(loader.log().copies.size(), 1U);
  EXPECT_EQ(loader.copy(0).to, 0);
  p.zero_();
  EXPECT_EQ(loader.log().copies.size(), 2U);
}

TEST(CopyRecordTargets, LeafThatRequiresGradIsAsInEager) {
  at::Tensor p = at::zeros({4}).requires_grad_();
  TracedLoader loader({{"w", {4}, at::kFloat}}, {{"p", p}});
  at::Tensor twin = at::zeros({4}).requires_grad_();
  const std::string leaf = ErrorOf([&] { twin.copy_(at::ones({4})); });
  const std::string view = ErrorOf([&] { twin.narrow(0, 0, 2).zero_(); });
  loader.Begin();
  EXPECT_EQ(ErrorOf([&] { p.copy_(loader["w"]); }), leaf);
  EXPECT_EQ(ErrorOf([&] { p.narrow(0, 0, 2).zero_(); }), view);
  EXPECT_EQ(loader.log().copies.size(), 0U);
  const at::NoGradGuard no_grad;
  p.copy_(loader["w"]);
  EXPECT_EQ(loader.log().copies.size(), 1U);
  EXPECT_TRUE(p.requires_grad());
}

TEST(CopyRecordTargets, MadeInInferenceMode) {
  at::Tensor p;
  {
    const c10::InferenceMode inference;
    p = at::zeros({4});
  }
  TracedLoader loader({{"w", {4}, at::kFloat}}, {{"p", p}});
  loader.Begin();
  {
    const c10::InferenceMode inference;
    p.copy_(loader["w"]);
    const at::Tensor made = loader["w"].narrow(0, 0, 2).clone();
    p.narrow(0, 0, 2).copy_(made);
  }
  EXPECT_EQ(loader.log().copies.size(), 3U);
}

TEST(CopyRecordTargets, StoragesShownTwiceAreOneTarget) {
  at::Tensor head = at::zeros({4, 2});
  TracedLoader loader({{"w", {4}, at::kFloat}}, {{"head", head}, {"row", head.select(0, 1)}});
  loader.Begin();
  head.select(0, 1).copy_(loader["w"].narrow(0, 0, 2));
  EXPECT_EQ(loader.copy(0).to, 0);
  EXPECT_EQ(loader.copy(0).map.ToSpan().start, 8);
}

}  // namespace
}  // namespace loadplan::testing
