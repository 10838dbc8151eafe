#include "geometry/copy_jobs.h"

#include <algorithm>
#include <cstddef>
#include <random>
#include <utility>
#include <vector>

#include "geometry/copy_tile.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/oracle.h"
#include "tests/testing/random_copies.h"
#include "tests/testing/random_geometry.h"
#include "tests/testing/seed.h"

namespace loadplan {
namespace {

using copy_tile_internal::CopyPlace;
using copy_tile_internal::PlaceOf;
using ::loadplan::testing::AppendCopy;
using ::loadplan::testing::BatchOf;
using ::loadplan::testing::ExpectCopied;
using ::loadplan::testing::ForEachRandom;
using ::loadplan::testing::Map;
using ::loadplan::testing::Memory;
using ::loadplan::testing::MemoryCopy;
using ::loadplan::testing::Pairs;
using ::loadplan::testing::Pick;
using ::loadplan::testing::RandomDenseSide;
using ::loadplan::testing::RandomMap;
using ::loadplan::testing::RandomMemoryCopy;
using ::loadplan::testing::Uniform;

constexpr std::size_t kAnyNumber = 1U << 20;

// ---------------------------------------------------------------- divisors
TEST(DivisorPropertyTest, DividesAsTheHostDoes) {
  ForEachRandom(2000, [](std::mt19937& gen) {
    const auto bits = static_cast<std::uint32_t>(Uniform(gen, 1, 31));
    const auto value = 1 + static_cast<std::uint32_t>(gen()) % ((std::uint32_t{1} << bits) - 1);
    const Divisor divisor(value);
    constexpr std::uint32_t kMax = (std::uint32_t{1} << 31) - 1;
    std::vector<std::uint32_t> dividends = {0, 1, value - 1, value, kMax, kMax - 1, kMax / 2};
    for (int i = 0; i < 30; ++i) {
      const std::uint32_t any = static_cast<std::uint32_t>(gen()) & kMax;
      const std::uint32_t multiple = any / value * value;
      dividends.insert(dividends.end(), {any, multiple, multiple == 0 ? 0 : multiple - 1});
    }
    for (const std::uint32_t dividend : dividends) {
      ASSERT_EQ(divisor.Quotient(dividend), dividend / value) << dividend << " / " << value;
    }
  });
}

// ---------------------------------------------------------------- jobs
// Every place of the jobs' units, in order: pairs of bytes as Pairs gives them, of runs of `unit`.
std::vector<testing::Pair> PlacesOf(const std::vector<CopyJob>& jobs) {
  std::vector<testing::Pair> places;
  for (const CopyJob& job : jobs) {
    for (std::uint32_t position = 0; position < job.nbytes; ++position) {
      const CopyPlace place = PlaceOf(job, position);
      places.emplace_back(static_cast<Index>(job.to) + place.to, job.from + place.from);
    }
  }
  return places;
}

// A device refuses units at other addresses than their multiples; the host would take them.
void ExpectAligned(const CopyJob& job, std::uint64_t source) {
  const std::uint32_t unit = UnitOf(job, source);
  ASSERT_TRUE(unit <= job.unit && job.unit % unit == 0);
  for (std::uint32_t position = 0; position < job.nbytes; position += unit) {
    const CopyPlace place = PlaceOf(job, position);
    ASSERT_EQ((job.to + static_cast<std::uint64_t>(place.to)) % unit, 0U);
    ASSERT_EQ((source + static_cast<std::uint64_t>(job.from + place.from)) % unit, 0U);
    // The unit lies in one row.
    const CopyPlace last = PlaceOf(job, position + unit - 1);
    ASSERT_EQ(last.to - place.to, unit - 1);
    ASSERT_EQ(last.from - place.from, unit - 1);
  }
}

TEST(CopyJobsPropertyTest, HoldThePairsOfTheMap) {
  ForEachRandom(3000, [](std::mt19937& gen) {
    const StridedMap map = RandomMap(gen, 6, 4);
    SCOPED_TRACE(ToString(map));
    const auto address = static_cast<std::uint64_t>(Uniform(gen, 0, 40));
    std::vector<CopyJob> jobs;
    ASSERT_TRUE(AppendCopyJobs(map, address, kAnyNumber, &jobs));
    std::vector<testing::Pair> want = Pairs(map);
    for (testing::Pair& pair : want) pair.first += static_cast<Index>(address);
    std::vector<testing::Pair> got = PlacesOf(jobs);
    std::sort(want.begin(), want.end());
    std::sort(got.begin(), got.end());
    ASSERT_EQ(got, want);
    const auto source = (std::uint64_t{1} << 20) + static_cast<std::uint64_t>(Uniform(gen, 0, 40));
    for (const CopyJob& job : jobs) ExpectAligned(job, source);
  });
}

// The pair of a map's item, for maps that are too large to walk.
testing::Pair PairAt(const StridedMap& map, Index item, Index byte) {
  testing::Pair pair{map.to().byte_offset + byte, map.from().byte_offset + byte};
  for (std::size_t d = map.shape().size(); d-- > 0;) {
    const Index c = item % map.shape()[d];
    item /= map.shape()[d];
    pair.first += c * map.to().byte_strides[d];
    pair.second += c * map.from().byte_strides[d];
  }
  return pair;
}

TEST(CopyJobsPropertyTest, CutMapsThatAreTooLargeForOneJob) {
  ForEachRandom(200, [](std::mt19937& gen) {
    // 1 to 16 GiB, rows in random order on the side of the source.
    DimVector shape(static_cast<std::size_t>(Uniform(gen, 0, 3)), 0);
    Index itemsize = Index{1} << Uniform(gen, 0, 3);
    Index left = (Index{1} << 30) + Uniform(gen, 1, Index{1} << 33);
    for (Index& extent : shape) {
      extent = Index{1} << Uniform(gen, 1, 11);
      left /= extent;
    }
    itemsize *= std::max<Index>(1, left / itemsize);
    MapSide from = RandomDenseSide(gen, shape, itemsize);
    const StridedMap map = Map(shape, RandomDenseSide(gen, shape, itemsize), from);
    SCOPED_TRACE(ToString(map));
    std::vector<CopyJob> jobs;
    ASSERT_TRUE(AppendCopyJobs(map, 0, kAnyNumber, &jobs));
    Index nbytes = 0;
    for (const CopyJob& job : jobs) {
      ASSERT_LE(job.nbytes, kMaxCopyNbytes);
      nbytes += job.nbytes;
    }
    ASSERT_EQ(nbytes, map.nbytes());
    // Coalesce walks `to` upwards: so do the jobs, and a position is found by its `to` byte.
    for (int i = 0; i < 100; ++i) {
      const testing::Pair pair =
          PairAt(map, Uniform(gen, 0, map.num_elements() - 1), Uniform(gen, 0, itemsize - 1));
      int found = 0;
      for (const CopyJob& job : jobs) {
        std::uint32_t low = 0;
        std::uint32_t high = job.nbytes;
        while (high - low > 1) {
          const std::uint32_t middle = low + (high - low) / 2;
          const Index to = static_cast<Index>(job.to) + PlaceOf(job, middle).to;
          (to <= pair.first ? low : high) = middle;
        }
        const CopyPlace place = PlaceOf(job, low);
        if (static_cast<Index>(job.to) + place.to != pair.first) continue;
        ++found;
        ASSERT_EQ(job.from + place.from, pair.second);
      }
      ASSERT_EQ(found, 1);
    }
  });
}

TEST(CopyJobsTest, GiveUpWhereTooManyWouldBeNeeded) {
  DimVector shape = {100, 2, 2, 2, 2};
  MapSide to{0, {1000, 64, 16, 8, 4}, 1};
  MapSide from{0, {4, 800, 3000, 7000, 20000}, 1};
  std::vector<CopyJob> jobs(3);
  EXPECT_FALSE(AppendCopyJobs(Map(shape, to, from), 0, 99, &jobs));
  EXPECT_EQ(jobs.size(), 3U);
  EXPECT_TRUE(AppendCopyJobs(Map(shape, to, from), 0, 100, &jobs));
  EXPECT_EQ(jobs.size(), 103U);
}

TEST(CopyJobsTest, TakeTheLargestUnitOfBothSides) {
  const auto unit_of = [](const StridedMap& map, std::uint64_t to) {
    std::vector<CopyJob> jobs;
    EXPECT_TRUE(AppendCopyJobs(map, to, 1, &jobs));
    return jobs.front().unit;
  };
  // Columns of a matrix: 7168 rows of 512 bytes out of 4096.
  const StridedMap columns = Map({7168}, {0, {512}, 512}, {512, {4096}, 512});
  EXPECT_EQ(unit_of(columns, 1 << 20), 16U);
  EXPECT_EQ(unit_of(columns, (1 << 20) + 8), 8U);
  EXPECT_EQ(unit_of(Map({7168}, {0, {512}, 512}, {4, {4096}, 512}), 0), 4U);
  EXPECT_EQ(unit_of(Map({7168}, {0, {514}, 512}, {0, {4096}, 512}), 0), 2U);
  // A transpose of 2-byte items.
  EXPECT_EQ(unit_of(Map({64, 64}, {0, {128, 2}, 2}, {0, {2, 128}, 2}), 0), 2U);
  EXPECT_EQ(unit_of(Map({}, {0, {}, 4096}, {1, {}, 4096}), 0), 1U);
}

// ---------------------------------------------------------------- batches
// Some jobs as a plan has them, the others as the batch's own.
void RunRandomBatch(std::mt19937& gen) {
  std::vector<MemoryCopy> copies;
  std::vector<CopyJob> jobs;
  std::vector<CopyItem> items;
  for (Index n = Uniform(gen, 1, 12); n > 0; --n) {
    copies.push_back(RandomMemoryCopy(gen));
    AppendCopy(copies.back(), {}, &jobs, &items);
  }
  std::shuffle(items.begin(), items.end(), gen);
  const auto num_planned =
      static_cast<std::size_t>(Uniform(gen, 0, static_cast<Index>(jobs.size())));
  RunCopiesOnHost(BatchOf(jobs, items, num_planned), Pick<std::uint32_t>(gen, {1, 7, 32, 256}));
  for (const MemoryCopy& copy : copies) ExpectCopied(copy);
}

TEST(CopyBatchPropertyTest, CopiesEveryByteOfEveryJob) { ForEachRandom(1500, RunRandomBatch); }

TEST(CopyBatchTest, FindsTheItemOfEachTile) {
  const std::vector<CopyItem> items = {{0, 0, 0}, {0, 1, 3}, {0, 2, 4}, {0, 3, 9}};
  CopyBatch batch;
  batch.items = items.data();
  batch.num_items = 4;
  const std::uint32_t want[] = {0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3};
  for (std::uint32_t tile = 0; tile < 11; ++tile) EXPECT_EQ(FindCopyItem(batch, tile), want[tile]);
}

TEST(CopyBatchTest, TakesEveryUnitThatTheSourceAllows) {
  for (Index start = 0; start <= 16; ++start) {
    const Memory from(40000 + 32);
    const Memory to(40000);
    std::mt19937 gen(static_cast<std::uint32_t>(start));
    from.Fill(gen);
    std::vector<CopyJob> jobs;
    ASSERT_TRUE(AppendCopyJobs(Map({}, {0, {}, 40000}, {0, {}, 40000}), to.address(), 1, &jobs));
    std::vector<CopyItem> items = {{from.address() + static_cast<std::uint64_t>(start), 0, 0}};
    EXPECT_EQ(UnitOf(jobs[0], items[0].from), start % 16 == 0 ? 16 : start & -start);
    const CopyBatch batch = BatchOf(jobs, items);
    EXPECT_EQ(batch.num_tiles, 3U);
    RunCopiesOnHost(batch, 256);
    EXPECT_TRUE(std::equal(to.data(), to.data() + 40000, from.data() + start));
  }
}

TEST(CopyBatchTest, IsSmallEnoughForTheArgumentsOfAKernel) {
  EXPECT_LE(sizeof(SmallCopyBatch), 4000U);
  EXPECT_EQ(sizeof(CopyItem), 16U);
  EXPECT_EQ(sizeof(CopyJob) % 16, 0U);
}

}  // namespace
}  // namespace loadplan
