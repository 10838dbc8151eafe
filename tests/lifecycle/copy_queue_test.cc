#include "lifecycle/copy_queue.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lifecycle/execute.h"
#include "lifecycle/host_copies.h"
#include "lifecycle/reference_copies.h"
#include "tests/lifecycle/live_log.h"
#include "tests/lifecycle/random_log.h"
#include "tests/testing/oracle.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using ::loadplan::testing::ForEachRandom;
using ::loadplan::testing::IsOk;
using ::loadplan::testing::kBFloat16;
using ::loadplan::testing::kFloat32;
using ::loadplan::testing::LiveLog;
using ::loadplan::testing::Map;
using ::loadplan::testing::RandomLog;
using ::loadplan::testing::StatusIs;
using ::loadplan::testing::View;
using ::testing::AllOf;
using ::testing::HasSubstr;

void BatchOn(PlanExecutor& executor, const BoundPlan& bound,
             const CopyEngine& engine = ReferenceCopyEngine(), bool is_for_many = false) {
  const CopyDevice device{&engine, at::kCPU, is_for_many};
  executor.BatchOn(device, bound.on_device.Get(bound.plan(), *bound.targets, device));
}

// An update in which copies wait until a sender wants its buffer back, or the end.
void RunRandomLog(std::mt19937& gen, bool on_host, int& planned, Index& batched) {
  RandomLog log(gen);
  const auto bound = log.Bind();
  if (bound == nullptr) return;
  ++planned;
  PlanExecutor executor(bound->traced, bound->targets);
  BatchOn(executor, *bound, on_host ? HostCopyEngine() : ReferenceCopyEngine(), on_host);
  ASSERT_THAT(executor.Begin(), IsOk());
  executor.BeginBatch();
  std::vector<std::int32_t> order = {0, 1, 2};
  std::shuffle(order.begin(), order.end(), gen);
  for (const std::int32_t source : order) {
    at::Tensor buffer = log.weights()[static_cast<std::size_t>(source)].clone();
    ASSERT_THAT(executor.Deliver(source, buffer), IsOk());
    if (gen() % 2 == 0) continue;
    ASSERT_THAT(executor.Flush(), IsOk());
    buffer.fill_(-1);
    executor.BeginBatch();
  }
  ASSERT_THAT(executor.Finish(), IsOk());
  batched += executor.queue()->num_copies();
  log.ExpectLeftAsRecorded();
}

TEST(CopyQueuePropertyTest, LeavesWhatTheRecordsLeave) {
  for (const bool on_host : {false, true}) {
    int planned = 0;
    Index batched = 0;
    ForEachRandom(1000, [&](std::mt19937& gen) { RunRandomLog(gen, on_host, planned, batched); });
    EXPECT_GT(planned, 500);
    EXPECT_GT(batched, 500);
  }
}

