#include "lifecycle/stream_copy.h"

#include <cstddef>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "lifecycle/byte_copy.h"
#include "tests/testing/seed.h"

namespace loadplan {
namespace {

using ::loadplan::testing::ForEachRandom;

TEST(StreamCopyPropertyTest, LeavesWhatLoopsLeave) {
  ForEachRandom(300, [](std::mt19937& gen) {
    constexpr Index kSizes[] = {1, 63, 64, 65, 128, 192, 1000, 1024, 1088, 5000};
    const Index size = kSizes[gen() % 10];
    const auto rows = static_cast<Index>(gen() % 4);
    const auto planes = static_cast<Index>(1 + gen() % 3);
    const auto side = [&] {
      const Index row = size + static_cast<Index>(gen() % 2 == 0 ? 0 : gen() % 70);
      const auto start = static_cast<Index>(gen() % 2 == 0 ? 0 : gen() % 70);
      return MapSide{start, {(rows + 1) * row, row}, size};
    };
    const MapSide to_side = side();
    const StridedMap map =
        StridedMap::Unchecked({planes, rows}, to_side, side(), /*is_cast=*/false);
    std::vector<std::byte> from(100'000);
    for (std::byte& byte : from) byte = static_cast<std::byte>(gen());
    std::vector<std::byte> expected(100'000);
    std::vector<std::byte> streamed(100'000);
    CopyInLoops(map, expected.data(), from.data());
    StreamInLoops(map, streamed.data(), from.data());
    ASSERT_EQ(streamed, expected) << ToString(map);
  });
}

}  // namespace
}  // namespace loadplan
