// What operators that are no copies leave in the log, what they refuse, and in which words.
#include <ATen/ATen.h>

#include <functional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/backend/traced_loader.h"

namespace loadplan::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const at::Device kTrace(c10::kPrivateUse1, 0);

class Watcher : public ::testing::Test {
 protected:
  at::Tensor p_ = at::arange(6, at::kFloat);
  TracedLoader loader_{{{"w", {6}, at::kFloat}, {"v", {6}, at::kFloat}}, {{"p", p_}}};

  void SetUp() override { loader_.Begin(); }
  const std::vector<NodeRecord>& nodes() const { return loader_.log().nodes; }
};

TEST_F(Watcher, ArithmeticOnATraceTensorIsANode) {
  const at::Tensor made = loader_["w"].view({2, 3}).t() * 2;
  EXPECT_EQ(made.sizes(), at::IntArrayRef({3, 2}));
  EXPECT_EQ(made.strides(), at::IntArrayRef({1, 3}));
  ASSERT_EQ(nodes().size(), 1U);
  EXPECT_EQ(nodes()[0].op, "aten::mul.Scalar");
  EXPECT_EQ(nodes()[0].inputs.size(), 1U);
  EXPECT_EQ(nodes()[0].not_replayable, "");
  EXPECT_EQ(loader_.KindOf(loader_.session().Find(made).storage), StorageKind::kValue);
}

TEST_F(Watcher, PromotionIsAsInEager) {
  const at::Tensor w = loader_["w"];
  EXPECT_EQ((w.to(at::kBFloat16) * 2.5).scalar_type(), at::kBFloat16);
  EXPECT_EQ((w.to(at::kBFloat16) + at::scalar_tensor(1.0, at::kDouble)).scalar_type(),
            at::kBFloat16);
  EXPECT_EQ((w.to(at::kInt) + 1.5).scalar_type(), at::kFloat);
  EXPECT_EQ((w.to(at::kHalf) + at::ones({6})).scalar_type(), at::kFloat);
  EXPECT_EQ(w.gt(0).scalar_type(), at::kBool);
}

TEST_F(Watcher, InPlaceOnATargetIsRecordedAndNotRun) {
  p_.add_(1);
  ASSERT_EQ(nodes().size(), 1U);
  EXPECT_EQ(loader_.KindOf(nodes()[0].inputs.at(0).storage), StorageKind::kTarget);
  ASSERT_EQ(loader_.log().copies.size(), 1U);
  EXPECT_EQ(loader_.copy(0).to, 0);
  EXPECT_EQ(loader_.KindOf(loader_.copy(0).from), StorageKind::kValue);
}

TEST_F(Watcher, InPlaceAfterACopyReadsTheCopy) {
  p_.copy_(loader_["w"]);
  p_.mul_(2);
  ASSERT_EQ(loader_.End().kind, PassVerdict::kDone);
  EXPECT_EQ(EntryOf(**loader_.Plan(), "w").kind, EntryKind::kDerived);
}

TEST_F(Watcher, LiveBytesCanBeReadAndHaveAHistory) {
  const at::Tensor sum = p_.sum();
  EXPECT_EQ(sum.item<float>(), 15);
  EXPECT_TRUE((p_[2] == 2).item<bool>());
  ASSERT_GE(nodes().size(), 1U);
  EXPECT_EQ(nodes()[0].op, "aten::sum");
  EXPECT_EQ(loader_.KindOf(nodes()[0].inputs.at(0).storage), StorageKind::kTarget);
}

TEST_F(Watcher, WhatWasComputedFromLiveBytesIsComputedAgain) {
  p_.copy_(p_ * 2);  // ran for real, and is no constant
  ASSERT_EQ(loader_.End().kind, PassVerdict::kDone);
  const auto plan = loader_.Plan();
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ((*plan)->plan.constants().size(), 0U);
  EXPECT_EQ((*plan)->plan.value_writes().size(), 1U);
}

TEST_F(Watcher, UnwrittenPartsOfATargetStayReadable) {
  p_.narrow(0, 0, 3).copy_(loader_["w"].narrow(0, 0, 3));
  EXPECT_EQ(p_[4].item<float>(), 4);
  EXPECT_THAT(ErrorOf([&] { p_[1].item<float>(); }),
              HasSubstr("needs the value of target `p`, which holds no data while it is traced"));
}

