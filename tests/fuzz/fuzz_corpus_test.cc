// What the fuzzers begin with and what they once found, through the same functions.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "plan/plan_file.h"
#include "tests/fuzz/fuzz_targets.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/plan_files.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"

namespace loadplan::testing {
namespace {

const std::filesystem::path kCorpus = LOADPLAN_CORPUS;

std::vector<std::filesystem::path> FilesOf(const std::string& target) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(kCorpus / target)) {
    files.push_back(entry.path());
  }
  std::ranges::sort(files);
  return files;
}

std::string ContentOf(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Seeds: small plans of each kind of content. LOADPLAN_WRITE_CORPUS=1 writes them anew where the
// format has changed.
struct Seed {
  std::string name;
  std::function<void(LogBuilder&)> records;
};

const std::vector<Seed> kSeeds = {
    {"direct.loadplan",
     [](LogBuilder& log) {
       const View w = log.Source("w", {4, 3}, kFloat32);
       log.Copy(log.Target("p", {2, 3}, kFloat32), w.Slice(0, 1, 3));
       log.Source("unneeded", {5}, kFloat16);
     }},
    {"cast_and_constant.loadplan",
     [](LogBuilder& log) {
       const View p = log.Target("p", {4, 3}, kFloat32);
       log.Alias("p.tied", p);
       log.Copy(p.Slice(0, 0, 2), log.Source("w", {2, 3}, kBFloat16));
       log.Copy(p.Slice(0, 2, 4), log.Constant(0, {2, 3}, kFloat32));
     }},
    {"programs_and_live_bytes.loadplan",
     [](LogBuilder& log) {
       const View v = log.Target("v", {6}, kFloat32);
       const View u = log.Target("u", {6}, kFloat32);
       const View a = log.Source("a", {6}, kFloat32);
       const View sum = log.Node("aten::add.Tensor", {a, log.Source("b", {6}, kFloat32), u}, {6});
       log.Copy(v, log.Node("aten::neg", {sum}, {6}));
       log.Copy(log.Target("t", {6}, kFloat32), log.Target("s", {6}, kFloat32));
     }},
    {"overlap_and_fallback.loadplan", [](LogBuilder& log) {
       const View p = log.Target("p", {6});
       log.Copy(p.Slice(0, 0, 4), log.Source("a", {4}));
       log.Copy(p.Slice(0, 2, 6), log.Source("b", {4}));
       log.Copy(log.Target("q", {2, 3}), log.Source("c", {3, 2}).Transpose(0, 1));
     }}};

TEST(FuzzCorpusTest, SeedsAreReadByThisVersion) {
  for (const Seed& seed : kSeeds) {
    const std::filesystem::path path = kCorpus / "plan_file" / seed.name;
    if (std::getenv("LOADPLAN_WRITE_CORPUS") != nullptr) {
      LogBuilder log;
      seed.records(log);
      const absl::StatusOr<LoadPlan> plan = log.Build();
      ASSERT_THAT(plan, IsOk());
      std::ofstream(path, std::ios::binary)
          << *EncodePlanFile(*plan, ExtrasFor(*plan, log.input().log));
    }
    EXPECT_THAT(DecodePlanFile(ContentOf(path), KnownDType), IsOk()) << seed.name;
  }
}

TEST(FuzzCorpusTest, PlanFilesOfTheCorpusReturn) {
  for (const auto& path : FilesOf("plan_file")) {
    SCOPED_TRACE(path.string());
    FuzzPlanFile(ContentOf(path));
  }
}

TEST(FuzzCorpusTest, SafetensorsHeadersOfTheCorpusReturn) {
  ASSERT_FALSE(FilesOf("safetensors_header").empty());
  for (const auto& path : FilesOf("safetensors_header")) {
    SCOPED_TRACE(path.string());
    FuzzSafetensorsHeader(ContentOf(path));
  }
}

// Short walks of the fuzzers in every test run.
void Walk(const std::string& target, int count, void (*fuzz)(std::string_view)) {
  std::vector<std::string> seeds;
  for (const auto& path : FilesOf(target)) seeds.push_back(ContentOf(path));
  ASSERT_FALSE(seeds.empty());
  ForEachRandom(count, [&](std::mt19937& generator) {
    std::string bytes = seeds[generator() % seeds.size()];
    for (auto left = 1 + generator() % 4; left > 0 && !bytes.empty(); --left) {
      const std::size_t at = generator() % bytes.size();
      switch (generator() % 3) {
        case 0:
          bytes[at] = static_cast<char>(generator());
          break;
        case 1:
          bytes.insert(at, 1, static_cast<char>(generator() % 8));
          break;
        default:
          bytes.erase(at, 1);
      }
    }
    fuzz(bytes);
  });
}

TEST(FuzzCorpusPropertyTest, DamagedPlanFilesReturn) { Walk("plan_file", 10000, FuzzPlanFile); }
TEST(FuzzCorpusPropertyTest, DamagedSafetensorsHeadersReturn) {
  Walk("safetensors_header", 10000, FuzzSafetensorsHeader);
}

}  // namespace
}  // namespace loadplan::testing
