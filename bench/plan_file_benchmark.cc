// A plan into a file and out of it. Saving reads what was written back, as `plan.save` does.
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/cases.h"
#include "benchmark/benchmark.h"
#include "plan/plan_file.h"
#include "tests/testing/plan_files.h"

namespace loadplan::bench {
namespace {

std::optional<PlanFile> MakeFile(const K2Case& k2) {
  const BuildInput input = MakeK2(k2);
  absl::StatusOr<LoadPlan> plan = BuildLoadPlan(input);
  if (!plan.ok() || plan->sources().size() != k2.num_names()) return std::nullopt;
  PlanExtras extras = testing::ExtrasFor(*plan, input.log);
  return PlanFile{*std::move(plan), std::move(extras)};
}

// One for each process: several may run.
const std::string& Path() {
  static const std::string path =
      (std::filesystem::temp_directory_path() / absl::StrCat("bench-", getpid(), ".loadplan"))
          .string();
  return path;
}

bool Save(const PlanFile& file, const std::string& path) {
  const absl::StatusOr<std::string> bytes = EncodePlanFile(file.plan, file.extras);
  if (!bytes.ok() || !DecodePlanFile(*bytes, testing::KnownDType).ok()) return false;
  std::ofstream out(path, std::ios::binary);
  out << *bytes;
  return static_cast<bool>(out.flush());
}

std::string Read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

void Saving(benchmark::State& state, const K2Case& k2) {
  const std::optional<PlanFile> file = MakeFile(k2);
  if (!file.has_value()) return state.SkipWithError("no plan");
  for (auto _ : state) {
    if (!Save(*file, Path())) return state.SkipWithError("not saved");
  }
  state.counters["names"] = static_cast<double>(file->plan.sources().size());
  state.counters["MB"] = static_cast<double>(Read(Path()).size()) / 1e6;
  std::remove(Path().c_str());
}

void Loading(benchmark::State& state, const K2Case& k2) {
  const std::optional<PlanFile> file = MakeFile(k2);
  if (!file.has_value() || !Save(*file, Path())) return state.SkipWithError("no plan");
  for (auto _ : state) {
    const auto again = DecodePlanFile(Read(Path()), testing::KnownDType);
    if (!again.ok() || again->plan.writes().size() != file->plan.writes().size()) {
      return state.SkipWithError("not the plan that was saved");
    }
  }
  state.counters["names"] = static_cast<double>(file->plan.sources().size());
  std::remove(Path().c_str());
}

void BM_SavePlanK2TP8(benchmark::State& state) {
  Saving(state, {.layers = static_cast<int>(state.range(0))});
}
BENCHMARK(BM_SavePlanK2TP8)->ArgName("layers")->Arg(61)->Arg(4 * 61)->Unit(benchmark::kMillisecond);

void BM_LoadPlanK2TP8(benchmark::State& state) {
  Loading(state, {.layers = static_cast<int>(state.range(0))});
}
BENCHMARK(BM_LoadPlanK2TP8)->ArgName("layers")->Arg(61)->Arg(4 * 61)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace loadplan::bench

BENCHMARK_MAIN();
