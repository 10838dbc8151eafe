// The random-loader differential test: what a plan leaves in live memory is, byte for byte,
// what the loader would have left there.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/differential/differential.h"
#include "tests/testing/seed.h"

namespace loadplan::testing {
namespace {

int FromEnvironment(const char* name, int otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : std::stoi(value);
}

// Reasons that differ in names and numbers only are one line.
std::string Folded(const std::string& text) {
  std::string folded;
  for (const char c : text) {
    const bool digit = c >= '0' && c <= '9';
    if (digit && !folded.empty() && folded.back() == '#') continue;
    folded.push_back(digit ? '#' : c);
    if (c == '\n' || folded.size() > 150) break;
  }
  return folded;
}

struct Tally {
  std::map<Outcome::Kind, int> kinds;
  std::map<std::string, int> reasons;
  std::int64_t names = 0;
  std::int64_t direct = 0;
  std::int64_t derived = 0;
  std::int64_t from_file = 0;
  std::int64_t on_meta = 0;

  void Add(const Outcome& outcome) {
    ++kinds[outcome.kind];
    if (!outcome.detail.empty())
      ++reasons[(outcome.kind == Outcome::kRefused ? "refused: " : "fallback: ") +
                Folded(outcome.detail)];
    if (outcome.kind != Outcome::kPlanned) return;
    from_file += outcome.from_file;
    on_meta += outcome.on_meta;
    names += outcome.num_names;
    direct += outcome.num_direct;
    derived += outcome.num_derived;
  }
  void Print(int count, double seconds) const {
    const auto of = [this](Outcome::Kind kind) {
      const auto found = kinds.find(kind);
      return found == kinds.end() ? 0 : found->second;
    };
    std::cout << count << " programs in " << seconds << " s: " << of(Outcome::kPlanned)
              << " by plan (" << names << " names, " << direct << " direct, " << derived
              << " derived; " << from_file << " from files, " << on_meta
              << " traced over meta targets), " << of(Outcome::kFallback) << " with fallbacks, "
              << of(Outcome::kRefused) << " refused, " << of(Outcome::kInvalid) << " invalid\n";
    std::multimap<int, std::string, std::greater<>> ranked;
    for (const auto& [reason, times] : reasons) ranked.emplace(times, reason);
    int left = FromEnvironment("LOADPLAN_REASONS", 6);
    for (const auto& [times, reason] : ranked) {
      if (left-- == 0) break;
      std::cout << "  " << times << " x " << reason << "\n";
    }
  }
};

struct Drawn {
  Program program;
  OverlapPolicy overlaps;
  std::uint64_t values;
};

Drawn Draw(std::uint64_t seed, int index) {
  std::seed_seq sequence{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32),
                         static_cast<std::uint32_t>(index)};
  std::mt19937 gen(sequence);
  Drawn drawn;
  drawn.overlaps = gen() % 2 == 0 ? OverlapPolicy::kFallback : OverlapPolicy::kLastWins;
  drawn.values = gen();
  drawn.program = GenerateProgram(gen);
  return drawn;
}

class RandomLoader : public ::testing::Test {
 protected:
  RandomLoader() { at::set_num_threads(1); }
};

TEST_F(RandomLoader, PlanLeavesWhatTheLoaderLeaves) {
  const std::uint64_t seed = TestSeed();
  const int first = FromEnvironment("LOADPLAN_FIRST_PROGRAM", 0);
  const int count = FromEnvironment("LOADPLAN_PROGRAMS", 20000);
  const auto start = std::chrono::steady_clock::now();
  Tally tally;
  for (int i = first; i < first + count; ++i) {
    const Drawn drawn = Draw(seed, i);
    const Outcome outcome = RunBothWays(drawn.program, drawn.overlaps, drawn.values);
    tally.Add(outcome);
    if (outcome.kind != Outcome::kFailed) continue;
    const Program small = Shrink(drawn.program, drawn.overlaps, drawn.values);
    ADD_FAILURE() << RunBothWays(small, drawn.overlaps, drawn.values).detail << "\n"
                  << Format(small) << FormatCode(small) << ", OverlapPolicy::"
                  << (drawn.overlaps == OverlapPolicy::kFallback ? "kFallback" : "kLastWins")
                  << ", " << drawn.values << "\n"
                  << "replay: LOADPLAN_FIRST_PROGRAM=" << i << " LOADPLAN_PROGRAMS=1 "
                  << ReplayHint(seed).substr(8);
    break;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  tally.Print(count, seconds.count());
  EXPECT_LE(tally.kinds[Outcome::kRefused] * 10, count) << "more than a tenth is refused";
  EXPECT_GE(tally.from_file * 3, tally.kinds[Outcome::kPlanned] - 30) << "few plans can be saved";
  EXPECT_GE(tally.on_meta * 12, tally.kinds[Outcome::kPlanned] - 120) << "few are traced over meta";
  EXPECT_EQ(tally.kinds[Outcome::kInvalid], 0) << "the generator makes programs that eager refuses";
}

}  // namespace
}  // namespace loadplan::testing
