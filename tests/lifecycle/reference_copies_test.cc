#include "lifecycle/reference_copies.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "backend/cast_bits.h"
#include "geometry/copy_jobs.h"
#include "geometry/copy_tile.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lifecycle/cast_check.h"
#include "tests/testing/random_copies.h"
#include "tests/testing/seed.h"

namespace loadplan {
namespace {

using copy_tile_internal::CopyPlace;
using copy_tile_internal::PlaceOf;
using ::loadplan::testing::AppendCopy;
using ::loadplan::testing::BatchOf;
using ::loadplan::testing::ExpectCopied;
using ::loadplan::testing::ForEachRandom;
using ::loadplan::testing::Memory;
using ::loadplan::testing::MemoryCopy;
using ::loadplan::testing::Pick;
using ::loadplan::testing::RandomCastMap;
using ::loadplan::testing::RandomMemoryCopy;
using ::loadplan::testing::Uniform;

const std::vector<at::ScalarType> kFloats = {
    at::kDouble,        at::kFloat,       at::kHalf,          at::kBFloat16,
    at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e8m0fnu};
const std::vector<at::ScalarType> kIntegers = {at::kBool,  at::kByte, at::kChar,
                                               at::kShort, at::kInt,  at::kLong};

CopyCast Cast(at::ScalarType from, at::ScalarType to) {
  return {static_cast<std::int8_t>(from), static_cast<std::int8_t>(to)};
}

// Every pair that is made; see Note [Casts as torch makes them].
std::vector<std::pair<at::ScalarType, at::ScalarType>> Pairs() {
  std::vector<std::pair<at::ScalarType, at::ScalarType>> pairs;
  for (const at::ScalarType from : kIntegers) {
    for (const at::ScalarType to : kIntegers) {
      if (from != to) pairs.emplace_back(from, to);
    }
    for (const at::ScalarType to : kFloats) pairs.emplace_back(from, to);
  }
  for (const at::ScalarType from : kFloats) {
    for (const at::ScalarType to : kFloats) {
      if (from != to) pairs.emplace_back(from, to);
    }
    pairs.emplace_back(from, at::kBool);
  }
  return pairs;
}

std::string NameOf(const std::pair<at::ScalarType, at::ScalarType>& pair) {
  return absl::StrCat(c10::toString(pair.first), " -> ", c10::toString(pair.second));
}

TEST(ReferenceCopiesTest, HaveThePairsThatCppDefines) {
  const auto has_cast = ReferenceCopyEngine().has_cast;
  std::size_t count = 0;
  constexpr auto kCount = static_cast<std::int8_t>(at::ScalarType::NumOptions);
  for (std::int8_t from = 0; from < kCount; ++from) {
    for (std::int8_t to = 0; to < kCount; ++to) {
      if (has_cast({from, to})) ++count;
    }
  }
  EXPECT_EQ(count, Pairs().size());
  for (const auto& pair : Pairs()) {
    EXPECT_TRUE(has_cast(Cast(pair.first, pair.second))) << NameOf(pair);
  }
  // What does not fit has no value there.
  EXPECT_FALSE(has_cast(Cast(at::kFloat, at::kInt)));
  EXPECT_FALSE(has_cast(Cast(at::kComplexFloat, at::kFloat)));
}

// Any bits of a dtype; all there are where those are few.
at::Tensor AnyValues(std::mt19937& gen, at::ScalarType dtype) {
  const auto nbytes = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t count = nbytes == 1 ? 256 : 65536;
  const at::Tensor values = at::empty({count}, dtype);
  auto* const bytes = static_cast<std::uint8_t*>(values.mutable_data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    // The last bytes count through signs and exponents; the first ones are any.
    const std::uint32_t random = static_cast<std::uint32_t>(gen());
    for (int64_t b = 0; b < nbytes; ++b) {
      bytes[i * nbytes + b] = static_cast<std::uint8_t>(random >> (8 * (b % 4)));
    }
    if (nbytes > 1) {
      bytes[i * nbytes + nbytes - 2] = static_cast<std::uint8_t>(i);
      bytes[i * nbytes + nbytes - 1] = static_cast<std::uint8_t>(i >> 8);
    } else {
      bytes[i] = static_cast<std::uint8_t>(dtype == at::kBool ? i % 2 : i);
    }
  }
  return values;
}

at::Tensor IsNaN(const at::Tensor& values) { return values.to(at::kDouble).isnan(); }

at::Tensor CastByReference(const at::Tensor& values, at::ScalarType to) {
  const at::Tensor got = at::zeros(values.sizes(), at::TensorOptions(to));
  const auto from_itemsize = static_cast<Index>(values.element_size());
  const auto to_itemsize = static_cast<Index>(got.element_size());
  const StridedMap map = testing::Map({values.numel()}, {0, {to_itemsize}, to_itemsize},
                                      {0, {from_itemsize}, from_itemsize}, /*is_cast=*/true);
  std::vector<CopyJob> jobs;
  EXPECT_TRUE(AppendCopyJobs(map, reinterpret_cast<std::uint64_t>(got.mutable_data_ptr()), 1, &jobs,
                             Cast(values.scalar_type(), to)));
  std::vector<CopyItem> items = {{reinterpret_cast<std::uint64_t>(values.const_data_ptr()), 0, 0}};
  RunReferenceCopies(BatchOf(jobs, items), 256);
  return got;
}

// Against torch on the CPU. The known exceptions are bits of NaN, of which torch's vectors leave
// others than its conversion of single items (backend/cast_bits.h): seen of x86 with AVX512 for
// float32 and float64 to half and bfloat16, bfloat16 and float8 to half, and half to float32. It
// stays NaN.
bool MayDifferInNaN(const std::pair<at::ScalarType, at::ScalarType>& pair) {
  return pair.first == at::kHalf || pair.second == at::kHalf || pair.second == at::kBFloat16;
}

TEST(ReferenceCopiesPropertyTest, CastAsTorchDoesOnTheCpuButForBitsOfNaN) {
  ForEachRandom(1, [](std::mt19937& gen) {
    for (const auto& pair : Pairs()) {
      SCOPED_TRACE(NameOf(pair));
      const at::Tensor values = AnyValues(gen, pair.first);
      const at::Tensor got = CastByReference(values, pair.second);
      const at::Tensor want =
          at::empty(values.sizes(), at::TensorOptions(pair.second)).copy_(values);
      const at::ScalarType bits = BitsOf(pair.second);
      const at::Tensor differs = got.view(bits) != want.view(bits);
      if (!differs.any().item<bool>()) continue;
      ASSERT_TRUE(MayDifferInNaN(pair));
      ASSERT_FALSE((differs & ~IsNaN(values)).any().item<bool>());
      ASSERT_TRUE(at::equal(IsNaN(got), IsNaN(want)));
    }
  });
}

// ---------------------------------------------------------------- strided
// A device refuses loads and stores at other addresses than their multiples.
void ExpectAligned(const CopyJob& job, std::uint64_t from, Index to_itemsize, Index from_itemsize) {
  const auto shift = [](Index ratio) {
    return ratio == 1 ? 0U : ratio == 2 ? 1U : ratio == 4 ? 2U : 3U;
  };
  const Index large = std::max(to_itemsize, from_itemsize);
  const std::uint32_t to_shift = shift(large / to_itemsize);
  const std::uint32_t from_shift = shift(large / from_itemsize);
  ASSERT_TRUE(job.unit == kMaxCopyUnit || job.unit == large) << job.unit;
  ASSERT_EQ(from % static_cast<std::uint64_t>(from_itemsize), 0U);
  for (std::uint32_t position = 0; position < job.nbytes; position += job.unit) {
    const CopyPlace place = PlaceOf(job, position, to_shift, from_shift);
    ASSERT_EQ((job.to + static_cast<std::uint64_t>(place.to)) % (job.unit >> to_shift), 0U);
    ASSERT_EQ((static_cast<std::uint64_t>(job.from + place.from)) % (job.unit >> from_shift), 0U);
    // The unit lies in one row.
    const CopyPlace last =
        PlaceOf(job, position + job.unit - static_cast<std::uint32_t>(large), to_shift, from_shift);
    const Index items = job.unit / large - 1;
    ASSERT_EQ(last.to - place.to, items * to_itemsize);
    ASSERT_EQ(last.from - place.from, items * from_itemsize);
  }
}

struct CastCopy {
  MemoryCopy memory;
  CopyCast cast;
};

CastCopy RandomCastCopy(std::mt19937& gen) {
  const auto pair = Pick(gen, Pairs());
  const auto to_itemsize = static_cast<Index>(c10::elementSize(pair.second));
  const auto from_itemsize = static_cast<Index>(c10::elementSize(pair.first));
  StridedMap map = RandomCastMap(gen, to_itemsize, from_itemsize);
  const Index from_start = Uniform(gen, 0, 2) == 0 ? from_itemsize * Uniform(gen, 0, 20) : 0;
  MemoryCopy copy{map,
                  Memory(map.ToSpan().stop + 8),
                  Memory(from_start + map.FromSpan().stop + 8),
                  from_start,
                  {}};
  copy.to.Fill(gen);
  copy.want.assign(copy.to.data(), copy.to.data() + copy.to.nbytes());
  const auto num_values = static_cast<int64_t>(copy.from.nbytes()) / from_itemsize;
  const at::Tensor values =
      (at::randint(-500, 500, {num_values}, at::kFloat) / 3).to(pair.first);  // no NaN
  std::memcpy(copy.from.data(), values.const_data_ptr(), values.nbytes());
  // Item by item: where they lie, and what torch makes of them.
  std::vector<Index> to_bytes;
  std::vector<int64_t> indices;
  ForEachRun(map, [&](Index to_byte, Index from_byte, Index) {
    to_bytes.push_back(to_byte);
    indices.push_back((from_start + from_byte) / from_itemsize);
  });
  const at::ScalarType bits = BitsOf(pair.first);
  const at::Tensor items = values.view(bits)
                               .index_select(0, at::tensor(indices, at::kLong))
                               .view(pair.first)
                               .to(pair.second);
  for (std::size_t i = 0; i < to_bytes.size(); ++i) {
    std::memcpy(
        copy.want.data() + to_bytes[i],
        static_cast<const std::byte*>(items.const_data_ptr()) + static_cast<Index>(i) * to_itemsize,
        static_cast<std::size_t>(to_itemsize));
  }
  return {std::move(copy), Cast(pair.first, pair.second)};
}

// Casts of several pairs, and copies of bytes among them.
void RunRandomBatch(std::mt19937& gen) {
  std::vector<CastCopy> copies;
  std::vector<CopyJob> jobs;
  std::vector<CopyItem> items;
  for (Index n = Uniform(gen, 1, 8); n > 0; --n) {
    if (Uniform(gen, 0, 4) == 0) {
      copies.push_back({RandomMemoryCopy(gen), {}});
    } else {
      copies.push_back(RandomCastCopy(gen));
    }
    const auto& [copy, cast] = copies.back();
    SCOPED_TRACE(ToString(copy.map));
    const std::size_t first = items.size();
    AppendCopy(copy, cast, &jobs, &items);
    for (std::size_t i = first; !cast.is_none() && i < items.size(); ++i) {
      ExpectAligned(jobs[items[i].job], items[i].from, copy.map.to().itemsize,
                    copy.map.from().itemsize);
    }
  }
  std::shuffle(items.begin(), items.end(), gen);
  RunReferenceCopies(BatchOf(jobs, items), Pick<std::uint32_t>(gen, {1, 7, 32, 256}));
  for (const auto& [copy, cast] : copies) {
    SCOPED_TRACE(absl::StrCat("from ", cast.from, " to ", cast.to));
    ExpectCopied(copy);
  }
}

TEST(ReferenceCopiesPropertyTest, CastEveryItemOfEveryJob) { ForEachRandom(1500, RunRandomBatch); }

TEST(ReferenceCopiesTest, CastRowsSixteenBytesAtATime) {
  const auto unit_of = [](DimVector shape, MapSide to, MapSide from) {
    std::vector<CopyJob> jobs;
    const StridedMap map = testing::Map(std::move(shape), std::move(to), std::move(from), true);
    if (!AppendCopyJobs(map, 4096, 9, &jobs, Cast(at::kFloat, at::kBFloat16))) return 0U;
    return jobs.size() == 1 ? jobs[0].unit : 99U;
  };
  // Columns of a matrix; columns from the third on; every other column; items between others.
  EXPECT_EQ(unit_of({7168, 256}, {0, {512, 2}, 2}, {1024, {8192, 4}, 4}), 16U);
  EXPECT_EQ(unit_of({7168, 256}, {0, {512, 2}, 2}, {8, {8192, 4}, 4}), 4U);
  EXPECT_EQ(unit_of({7168, 128}, {0, {256, 2}, 2}, {0, {8192, 8}, 4}), 4U);
  EXPECT_EQ(unit_of({16}, {0, {2}, 2}, {0, {0}, 4}), 4U);
  // Not at a multiple of their size.
  EXPECT_EQ(unit_of({16}, {1, {2}, 2}, {0, {4}, 4}), 0U);
  EXPECT_EQ(unit_of({16}, {0, {2}, 2}, {2, {4}, 4}), 0U);
  EXPECT_EQ(unit_of({16}, {0, {2}, 2}, {0, {6}, 4}), 0U);
}

// More than one job can hold, at the edge between two.
TEST(ReferenceCopiesTest, CutCastsThatAreTooLargeForOneJob) {
  constexpr Index kItems = (Index{1} << 28) + 24;
  std::vector<CopyJob> jobs;
  ASSERT_TRUE(AppendCopyJobs(testing::Map({kItems}, {0, {2}, 2}, {0, {4}, 4}, true), 4096, 9, &jobs,
                             Cast(at::kFloat, at::kBFloat16)));
  ASSERT_EQ(jobs.size(), 2U);
  EXPECT_EQ(jobs[0].nbytes, kMaxCopyNbytes);
  EXPECT_EQ(jobs[1].to, 4096U + (std::uint64_t{1} << 29));
  EXPECT_EQ(jobs[1].from, Index{1} << 30);
  EXPECT_EQ(jobs[1].nbytes, 96U);
}

// ---------------------------------------------------------------- asked
TEST(CastCheckTest, TakesPairsThatAreEqualInEveryBit) {
  const CopyDevice device{&ReferenceCopyEngine()};
  for (const auto& pair : {std::pair(at::kInt, at::kFloat),
                           {at::kLong, at::kDouble},
                           {at::kBFloat16, at::kFloat},
                           {at::kFloat8_e4m3fn, at::kBFloat16},
                           {at::kFloat, at::kFloat8_e5m2},
                           {at::kBool, at::kFloat}}) {
    EXPECT_TRUE(CastsAsTorch(device, Cast(pair.first, pair.second))) << NameOf(pair);
  }
}

TEST(CastCheckTest, LeavesTheOthersToTorch) {
  // NaN in a row becomes 0xffff or 0x7fc0, by torch's vectors.
  const CopyDevice device{&ReferenceCopyEngine()};
  if (CastBitsOf(at::kFloat, at::kBFloat16) == CastBits::kEqual) GTEST_SKIP() << "no such vectors";
  EXPECT_FALSE(CastsAsTorch(device, Cast(at::kFloat, at::kBFloat16)));
}

TEST(CastCheckTest, BelievesNoEngine) {
  static const CopyEngine idle = {
      kCopyEngineLayout, [](void*) { return false; },
      [](const CopyBatch&, void*) -> const char* { return nullptr; },
      [](const SmallCopyBatch&, void*) -> const char* { return nullptr; },
      [](CopyCast) { return true; }};
  EXPECT_FALSE(CastsAsTorch({&idle}, Cast(at::kInt, at::kFloat)));
}

}  // namespace
}  // namespace loadplan
