// The entry of libFuzzer, for the function that CMake names.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tests/fuzz/fuzz_targets.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  loadplan::testing::LOADPLAN_FUZZ_FUNCTION({reinterpret_cast<const char*>(data), size});
  return 0;
}
