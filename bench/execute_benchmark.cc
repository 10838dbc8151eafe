// What landing a bucket by plan costs beside the copies that the loader itself would make.
//
// One expert layer shaped like Kimi-K2's at an eighth of its width: w13 and w2 of 8 experts,
// bf16, row- and column-parallel over 8 ranks. Bytes are those that a rank keeps; the views of
// the rival are made outside the loop. One thread: with more the rival waits for the slowest.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "backend/convert.h"
#include "lifecycle/execute.h"
#include "tests/testing/log_builder.h"

namespace loadplan {
namespace {

constexpr Index kExperts = 8;
constexpr Index kHidden = 7168 / 8;
constexpr Index kWidth = 2048;
constexpr Index kRanks = 8;
constexpr Index kShard = kWidth / kRanks;
constexpr Index kRank = 1;

struct Copy {
  at::Tensor to;
  at::Tensor from;
};

class Layer {
 public:
  Layer() {
    const testing::View w13 = Target("w13", {kExperts, 2 * kShard, kHidden});
    const testing::View w2 = Target("w2", {kExperts, kHidden, kShard});
    for (Index e = 0; e < kExperts; ++e) {
      for (const Index half : {0, 1}) {
        const testing::View source = Source(absl::StrCat(e, ".", half), {kWidth, kHidden});
        Record(w13.Select(0, e).Slice(0, half * kShard, (half + 1) * kShard),
               source.Slice(0, kRank * kShard, (kRank + 1) * kShard));
      }
      Record(w2.Select(0, e), Source(absl::StrCat(e, ".down"), {kHidden, kWidth})
                                  .Slice(1, kRank * kShard, (kRank + 1) * kShard));
    }
    auto traced = std::make_shared<TracedPlan>();
    traced->plan = *log_.Build();
    traced_ = std::move(traced);
    targets_ = std::make_shared<const TargetSet>(*TargetSet::Create(live_));
  }

  const std::vector<Copy>& copies() const { return copies_; }
  void CopyEach() const {
    for (const Copy& copy : copies_) copy.to.copy_(copy.from);
  }
  // By plan; false where something failed.
  bool Update() const {
    PlanExecutor executor(traced_, targets_);
    if (!executor.Begin().ok()) return false;
    for (std::size_t n = 0; n < sources_.size(); ++n) {
      if (!executor.Deliver(static_cast<std::int32_t>(n), sources_[n]).ok()) return false;
    }
    return executor.Finish().ok() && executor.written_nbytes() == nbytes();
  }
  void Clear() const {
    for (const LiveTarget& target : live_) target.tensor.zero_();
  }
  bool IsLoaded() const {
    for (const Copy& copy : copies_) {
      if (!at::equal(copy.to, copy.from)) return false;
    }
    return true;
  }
  Index nbytes() const {
    return static_cast<Index>(live_[0].tensor.nbytes() + live_[1].tensor.nbytes());
  }

 private:
  // Targets first: their storage ids are those of the TargetSet.
  testing::View Target(const std::string& name, const DimVector& shape) {
    live_.push_back({name, at::zeros(at::IntArrayRef(shape.data(), shape.size()), at::kBFloat16)});
    storages_.push_back(live_.back().tensor);
    return log_.Target(name, shape, testing::kBFloat16);
  }
  testing::View Source(const std::string& name, const DimVector& shape) {
    sources_.push_back(at::randn(at::IntArrayRef(shape.data(), shape.size()), at::kBFloat16));
    storages_.push_back(sources_.back());
    return log_.Source(name, shape, testing::kBFloat16);
  }
  at::Tensor Show(const testing::View& view) const {
    const DimVector& shape = view.layout.shape();
    DimVector strides = view.layout.byte_strides();
    for (Index& stride : strides) stride /= view.layout.itemsize();
    return storages_[static_cast<std::size_t>(view.storage)].as_strided(
        {shape.data(), shape.size()}, {strides.data(), strides.size()},
        view.layout.byte_offset() / view.layout.itemsize());
  }
  void Record(const testing::View& to, const testing::View& from) {
    log_.Copy(to, from);
    copies_.push_back({Show(to), Show(from)});
  }

  testing::LogBuilder log_;
  std::vector<LiveTarget> live_;
  std::vector<at::Tensor> sources_;
  std::vector<at::Tensor> storages_;  // by StorageId
  std::vector<Copy> copies_;
  std::shared_ptr<const TracedPlan> traced_;
  std::shared_ptr<const TargetSet> targets_;
};

const Layer& TheLayer() {
  at::set_num_threads(1);
  static const Layer* const layer = new Layer;
  return *layer;
}

void BM_ExecutePlanK2LayerTP8(benchmark::State& state) {
  const Layer& layer = TheLayer();
  layer.Clear();
  if (!layer.Update() || !layer.IsLoaded()) return state.SkipWithError("not the loader's bytes");
  for (auto _ : state) benchmark::DoNotOptimize(layer.Update());
  state.SetBytesProcessed(state.iterations() * layer.nbytes());
}
BENCHMARK(BM_ExecutePlanK2LayerTP8)->Unit(benchmark::kMillisecond);

// The rival: one `copy_` per record.
void BM_CopyEachK2LayerTP8(benchmark::State& state) {
  const Layer& layer = TheLayer();
  layer.Clear();
  layer.CopyEach();
  if (!layer.IsLoaded()) return state.SkipWithError("not the loader's bytes");
  for (auto _ : state) layer.CopyEach();
  state.SetBytesProcessed(state.iterations() * layer.nbytes());
}
BENCHMARK(BM_CopyEachK2LayerTP8)->Unit(benchmark::kMillisecond);

// What the host does for each write of a batch: 1152 names, as a layer of Kimi-K2 has, tiny ones,
// on a device that does nothing. Items are writes.
const CopyEngine kIdle = {kCopyEngineLayout, [](void*) { return false; },
                          [](const CopyBatch&, void*) -> const char* { return nullptr; },
                          [](const SmallCopyBatch&, void*) -> const char* { return nullptr; }};

void BM_QueueWrites(benchmark::State& state) {
  constexpr int kNames = 1152;
  testing::LogBuilder log;
  const testing::View target = log.Target("w", {kNames, 4, 4}, testing::kBFloat16);
  std::vector<at::Tensor> sources;
  for (int name = 0; name < kNames; ++name) {
    log.Copy(target.Select(0, name),
             log.Source(absl::StrCat(name), {4, 32}, testing::kBFloat16).Slice(1, 4, 8));
    sources.push_back(at::zeros({4, 32}, at::kBFloat16));
  }
  const at::Tensor live = at::zeros({kNames, 4, 4}, at::kBFloat16);
  auto traced = std::make_shared<TracedPlan>();
  traced->plan = *log.Build();
  const auto targets = std::make_shared<const TargetSet>(*TargetSet::Create({{"w", live}}));
  DevicePlanCache cache;
  Index queued = 0;
  for (auto _ : state) {
    PlanExecutor executor(traced, targets);
    executor.BatchOn({&kIdle}, cache.Get(traced->plan, *targets, {&kIdle}));
    (void)executor.Begin();
    for (int name = 0; name < kNames; ++name) {
      (void)executor.Deliver(name, sources[static_cast<std::size_t>(name)]);
    }
    (void)executor.Finish();
    queued += executor.queue()->num_copies();
  }
  if (queued != state.iterations() * kNames) state.SkipWithError("not every write was queued");
  state.SetItemsProcessed(queued);
}
BENCHMARK(BM_QueueWrites)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace loadplan