// `num_names` targets `w0`... of 2x3, each from columns of its own source.
class CopyQueueTest : public ::testing::Test {
 protected:
  void Make(int num_names) {
    std::vector<View> targets;
    for (int i = 0; i < num_names; ++i)
      targets.push_back(log_.Target(absl::StrCat("w", i), {2, 3}));
    for (int i = 0; i < num_names; ++i) {
      log_.Copy(targets[static_cast<std::size_t>(i)],
                log_.Source(absl::StrCat("x", i), {2, 8}).Slice(1, 2, 5));
      weights_.push_back(at::randn({2, 8}));
    }
    Bind();
  }
  void Bind(const CopyEngine& engine = ReferenceCopyEngine()) {
    bound_ = log_.Bind().value();
    executor_.emplace(bound_->traced, bound_->targets);
    BatchOn(*executor_, *bound_, engine);
    ASSERT_THAT(executor_->Begin(), IsOk());
  }
  absl::Status DeliverAll() {
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      absl::Status status = executor_->Deliver(static_cast<std::int32_t>(i), weights_[i]);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  bool IsLanded(std::size_t i) const {
    return at::equal(log_.target(i), weights_[i].slice(1, 2, 5));
  }
  Index num_batches() const { return executor_->queue()->num_batches(); }
  Index num_copies() const { return executor_->queue()->num_copies(); }

  LiveLog log_;
  std::vector<at::Tensor> weights_;
  std::shared_ptr<const BoundPlan> bound_;
  std::optional<PlanExecutor> executor_;
};

TEST_F(CopyQueueTest, StartsNothingBeforeItIsFlushed) {
  // As an argument of the kernel, and through memory of the device.
  for (const int num_names : {3, 40}) {
    log_ = LiveLog();
    weights_.clear();
    Make(num_names);
    ASSERT_THAT(DeliverAll(), IsOk());
    EXPECT_EQ(num_batches(), 0);
    EXPECT_TRUE(at::equal(log_.target(0), at::full({2, 3}, 77.f)));
    ASSERT_THAT(executor_->Flush(), IsOk());
    EXPECT_EQ(num_batches(), 1);
    EXPECT_EQ(num_copies(), num_names);
    for (std::size_t i = 0; i < weights_.size(); ++i) EXPECT_TRUE(IsLanded(i)) << i;
    ASSERT_THAT(executor_->Finish(), IsOk());
    EXPECT_EQ(num_batches(), 1);
  }
}

TEST_F(CopyQueueTest, KeepsSourcesThatTheSenderLetsGo) {
  Make(2);
  const std::vector<at::Tensor> want = {weights_[0].clone(), weights_[1].clone()};
  for (std::int32_t i = 0; i < 2; ++i) {
    ASSERT_THAT(executor_->Deliver(i, std::move(weights_[static_cast<std::size_t>(i)])), IsOk());
  }
  weights_ = want;
  const at::Tensor others = at::zeros({64, 16});  // what the memory would be given to
  ASSERT_THAT(executor_->Flush(), IsOk());
  EXPECT_TRUE(IsLanded(0) && IsLanded(1));
}

// `w` <- `x`; then `v` <- what arrives as `y`: `w` itself.
TEST_F(CopyQueueTest, CopiesLiveTensorsInTheOrderOfTheirArrival) {
  const View w = log_.Target("w", {4});
  const View v = log_.Target("v", {4});
  log_.Copy(w, log_.Source("x", {4}));
  log_.Copy(v, log_.Source("y", {4}));
  Bind();
  const at::Tensor x = at::randn({4});
  ASSERT_THAT(executor_->Deliver(0, x), IsOk());
  EXPECT_EQ(num_copies(), 1);
  ASSERT_THAT(executor_->Deliver(1, log_.target(0)), IsOk());
  EXPECT_EQ(num_batches(), 1);
  EXPECT_TRUE(at::equal(log_.target(1), x));
}

// The same where an operator reads what arrives as `y`.
TEST_F(CopyQueueTest, GathersLiveTensorsInTheOrderOfTheirArrival) {
  const View w = log_.Target("w", {4});
  const View v = log_.Target("v", {4});
  log_.Copy(w, log_.Source("x", {4}));
  const View y = log_.Source("y", {4});
  log_.Copy(v, log_.Multiply(y, y));
  Bind();
  const at::Tensor x = at::randn({4});
  ASSERT_THAT(executor_->Deliver(0, x), IsOk());
  ASSERT_THAT(executor_->Deliver(1, log_.target(0)), IsOk());
  ASSERT_THAT(executor_->Finish(), IsOk());
  EXPECT_TRUE(at::equal(log_.target(1), x * x));
}

// What comes alone is copied at once; what is not contiguous is not kept for the batch.
TEST_F(CopyQueueTest, OfTheHostWaitsForBatchesOnly) {
  Make(3);
  executor_.emplace(bound_->traced, bound_->targets);
  const CopyDevice host = *HostCopyDevice(*bound_->targets);
  executor_->BatchOn(host, bound_->on_device.Get(bound_->plan(), *bound_->targets, host));
  ASSERT_THAT(executor_->Begin(), IsOk());
  ASSERT_THAT(executor_->Deliver(0, weights_[0]), IsOk());
  EXPECT_TRUE(IsLanded(0));
  executor_->BeginBatch();
  ASSERT_THAT(executor_->Deliver(1, weights_[1]), IsOk());
  EXPECT_FALSE(IsLanded(1));
  ASSERT_THAT(executor_->Deliver(2, weights_[2].t().contiguous().t()), IsOk());
  EXPECT_TRUE(IsLanded(1) && IsLanded(2));
  ASSERT_THAT(executor_->Flush(), IsOk());
  EXPECT_EQ(num_copies(), 2);
}

// As parts, from bytes that a copy which waits has not written yet.
TEST_F(CopyQueueTest, ReadsPartsOfLiveTensorsInTheOrderOfTheirArrival) {
  const View w = log_.Target("w", {4});
  const View v = log_.Target("v", {4});
  const View u = log_.Target("u", {4}, kBFloat16);
  log_.Copy(w, log_.Source("x", {4}));
  const View y = log_.Source("y", {4});
  log_.Copy(v, log_.Multiply(y, y));
  log_.Copy(u, y);
  Bind();
  const at::Tensor x = at::randn({4});
  ASSERT_THAT(executor_->Deliver(0, x), IsOk());
  // Two parts: what is cast is kept until both are there.
  for (const Index start : {0, 8}) {
    const StridedMap held = Map({}, {start, {}, 8}, {start, {}, 8});
    ASSERT_THAT(executor_->DeliverPart(1, held, ByteSide::OfStorage(log_.target(0))), IsOk());
  }
  ASSERT_THAT(executor_->Complete(1), IsOk());
  ASSERT_THAT(executor_->Finish(), IsOk());
  EXPECT_TRUE(at::equal(log_.target(1), x * x));
  EXPECT_TRUE(at::equal(log_.target(2), x.to(at::kBFloat16)));
}

TEST_F(CopyQueueTest, LeavesCastsOfOtherBitsAndConstantsToCopy) {
  const View w = log_.Target("w", {4}, kBFloat16);
  const View v = log_.Target("v", {4});
  log_.Copy(w, log_.Source("x", {4}));
  log_.Copy(v.Slice(0, 0, 2), log_.Source("y", {2}));
  log_.Copy(v.Slice(0, 2, 4), log_.Constant(at::zeros({2})));
  Bind(HostCopyEngine());  // makes no casts
  const at::Tensor x = at::randn({4});
  ASSERT_THAT(executor_->Deliver(0, x), IsOk());
  EXPECT_EQ(num_copies(), 0);
  EXPECT_TRUE(at::equal(log_.target(0), x.to(at::kBFloat16)));
  ASSERT_THAT(executor_->Deliver(1, at::ones({2})), IsOk());
  EXPECT_EQ(num_copies(), 1);
  ASSERT_THAT(executor_->Finish(), IsOk());
  EXPECT_TRUE(at::equal(log_.target(1), at::tensor({1.f, 1.f, 0.f, 0.f})));
}

TEST_F(CopyQueueTest, MakesCastsThatAreTorchsInEveryBit) {
  constexpr DType kInt32{3, 4, "int32"};
  // As an argument of the kernel, and through memory of the device; copies among them.
  for (const int num_names : {3, 40}) {
    log_ = LiveLog();
    std::vector<View> targets;
    for (int i = 0; i < num_names; ++i) {
      targets.push_back(log_.Target(absl::StrCat("w", i), {2, 3}, i % 3 == 0 ? kInt32 : kFloat32));
    }
    for (int i = 0; i < num_names; ++i) {
      log_.Copy(targets[static_cast<std::size_t>(i)],
                log_.Source(absl::StrCat("x", i), {2, 8}, kInt32).Slice(1, 2, 5));
    }
    Bind();
    std::vector<at::Tensor> weights;
    for (std::int32_t i = 0; i < num_names; ++i) {
      weights.push_back(at::randint(-1000000, 1000000, {2, 8}, at::kInt));
      ASSERT_THAT(executor_->Deliver(i, weights.back()), IsOk());
    }
    EXPECT_EQ(num_copies(), num_names);
    EXPECT_EQ(num_batches(), 0);
    ASSERT_THAT(executor_->Finish(), IsOk());
    EXPECT_EQ(num_batches(), 1);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const at::Tensor want = weights[i].slice(1, 2, 5).to(log_.target(i).scalar_type());
      EXPECT_TRUE(at::equal(log_.target(i), want)) << i;
    }
  }
}

