// What a traced operator costs beside the same operator on meta and CPU tensors.
//
// One item is one `copy_(dst, w.narrow().narrow().narrow())`, the shape of an expert loader; an
// unrelated `add` and a real `copy_` show what tracing costs the rest of the process. Cost of
// recording is included, that of building a plan is not.
#include <ATen/ATen.h>
#include <benchmark/benchmark.h>

#include <memory>

#include "backend/tracer.h"

namespace loadplan {
namespace {

// A pass is ended and begun again after this many copies, so that the log stays small.
constexpr int kCopiesPerPass = 4096;

void NarrowAndCopy(const at::Tensor& to, const at::Tensor& w) {
  to.copy_(w.narrow(0, 8, 32).narrow(1, 4, 16).narrow(0, 4, 16));
}

struct Traced {
  explicit Traced(const at::Tensor& target) {
    auto targets = std::make_shared<const TargetSet>(*TargetSet::Create({{"p", target}}));
    tracer = *Tracer::Create({{"w", {64, 32}, at::kFloat}}, targets);
    Begin();
  }
  ~Traced() { tracer->AbandonPass(); }
  void Begin() { static_cast<void>(tracer->BeginPass()); }
  void Renew() {
    tracer->AbandonPass();
    Begin();
  }
  const at::Tensor& w() const { return tracer->pass().front().tensor; }

  std::unique_ptr<Tracer> tracer;
};

void RunPlain(benchmark::State& state, at::Device device) {
  const at::Tensor w = at::zeros({64, 32}, device);
  const at::Tensor p = at::zeros({16, 16}, device);
  for (auto _ : state) NarrowAndCopy(p, w);
  state.SetItemsProcessed(state.iterations());
}

void BM_NarrowCopyMeta(benchmark::State& state) { RunPlain(state, at::kMeta); }
BENCHMARK(BM_NarrowCopyMeta);
void BM_NarrowCopyCpu(benchmark::State& state) { RunPlain(state, at::kCPU); }
BENCHMARK(BM_NarrowCopyCpu);

void RunTraced(benchmark::State& state, at::Device target) {
  const at::Tensor p = at::zeros({16, 16}, target);
  Traced traced(p);
  int copies = 0;
  for (auto _ : state) {
    NarrowAndCopy(p, traced.w());
    if (++copies % kCopiesPerPass == 0) {
      state.PauseTiming();
      traced.Renew();
      state.ResumeTiming();
    }
  }
  state.SetItemsProcessed(state.iterations());
}

void BM_NarrowCopyTraceToMeta(benchmark::State& state) { RunTraced(state, at::kMeta); }
BENCHMARK(BM_NarrowCopyTraceToMeta);
void BM_NarrowCopyTraceToCpu(benchmark::State& state) { RunTraced(state, at::kCPU); }
BENCHMARK(BM_NarrowCopyTraceToCpu);

// range(0): whether a pass is active.
void BM_UnrelatedAdd(benchmark::State& state) {
  const at::Tensor a = at::ones({16});
  std::unique_ptr<Traced> traced;
  if (state.range(0) != 0) traced = std::make_unique<Traced>(at::zeros({16, 16}));
  for (auto _ : state) benchmark::DoNotOptimize(a.add(a));
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(BM_UnrelatedAdd)->ArgName("traced")->Arg(0)->Arg(1);

void BM_UnrelatedCopy(benchmark::State& state) {
  const at::Tensor a = at::ones({16});
  const at::Tensor b = at::ones({16});
  std::unique_ptr<Traced> traced;
  if (state.range(0) != 0) traced = std::make_unique<Traced>(at::zeros({16, 16}));
  for (auto _ : state) b.copy_(a);
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(BM_UnrelatedCopy)->ArgName("traced")->Arg(0)->Arg(1);

}  // namespace
}  // namespace loadplan
