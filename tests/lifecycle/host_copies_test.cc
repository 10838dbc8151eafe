#include "lifecycle/host_copies.h"

#include <algorithm>
#include <cstddef>
#include <random>
#include <vector>

#include "geometry/copy_jobs.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/random_copies.h"
#include "tests/testing/random_geometry.h"
#include "tests/testing/seed.h"

namespace loadplan {
namespace {

using ::loadplan::testing::AppendCopy;
using ::loadplan::testing::BatchOf;
using ::loadplan::testing::ExpectCopied;
using ::loadplan::testing::ForEachRandom;
using ::loadplan::testing::Map;
using ::loadplan::testing::Memory;
using ::loadplan::testing::MemoryCopy;
using ::loadplan::testing::Pick;
using ::loadplan::testing::RandomMemoryCopy;
using ::loadplan::testing::Uniform;

void RunRandomBatch(std::mt19937& gen) {
  std::vector<MemoryCopy> copies;
  std::vector<CopyJob> jobs;
  std::vector<CopyItem> items;
  for (Index i = Uniform(gen, 0, 6); i-- > 0;) {
    copies.push_back(RandomMemoryCopy(gen));
    AppendCopy(copies.back(), {}, &jobs, &items);
  }
  RunCopiesInParallel(BatchOf(jobs, items, jobs.size()),
                      {.max_threads = Pick<int>(gen, {1, 2, 5}),
                       .thread_nbytes = Pick<std::uint64_t>(gen, {1, 4096}),
                       .stream_nbytes = Pick<std::uint64_t>(gen, {0, 1 << 30}),
                       .tiles_at_a_time = Pick<std::uint32_t>(gen, {1, 3, 32})});
  for (const MemoryCopy& copy : copies) ExpectCopied(copy);
}

TEST(HostCopiesPropertyTest, CopyEveryByteOfEveryJob) { ForEachRandom(1000, RunRandomBatch); }

// Rows of several tiles, cut inside: past the caches from and to any address.
TEST(HostCopiesTest, StreamRowsFromAndToAnyAddress) {
  constexpr Index kRow = 40'000;
  for (const Index start : {0, 1, 7, 16, 63}) {
    const Memory from(3 * kRow + 64);
    const Memory to(3 * (kRow + 32) + 64);
    std::mt19937 gen(static_cast<std::uint32_t>(start));
    from.Fill(gen);
    to.Fill(gen);
    std::vector<std::byte> want(to.data(), to.data() + to.nbytes());
    for (Index row = 0; row < 3; ++row) {
      std::copy_n(from.data() + start + row * kRow, kRow, want.begin() + start + row * (kRow + 32));
    }
    std::vector<CopyJob> jobs;
    const auto map = Map({3}, {start, {kRow + 32}, kRow}, {start, {kRow}, kRow});
    ASSERT_TRUE(AppendCopyJobs(map, to.address(), 1, &jobs));
    std::vector<CopyItem> items = {{from.address(), 0, 0}};
    RunCopiesInParallel(
        BatchOf(jobs, items),
        {.max_threads = 3, .thread_nbytes = 1, .stream_nbytes = 0, .tiles_at_a_time = 1});
    EXPECT_TRUE(std::ranges::equal(std::vector(to.data(), to.data() + to.nbytes()), want)) << start;
  }
}

TEST(HostCopiesTest, TakeNoWorkForAnEmptyBatch) {
  std::vector<CopyItem> items;
  RunCopiesInParallel(BatchOf({}, items), {.max_threads = 4});
}

}  // namespace
}  // namespace loadplan