TEST_F(Watcher, ConstantsOnTheTraceDeviceKeepTheirValues) {
  const at::Tensor mask = at::tensor({0, 1, 1, 0}).to(at::kBool);
  const at::Tensor index = mask.nonzero().flatten().to(kTrace);
  EXPECT_EQ(index.device(), kTrace);
  EXPECT_EQ(index[0].item<int64_t>(), 1);
  EXPECT_EQ((index + 1)[1].item<int64_t>(), 3);
  EXPECT_EQ(mask.to(kTrace).nonzero().sizes(), at::IntArrayRef({2, 1}));
  EXPECT_EQ(index.cpu().sum().item<int64_t>(), 3);
  at::Tensor made = at::zeros({3}, at::TensorOptions(at::kInt).device(kTrace));
  made[1] = 7;
  EXPECT_EQ(made.sum().item<int64_t>(), 7);
  EXPECT_TRUE(loader_.log().refusals.empty());
}

// Backwards, off their alignment, and through a cast.
TEST_F(Watcher, ConstantsAreReadThroughCasts) {
  const at::Tensor values = at::tensor({1, 2, 3, 4}).to(at::kShort).to(kTrace);
  EXPECT_EQ(values.flip(0).to(at::kFloat)[0].item<float>(), 4);
  at::Tensor odd = at::zeros({9}, at::TensorOptions(at::kByte).device(kTrace));
  odd.narrow(0, 1, 8).copy_(values.to(at::kBFloat16).view(at::kByte));
  EXPECT_EQ(odd.narrow(0, 3, 2).sum().item<int64_t>(), 0x40);
}

TEST_F(Watcher, OperatorsOfRealTensorsRun) {
  const at::Tensor a = at::ones({3});
  EXPECT_EQ((a + a).sum().item<float>(), 6);
  EXPECT_TRUE(nodes().empty());
  EXPECT_TRUE(loader_.log().copies.empty());
}

TEST_F(Watcher, OutputArgumentsAreWritten) {
  at::Tensor made = at::empty_like(loader_["w"]);
  at::add_out(made, loader_["w"], loader_["v"]);
  p_.copy_(made);
  ASSERT_EQ(nodes().size(), 1U);
  EXPECT_EQ(nodes()[0].inputs.size(), 2U);
  at::Tensor live = p_;
  at::mul_out(live, loader_["w"], loader_["v"]);
  ASSERT_EQ(loader_.End().kind, PassVerdict::kDone);
  EXPECT_EQ(EntryOf(**loader_.Plan(), "w").kind, EntryKind::kDerived);
}

TEST_F(Watcher, RandomNumbersIntoATargetRefuseThePlan) {
  p_.normal_();
  ASSERT_EQ(loader_.End().kind, PassVerdict::kDone);
  const auto plan = loader_.Plan();
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(plan.status().message()), AllOf(HasSubstr("`p`"), HasSubstr("normal_")));
}

TEST_F(Watcher, RandomNumbersThroughARealTensorRefuseThePlan) {
  {
    const at::Tensor noise = at::rand({6});
    EXPECT_GE(noise.sum().item<float>(), 0);
    p_.copy_(noise);
  }
  ASSERT_EQ(loader_.End().kind, PassVerdict::kDone);
  const auto plan = loader_.Plan();
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(plan.status().message()), AllOf(HasSubstr("`p`"), HasSubstr("rand")));
}

TEST_F(Watcher, RandomNumbersBesideANameMakeItAFallback) {
  p_.copy_(loader_["w"] + at::rand({6}));
  ASSERT_EQ(loader_.End().kind, PassVerdict::kDone);
  const auto plan = loader_.Plan();
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(EntryOf(**plan, "w").kind, EntryKind::kFallback);
  EXPECT_THAT(EntryOf(**plan, "w").reason, HasSubstr("draws random numbers"));
}

TEST_F(Watcher, MovingATargetIsRefused) {
  EXPECT_THAT(ErrorOf([&] { p_.resize_({12}); }),
              HasSubstr("would move target `p` to other memory, which a load plan cannot follow; "
                        "copy into it instead"));
  EXPECT_THAT(ErrorOf([&] { p_.set_(at::ones({6})); }), HasSubstr("would move target `p`"));
  p_.resize_({6});  // what it has
}

struct ValueRead {
  std::string name;
  std::string op;
  std::function<void(const at::Tensor&)> read;
};
std::ostream& operator<<(std::ostream& stream, const ValueRead& r) { return stream << r.name; }

class WatcherValueRead : public ::testing::TestWithParam<ValueRead> {};

TEST_P(WatcherValueRead, NamesTensorAndOperatorAndGivesTheNameUp) {
  at::Tensor p = at::zeros({6});
  TracedLoader loader({{"w", {6}, at::kFloat}, {"v", {6}, at::kFloat}}, {{"p", p}});
  loader.Begin();
  p.copy_(loader["v"]);
  const std::string error = ErrorOf([&] { GetParam().read(loader["w"]); });
  EXPECT_THAT(error, AllOf(HasSubstr(GetParam().op), HasSubstr("checkpoint tensor `w`"),
                           HasSubstr("holds no data while it is traced")));
  // Swallowed or not, it counts.
  EXPECT_EQ(loader.End().kind, PassVerdict::kRepeat);
  loader.Begin();
  EXPECT_FALSE(loader["w"].defined());
  p.copy_(loader["v"]);
  ASSERT_EQ(loader.End().kind, PassVerdict::kDone);
  const auto plan = loader.Plan();
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(EntryOf(**plan, "w").kind, EntryKind::kFallback);
  EXPECT_THAT(EntryOf(**plan, "w").reason, HasSubstr(GetParam().op));
}

