// Random logs: programs of copies between random views of random storages, with
// operators, refusals and constants among them.
#ifndef LOADPLAN_TESTS_PLAN_RANDOM_PROGRAMS_H_
#define LOADPLAN_TESTS_PLAN_RANDOM_PROGRAMS_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "plan/load_plan_builder.h"

namespace loadplan::testing {

struct RandomProgram {
  BuildInput input;
  // Bytes of every storage before the pass.
  std::vector<std::vector<std::uint8_t>> initial;
  bool has_casts = false;
};

RandomProgram MakeRandomProgram(std::mt19937& generator);

// The records, one a line: what a failure shows.
std::string Describe(const BuildInput& input);

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_PLAN_RANDOM_PROGRAMS_H_