// A device would not load an item from there.
TEST_F(CopyQueueTest, LeavesCastsOfItemsThatAreNotAlignedToCopy) {
  constexpr DType kInt32{3, 4, "int32"};
  const View w = log_.Target("w", {4});
  log_.Copy(w, log_.Source("x", {4}, kInt32));
  Bind();
  const at::Tensor x = at::randint(-1000, 1000, {4}, at::kInt);
  const at::Tensor bytes = at::zeros({18}, at::kByte);
  bytes.slice(0, 2, 18).copy_(x.view(at::kByte));
  const StridedMap held = Map({}, {0, {}, 16}, {2, {}, 16});
  ASSERT_THAT(executor_->DeliverPart(0, held, ByteSide::OfStorage(bytes)), IsOk());
  ASSERT_THAT(executor_->Complete(0), IsOk());
  ASSERT_THAT(executor_->Finish(), IsOk());
  EXPECT_TRUE(at::equal(log_.target(0), x.to(at::kFloat)));
}

TEST_F(CopyQueueTest, RefusesToReachOutsideAStorage) {
  Make(1);
  EXPECT_THAT(executor_->Deliver(0, at::randn({2, 4})),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("reads bytes [8, 52) of a storage")));
  EXPECT_TRUE(executor_->queue()->empty());
}

// An engine that counts what it is asked, and does none of it.
struct Asked {
  inline static int batches = 0;
  inline static bool captures = false;
};
const CopyEngine kRefusing = {
    kCopyEngineLayout, [](void*) { return Asked::captures; },
    [](const CopyBatch&, void*) { return ++Asked::batches, "out of luck"; },
    [](const SmallCopyBatch&, void*) { return ++Asked::batches, "out of luck"; }};

