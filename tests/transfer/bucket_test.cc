#include "transfer/bucket.h"

#include <ATen/ATen.h>

#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/lifecycle/live_log.h"
#include "tests/lifecycle/no_memory.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using ::loadplan::testing::IsOk;
using ::loadplan::testing::kBFloat16;
using ::loadplan::testing::LiveLog;
using ::loadplan::testing::NoMemory;
using ::loadplan::testing::StatusIs;
using ::loadplan::testing::View;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// `w` <- columns of `x`; `v` <- `a * b`; `h` (bfloat16) <- `c`, cast; `empty`.
class BucketTest : public ::testing::Test {
 protected:
  void SetUp() override {
    log_.emplace();
    const View w = log_->Target("w", {3, 4});
    const View v = log_->Target("v", {3});
    const View h = log_->Target("h", {5}, kBFloat16);
    log_->Copy(w, log_->Source("x", {3, 8}).Slice(1, 2, 6));
    const View a = log_->Source("a", {3});
    log_->Copy(v, log_->Multiply(a, log_->Source("b", {3})));
    log_->Copy(h, log_->Source("c", {5}));
    log_->Source("empty", {0});
    plan_ = log_->Bind().value();
    session_.emplace();
    ASSERT_THAT(session_->Start({}), IsOk());
    ASSERT_THAT(session_->Begin(plan_, log_->live()), IsOk());
  }
  // The tensors, one behind the other, the first at `start`.
  void Pack(Index start) {
    items_.clear();
    buffer_ = at::full({300}, 9, at::kByte);
    Index offset = start;
    for (const auto& [name, tensor] : tensors_) {
      items_.push_back({name, tensor.sizes().vec(), tensor.scalar_type(), offset});
      if (tensor.numel() == 0) continue;
      std::memcpy(static_cast<char*>(buffer_.mutable_data_ptr()) + offset, tensor.const_data_ptr(),
                  tensor.nbytes());
      offset += static_cast<Index>(tensor.nbytes());
    }
  }
  void ExpectOldBytes() {
    EXPECT_TRUE(at::equal(log_->target(0), at::full({3, 4}, 77.f)));
    EXPECT_EQ(session_->report().state, SessionState::kFailed);
    EXPECT_TRUE(session_->report().undefined.empty());
  }

  std::optional<LiveLog> log_;
  std::shared_ptr<const BoundPlan> plan_;
  std::optional<ReloadSession> session_;
  const std::vector<std::pair<std::string, at::Tensor>> tensors_ = {{"x", at::randn({3, 8})},
                                                                    {"a", at::randn({3})},
                                                                    {"b", at::randn({3})},
                                                                    {"c", at::randn({5})},
                                                                    {"empty", at::randn({0})}};
  at::Tensor buffer_;
  std::vector<BucketItem> items_;
};

TEST_F(BucketTest, LandsTensorsAtAnyOffset) {
  for (const Index start : {0, 1, 2, 4, 8}) {
    SetUp();
    Pack(start);
    ASSERT_THAT(DeliverBucket(*session_, buffer_, items_), IsOk());
    buffer_.fill_(3);  // the sender reuses it
    ASSERT_THAT(session_->PrepareFinish(std::nullopt, log_->live()), IsOk());
    ASSERT_THAT(session_->Finish(), IsOk());
    EXPECT_TRUE(at::equal(log_->target(0), tensors_[0].second.slice(1, 2, 6)));
    EXPECT_TRUE(at::equal(log_->target(1), tensors_[1].second * tensors_[2].second));
    EXPECT_TRUE(at::equal(log_->target(2), tensors_[3].second.to(at::kBFloat16)));
  }
}

TEST_F(BucketTest, AViewOfALargerBufferServes) {
  Pack(3);
  const at::Tensor larger = at::cat({at::zeros({5}, at::kByte), buffer_});
  ASSERT_THAT(DeliverBucket(*session_, larger.slice(0, 5), items_), IsOk());
  EXPECT_TRUE(at::equal(log_->target(0), tensors_[0].second.slice(1, 2, 6)));
}

