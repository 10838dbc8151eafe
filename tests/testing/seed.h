// Seeds of property tests: from LOADPLAN_TEST_SEED, or drawn anew each run.
#ifndef LOADPLAN_TESTS_TESTING_SEED_H_
#define LOADPLAN_TESTS_TESTING_SEED_H_

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>

#include "gtest/gtest.h"

namespace loadplan::testing {

// The seed of the running test. Failures inside a scope with ReplayHint print how to
// get it again.
inline std::uint64_t TestSeed() {
  if (const char* env = std::getenv("LOADPLAN_TEST_SEED")) return std::stoull(env);
  return std::random_device{}();
}

// The command that repeats the running test with `seed`.
inline std::string ReplayHint(std::uint64_t seed) {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  return "replay: LOADPLAN_TEST_SEED=" + std::to_string(seed) +
         " <test program> --gtest_filter=" + info->test_suite_name() + "." + info->name();
}

// Runs `body(generator)` `count` times, each with a generator of its own, and stops at the
// first failure. A replayed seed repeats all of them.
template <typename Body>
void ForEachRandom(int count, const Body& body) {
  const std::uint64_t seed = TestSeed();
  SCOPED_TRACE(ReplayHint(seed));
  for (int i = 0; i < count; ++i) {
    SCOPED_TRACE("iteration " + std::to_string(i));
    std::seed_seq sequence{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32),
                           static_cast<std::uint32_t>(i)};
    std::mt19937 generator(sequence);
    body(generator);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_TESTING_SEED_H_