TEST_F(CopyQueueTest, SaysWhatTheDeviceSays) {
  Make(20);
  Bind(kRefusing);
  Asked::batches = 0;
  Asked::captures = false;
  for (const std::int32_t name : {0, 1}) ASSERT_THAT(executor_->Deliver(name, weights_[0]), IsOk());
  const auto is_refused = StatusIs(absl::StatusCode::kInternal, HasSubstr("out of luck"));
  EXPECT_THAT(executor_->Flush(), is_refused);
  EXPECT_TRUE(executor_->queue()->empty());
  EXPECT_THAT(executor_->Flush(), IsOk());
  ASSERT_THAT(DeliverAll(), IsOk());
  EXPECT_THAT(executor_->Flush(), is_refused);
  EXPECT_EQ(Asked::batches, 2);
}

TEST_F(CopyQueueTest, StandsBackWhileTheStreamIsCaptured) {
  Make(2);
  Bind(kRefusing);
  Asked::captures = true;
  ASSERT_THAT(DeliverAll(), IsOk());
  Asked::captures = false;
  EXPECT_EQ(num_copies(), 0);
  EXPECT_TRUE(IsLanded(0) && IsLanded(1));
}

// ---------------------------------------------------------------- where batches are run
TEST_F(CopyQueueTest, LeavesStoragesOverOneMemoryToCopy) {
  const at::Tensor memory = at::zeros({12});
  const auto alias = [&](Index start, Index count) {
    return at::from_blob(memory.mutable_data_ptr<float>() + start, {count});
  };
  const auto targets =
      TargetSet::Create({{"a", alias(0, 8)}, {"b", alias(4, 4)}, {"c", alias(8, 4)}});
  Make(3);
  DevicePlanCache cache;
  const CopyDevice device{&ReferenceCopyEngine()};
  const auto plan = cache.Get(bound_->plan(), *targets, device);
  const auto start = reinterpret_cast<std::uint64_t>(memory.const_data_ptr());
  EXPECT_THAT(plan->copies.addresses(), ::testing::ElementsAre(0U, 0U, start + 32));
  EXPECT_EQ(plan->ranges.size(), 2U);
  // The same targets, the same plan.
  EXPECT_EQ(cache.Get(bound_->plan(), *targets, device), plan);
}

TEST_F(CopyQueueTest, SeparatesOnlyTheMemoryThatThePlanWrites) {
  const at::Tensor original = at::zeros({6});
  const at::Tensor written = at::_lazy_clone(original);
  const at::Tensor other = at::_lazy_clone(original);
  const auto targets = TargetSet::Create({{"w0", written}, {"other", other}});
  Make(1);
  DevicePlanCache cache;
  const auto plan = cache.Get(bound_->plan(), *targets, CopyDevice{&ReferenceCopyEngine()});
  const auto address_of = [](const at::Tensor& tensor) {
    return reinterpret_cast<std::uint64_t>(tensor.const_data_ptr());
  };
  EXPECT_THAT(plan->copies.addresses(), ::testing::ElementsAre(address_of(written), 0U));
  EXPECT_NE(address_of(written), address_of(original));
  EXPECT_EQ(address_of(other), address_of(original));
}

TEST_F(CopyQueueTest, IsAskedForByAVariable) {
  Make(1);
  for (const char* off : {"", "0"})
    EXPECT_FALSE(ChooseCopyDevice(*bound_->targets, off)->has_value());
  // No target is on a GPU: nothing is asked of the library.
  EXPECT_FALSE(ChooseCopyDevice(*bound_->targets, "1")->has_value());
  const auto reference = ChooseCopyDevice(*bound_->targets, "reference");
  ASSERT_TRUE(reference.ok() && reference->has_value());
  EXPECT_TRUE((*reference)->device.is_cpu());
  EXPECT_THAT(ChooseCopyDevice(*bound_->targets, "yes"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("LOADPLAN_CUDA_BATCH"), HasSubstr("`yes`"))));
}

TEST(CopyEngineTest, SaysWhyThereIsNone) {
  EXPECT_THAT(OpenCopyEngine("/nowhere/libloadplan_cuda.so"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/nowhere/libloadplan_cuda.so")));
  // Some other library.
  EXPECT_THAT(OpenCopyEngine("libc.so.6"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(kGetCopyEngine)));
}

TEST(CopyEngineTest, OpensTheLibraryWithoutAGpu) {
  const std::string path = LOADPLAN_CUDA_LIBRARY;
  if (path.empty()) GTEST_SKIP() << "libloadplan_cuda.so is not built: no nvcc";
  const absl::StatusOr<const CopyEngine*> engine = OpenCopyEngine(path);
  ASSERT_THAT(engine.status(), IsOk());
  EXPECT_NE((*engine)->run, nullptr);
  EXPECT_NE((*engine)->run_small, nullptr);
  EXPECT_NE((*engine)->is_capturing, nullptr);
}

}  // namespace
}  // namespace loadplan