TEST_F(BucketTest, ChecksEveryItemBeforeAWrite) {
  Pack(0);
  items_.back() = {"c", {5}, at::kFloat, 281};
  EXPECT_THAT(DeliverBucket(*session_, buffer_, items_),
              StatusIs(kInvalid, HasSubstr("`c` has 20 bytes at offset 281 of a buffer of 300")));
  ExpectOldBytes();
  const std::vector<std::pair<BucketItem, std::string>> bad = {
      {{"c", {5}, at::kFloat, -1}, "`c` has 20 bytes at offset -1"},
      {{"c", {5, -1}, at::kFloat, 0}, "cannot be counted"},
      {{"c", {Index{1} << 62, 8}, at::kFloat, 0}, "cannot be counted"},
      {{"c", {4}, at::kFloat, 0}, "`c` arrived with shape [4], expected [5]"},
      {{"c", {5}, at::kInt, 0}, "`c` arrived as int32"},
      {{"y", {5}, at::kFloat, 0}, "`y` arrived but was not declared"},
      {{"x", {3, 8}, at::kFloat, 0}, "`x` arrived twice"}};
  for (const auto& [item, says] : bad) {
    SetUp();
    Pack(0);
    items_.pop_back();
    items_.back() = item;
    EXPECT_THAT(DeliverBucket(*session_, buffer_, items_), StatusIs(kInvalid, HasSubstr(says)));
    ExpectOldBytes();
  }
}

TEST_F(BucketTest, TheBufferHasToBeContiguousMemory) {
  for (const at::Tensor& buffer : {at::zeros({600}, at::kByte).slice(0, 0, 600, 2), at::Tensor(),
                                   at::empty({300}, at::TensorOptions().device(at::kMeta))}) {
    SetUp();
    EXPECT_THAT(DeliverBucket(*session_, buffer, items_),
                StatusIs(kInvalid, HasSubstr("must be a contiguous tensor")));
  }
}

// More copies than fit into the arguments of a kernel, and no memory to lay them out in.
TEST(BucketBatchTest, AnErrorAtTheEndOfTheBatchIsTheCalls) {
  const char* const before = std::getenv("LOADPLAN_CUDA_BATCH");
  const std::string value = before == nullptr ? "" : before;
  setenv("LOADPLAN_CUDA_BATCH", "reference", /*overwrite=*/1);
  LiveLog log;
  std::vector<BucketItem> items;
  std::vector<View> targets;
  constexpr Index kNames = 20;
  for (Index i = 0; i < kNames; ++i) targets.push_back(log.Target(absl::StrCat("w", i), {2}));
  for (Index i = 0; i < kNames; ++i) {
    const std::string name = absl::StrCat("x", i);
    log.Copy(targets[static_cast<std::size_t>(i)], log.Source(name, {2}));
    items.push_back({name, {2}, at::kFloat, 8 * i});
  }
  ReloadSession session;
  ASSERT_THAT(session.Start({}), IsOk());
  ASSERT_THAT(session.Begin(log.Bind().value(), log.live()), IsOk());
  setenv("LOADPLAN_CUDA_BATCH", value.c_str(), /*overwrite=*/1);
  const at::Tensor buffer = at::zeros({8 * kNames}, at::kByte);
  const NoMemory no_memory;
  EXPECT_THAT(DeliverBucket(session, buffer, items),
              StatusIs(absl::StatusCode::kInternal,
                       AllOf(HasSubstr("no memory for"),
                             HasSubstr("names that came last may not have landed"))));
  EXPECT_EQ(session.report().state, SessionState::kFailed);
}

// As a wrapper subclass arrives from Python: the key, and no memory.
at::Tensor Wrapper() {
  at::Tensor wrapper = at::detail::make_tensor<c10::TensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<std::uint8_t>(), at::kCPU);
  wrapper.unsafeGetTensorImpl()->set_python_dispatch(true);
  return wrapper;
}

TEST_F(BucketTest, TheBufferShowsWhatItsMemoryHolds) {
  const std::vector<std::pair<at::Tensor, std::string>> bad = {
      {Wrapper(), "is a tensor subclass that hides its memory"},
      {at::ones({75})._neg_view(), "is a lazily negated or conjugated view"},
      {at::zeros({38}, at::kComplexFloat).conj(), "is a lazily negated or conjugated view"}};
  for (const auto& [buffer, says] : bad) {
    SetUp();
    Pack(0);
    EXPECT_THAT(DeliverBucket(*session_, buffer, items_), StatusIs(kInvalid, HasSubstr(says)));
    ExpectOldBytes();
  }
}

}  // namespace
}  // namespace loadplan
