// From records to a plan. Memory is the peak above what the records themselves hold.
#include <malloc.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "bench/cases.h"
#include "benchmark/benchmark.h"
#include "geometry/strided_map.h"
#include "plan/load_plan_builder.h"

namespace loadplan::bench {
namespace {

// A field of /proc/self/status in bytes; 0 where there is none.
double StatusBytes(const char* field) {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.rfind(field, 0) == 0) return std::stod(line.substr(std::strlen(field) + 1)) * 1024;
  }
  return 0;
}

// From now on VmHWM counts from what is resident.
void ResetPeak() { std::ofstream("/proc/self/clear_refs") << "5"; }

void BuildPlan(benchmark::State& state, const K2Case& k2) {
  const BuildInput input = MakeK2(k2);
  if (input.sources.size() != k2.num_names()) {
    state.SkipWithError("not the number of names");
    return;
  }
  double growth = 0;
  for (auto _ : state) {
    state.PauseTiming();
    BuildInput copy = input;
    // A process plans once: no pages kept warm by the build before.
    malloc_trim(0);
    ResetPeak();
    const double before = StatusBytes("VmRSS");
    state.ResumeTiming();
    absl::StatusOr<LoadPlan> plan = BuildLoadPlan(std::move(copy));
    benchmark::DoNotOptimize(plan);
    state.PauseTiming();
    growth = std::max(growth, StatusBytes("VmHWM") - before);
    if (!plan.ok() || plan->has_fallbacks() || !plan->uncovered().empty() ||
        plan->writes().size() + (k2.is_zeroed_first ? 120 : 0) != input.log.copies.size()) {
      state.SkipWithError("not a complete plan");
    }
    plan = absl::UnknownError("freed");
    state.ResumeTiming();
  }
  state.SetItemsProcessed(state.iterations() * static_cast<Index>(input.sources.size()));
  state.counters["names"] = static_cast<double>(input.sources.size());
  state.counters["peak_growth_MB"] = growth / 1e6;
}

// 283,353 and 507,225 names: the time of a name has to stay what it is at 69,975.
constexpr int kFourTimes = 4 * 61;
constexpr int kHalfAMillion = 436;

void BM_BuildPlanK2TP8(benchmark::State& state) {
  BuildPlan(state, {.layers = static_cast<int>(state.range(0))});
}
BENCHMARK(BM_BuildPlanK2TP8)
    ->ArgName("layers")
    ->Arg(61)
    ->Arg(kFourTimes)
    ->Arg(kHalfAMillion)
    ->Unit(benchmark::kMillisecond);

void BM_BuildPlanK2EP8(benchmark::State& state) {
  BuildPlan(state, {.layers = static_cast<int>(state.range(0)), .is_expert_parallel = true});
}
BENCHMARK(BM_BuildPlanK2EP8)
    ->ArgName("layers")
    ->Arg(61)
    ->Arg(kFourTimes)
    ->Arg(kHalfAMillion)
    ->Unit(benchmark::kMillisecond);

void BM_BuildPlanK2TP8ZeroedFirst(benchmark::State& state) {
  BuildPlan(state, {.is_zeroed_first = true});
}
BENCHMARK(BM_BuildPlanK2TP8ZeroedFirst)->Unit(benchmark::kMillisecond);

// Report and exact boxes of every name, which a build does not compute.
void BM_ReportPlanK2TP8(benchmark::State& state) {
  absl::StatusOr<LoadPlan> plan = BuildLoadPlan(MakeK2({}));
  if (!plan.ok()) return state.SkipWithError("no plan");
  for (auto _ : state) benchmark::DoNotOptimize(plan->Report());
}
BENCHMARK(BM_ReportPlanK2TP8)->Unit(benchmark::kMillisecond);

// The rival: every write as byte runs, sorted, neighbours compared. One MoE layer
// (a 61st of the model) is what fits; see the time per name (inverse of items/s).
void BM_SortByteRunsK2TP8(benchmark::State& state) {
  const BuildInput input = MakeK2({.layers = static_cast<int>(state.range(0))});
  struct Run {
    StorageId storage;
    Index start;
    Index stop;
  };
  for (auto _ : state) {
    std::vector<Run> runs;
    for (const CopyRecord& copy : input.log.copies) {
      ForEachRun(copy.map, [&](Index to, Index, Index nbytes) {
        runs.push_back({copy.to, to, to + nbytes});
      });
    }
    std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) {
      return a.storage != b.storage ? a.storage < b.storage : a.start < b.start;
    });
    for (size_t i = 1; i < runs.size(); ++i) {
      if (runs[i].storage == runs[i - 1].storage && runs[i].start < runs[i - 1].stop) {
        state.SkipWithError("an overlap where none is");
      }
    }
    state.counters["runs"] = static_cast<double>(runs.size());
  }
  state.SetItemsProcessed(state.iterations() * static_cast<Index>(input.sources.size()));
  state.counters["names"] = static_cast<double>(input.sources.size());
}
BENCHMARK(BM_SortByteRunsK2TP8)->ArgName("layers")->Arg(2)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace loadplan::bench

BENCHMARK_MAIN();
