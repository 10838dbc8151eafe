// What the fuzzers call: bytes that nobody vouches for. Must return, whatever they are. The
// same functions run over tests/fuzz/corpus in every test run.
#ifndef LOADPLAN_TESTS_FUZZ_FUZZ_TARGETS_H_
#define LOADPLAN_TESTS_FUZZ_FUZZ_TARGETS_H_

#include <string_view>

namespace loadplan::testing {

// As it is, and once more with its checksums set right, since no fuzzer guesses those. What
// is read without an error is asked everything that a plan answers, and written again.
void FuzzPlanFile(std::string_view bytes);

// As a file, and without its first two bytes as the JSON before so many bytes of data. What is
// read covers the data exactly.
void FuzzSafetensorsHeader(std::string_view bytes);

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_FUZZ_FUZZ_TARGETS_H_