INSTANTIATE_TEST_SUITE_P(
    , WatcherValueRead,
    ::testing::Values(
        ValueRead{"item", "item", [](const at::Tensor& w) { w[0].item(); }},
        ValueRead{"computed_item", "item", [](const at::Tensor& w) { (w * 2).sum().item(); }},
        ValueRead{"branch", "is_nonzero",
                  [](const at::Tensor& w) { static_cast<void>((w[0] > 0).is_nonzero()); }},
        ValueRead{"nonzero", "nonzero", [](const at::Tensor& w) { w.nonzero(); }},
        ValueRead{"equal", "equal", [](const at::Tensor& w) { static_cast<void>(w.equal(w + 1)); }},
        ValueRead{"masked_select", "masked_select",
                  [](const at::Tensor& w) { w.masked_select(w > 0); }},
        ValueRead{"unique", "unique", [](const at::Tensor& w) { at::_unique2(w); }},
        ValueRead{"boolean_index", "index", [](const at::Tensor& w) { w.index({w > 0}); }}),
    [](const auto& param_info) { return param_info.param.name; });

TEST(WatcherAfterThePass, StaleTensorsSayThatThePassHasEnded) {
  at::Tensor p = at::zeros({6});
  TracedLoader loader({{"w", {6}, at::kFloat}}, {{"p", p}});
  loader.Begin();
  const at::Tensor w = loader["w"];
  const at::Tensor made = w.clone();
  ASSERT_EQ(loader.End().kind, PassVerdict::kDone);
  const std::vector<std::function<void()>> uses = {
      [&] { w.add(1); },        [&] { p.copy_(w); },  [&] { w[0].item(); },
      [&] { w.clone(); },       [&] { w.zero_(); },   [&] { w.to(at::kHalf); },
      [&] { at::cat({w, w}); }, [&] { made.exp(); },  [&] { at::empty_like(w); },
      [&] { p.add_(w); },       [&] { w.nonzero(); }, [&] { w.sum(); }};
  for (std::size_t i = 0; i < uses.size(); ++i)
    EXPECT_THAT(ErrorOf(uses[i]), HasSubstr("pass")) << "use " << i;
  EXPECT_EQ(w.narrow(0, 2, 2).storage_offset(), 2);  // geometry needs no pass
  EXPECT_EQ(p.sum().item<float>(), 0);
  loader.Begin();
  EXPECT_THAT(ErrorOf([&] { p.copy_(w); }),
              HasSubstr("a trace tensor of an earlier pass is used: the loader kept it from one "
                        "call of load_weights to the next"));
}

TEST(WatcherAfterThePass, TheDeviceHasNoMemoryOfItsOwn) {
  EXPECT_THAT(ErrorOf([] { at::empty({2}, at::TensorOptions(kTrace)); }),
              HasSubstr("tensors can be made on it only while a pass runs"));
  EXPECT_THAT(ErrorOf([] { at::ones({2}).to(kTrace); }), Not(IsEmpty()));
}

TEST_F(Watcher, TensorsPutTogetherFromAStorage) {
  const at::Tensor w = loader_["w"];
  const at::Tensor twin = at::empty({0}, w.options()).set_(w.storage(), 2, {2, 2}, {2, 1});
  EXPECT_EQ(twin.storage_offset(), 2);
  p_.narrow(0, 0, 4).view({2, 2}).copy_(twin);
  ASSERT_EQ(loader_.End().kind, PassVerdict::kDone);
  EXPECT_EQ(EntryOf(**loader_.Plan(), "w").kind, EntryKind::kDirect);
}

TEST_F(Watcher, DataPointersOfTraceTensorsNameTheTensor) {
  EXPECT_THAT(ErrorOf([&] { loader_["w"].data_ptr(); }), HasSubstr("checkpoint tensor `w`"));
  EXPECT_THAT(ErrorOf([&] { loader_["w"].const_data_ptr(); }), HasSubstr("checkpoint tensor `w`"));
  EXPECT_THAT(ErrorOf([&] { (loader_["w"] + 1).data_ptr(); }),
              HasSubstr("a tensor computed from checkpoint tensors"));
}

}  // namespace
}  // namespace loadplan::testing
