#include "lifecycle/byte_copy.h"

#include <ATen/ATen.h>

#include <ostream>
#include <random>
#include <utility>
#include <vector>

#include "backend/convert.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using ::loadplan::testing::ForEachRandom;
using ::loadplan::testing::IsOk;
using ::loadplan::testing::kBFloat16;
using ::loadplan::testing::kFloat16;
using ::loadplan::testing::kFloat32;
using ::loadplan::testing::StatusIs;
using ::testing::HasSubstr;

at::Tensor Iota(Index nbytes) { return at::arange(nbytes).to(at::kByte); }

std::vector<std::uint8_t> BytesOf(const at::Tensor& tensor) {
  const auto* data = static_cast<const std::uint8_t*>(tensor.storage().data());
  return {data, data + tensor.storage().nbytes()};
}

// The bytes of `to` after walking every pair of the map.
std::vector<std::uint8_t> Walk(const StridedMap& map, std::vector<std::uint8_t> to,
                               const std::vector<std::uint8_t>& from) {
  std::vector<Index> at(map.shape().size(), 0);
  for (Index item = 0; item < map.num_elements(); ++item) {
    Index rest = item;
    Index to_at = map.to().byte_offset;
    Index from_at = map.from().byte_offset;
    for (std::size_t d = map.shape().size(); d-- > 0;) {
      const Index c = rest % map.shape()[d];
      rest /= map.shape()[d];
      to_at += c * map.to().byte_strides[d];
      from_at += c * map.from().byte_strides[d];
    }
    for (Index b = 0; b < map.to().itemsize; ++b) {
      to[static_cast<std::size_t>(to_at + b)] = from[static_cast<std::size_t>(from_at + b)];
    }
  }
  return to;
}

// A side whose items do not touch one another: dimensions nested in a random order.
MapSide RandomSide(std::mt19937& gen, const DimVector& shape, Index itemsize, bool is_source) {
  MapSide side{static_cast<Index>(gen() % 5), DimVector(shape.size()), itemsize};
  std::vector<std::size_t> order(shape.size());
  for (std::size_t d = 0; d < order.size(); ++d) order[d] = d;
  std::shuffle(order.begin(), order.end(), gen);
  Index stride = itemsize + static_cast<Index>(gen() % 3);
  for (const std::size_t d : order) {
    side.byte_strides[d] = stride;
    stride *= shape[d] + static_cast<Index>(gen() % 2);
  }
  for (std::size_t d = 0; is_source && d < shape.size(); ++d) {
    if (gen() % 5 == 0) side.byte_strides[d] = 0;  // a broadcast
    if (gen() % 5 == 0 && shape[d] > 0) {          // a flip
      side.byte_offset += side.byte_strides[d] * (shape[d] - 1);
      side.byte_strides[d] = -side.byte_strides[d];
    }
  }
  return side;
}

TEST(CopyMappedPropertyTest, CopiesWhatWalkingEveryItemCopies) {
  ForEachRandom(2000, [](std::mt19937& gen) {
    DimVector shape(gen() % 4);
    for (Index& extent : shape) extent = static_cast<Index>(gen() % 4);
    constexpr Index kItemsizes[] = {1, 2, 3, 4, 8, 12};
    const Index itemsize = kItemsizes[gen() % 6];
    const MapSide to = RandomSide(gen, shape, itemsize, /*is_source=*/false);
    const MapSide from = RandomSide(gen, shape, itemsize, /*is_source=*/true);
    const StridedMap map = StridedMap::Unchecked(shape, to, from, /*is_cast=*/false);
    SCOPED_TRACE(ToString(map));
    const at::Tensor source = Iota(map.FromSpan().stop + 3);
    at::Tensor target = at::full({map.ToSpan().stop + 3}, 200, at::kByte);
    const auto want = Walk(map, BytesOf(target), BytesOf(source));
    ASSERT_THAT(CopyMapped(map, {}, ByteSide::OfStorage(target), ByteSide::OfStorage(source)),
                IsOk());
    EXPECT_EQ(BytesOf(target), want);
    // The two halves of a copy that is held in between.
    at::Tensor packed = NewBytes(PackedTo(map).nbytes(), at::kCPU);
    target.fill_(200);
    ASSERT_THAT(
        CopyMapped(PackedTo(map), {}, ByteSide::OfStorage(packed), ByteSide::OfStorage(source)),
        IsOk());
    ASSERT_THAT(
        CopyMapped(PackedFrom(map), {}, ByteSide::OfStorage(target), ByteSide::OfStorage(packed)),
        IsOk());
    EXPECT_EQ(BytesOf(target), want);
  });
}

struct LargeCase {
  const char* name;
  Index from_offset;  // bytes: how far the items can be taken at a time
};
std::ostream& operator<<(std::ostream& stream, const LargeCase& c) { return stream << c.name; }

class LargeCopyTest : public ::testing::TestWithParam<LargeCase> {};

TEST_P(LargeCopyTest, TransposesAndFlipsWhatGoesThroughTorch) {
  // 1100 x 1000 items of 2 bytes, transposed, rows from last to first.
  const Index offset = GetParam().from_offset;
  const at::Tensor source = at::randint(0, 256, {2200000 + offset}, at::kByte);
  at::Tensor target = at::zeros({2200000}, at::kByte);
  const StridedMap map =
      StridedMap::Unchecked({1000, 1100}, MapSide{0, {2200, 2}, 2},
                            MapSide{offset + 1099 * 2000, {2, -2000}, 2}, /*is_cast=*/false);
  ASSERT_THAT(CopyMapped(map, {}, ByteSide::OfStorage(target), ByteSide::OfStorage(source)),
              IsOk());
  EXPECT_EQ(BytesOf(target), Walk(map, BytesOf(at::zeros({2200000}, at::kByte)), BytesOf(source)));
}

INSTANTIATE_TEST_SUITE_P(Cases, LargeCopyTest,
                         ::testing::Values(LargeCase{"Aligned", 0}, LargeCase{"OddOffset", 1}),
                         [](const auto& test) { return test.param.name; });

TEST(CopyMappedTest, CastsAsCopyRounds) {
  const at::Tensor source = at::randn({6, 5});
  at::Tensor target = at::zeros({5, 3}, at::kBFloat16);
  at::Tensor want = at::zeros({5, 3}, at::kBFloat16);
  want.copy_(source.slice(0, 1, 6, 2).t());
  const StridedMap map =
      *StridedMap::Create(LayoutOf(target), LayoutOf(source.slice(0, 1, 6, 2).t()), true);
  const std::vector<CastStep> casts = {kFloat32, kBFloat16};
  ASSERT_THAT(CopyMapped(map, casts, ByteSide::OfStorage(target), ByteSide::OfStorage(source)),
              IsOk());
  EXPECT_TRUE(at::equal(target, want));
}

TEST(CopyMappedTest, CastsStepByStepThroughNarrowerTypes) {
  const at::Tensor source = at::randn({64});
  at::Tensor target = at::zeros({64});
  const StridedMap map = *StridedMap::Create(LayoutOf(target), LayoutOf(source), true);
  const std::vector<CastStep> casts = {kFloat32, kBFloat16, kFloat16, kFloat32};
  ASSERT_THAT(CopyMapped(map, casts, ByteSide::OfStorage(target), ByteSide::OfStorage(source)),
              IsOk());
  EXPECT_TRUE(at::equal(target, source.to(at::kBFloat16).to(at::kHalf).to(at::kFloat)));
}

TEST(CopyMappedTest, CastsFromBytesThatNoViewCanShow) {
  // Floats that start at an odd byte of the storage, read from last to first.
  const at::Tensor values = at::randn({4});
  at::Tensor bytes = at::zeros({17}, at::kByte);
  bytes.slice(0, 1).copy_(values.view(at::kByte));
  at::Tensor target = at::zeros({4}, at::kHalf);
  const StridedMap map = StridedMap::Unchecked({4}, MapSide{0, {2}, 2}, MapSide{12, {-4}, 4}, true);
  const std::vector<CastStep> casts = {kFloat32, kFloat16};
  const ByteSide from = ByteSide::OfElements(bytes.slice(0, 1));
  ASSERT_THAT(CopyMapped(map, casts, ByteSide::OfStorage(target), from), IsOk());
  EXPECT_TRUE(at::equal(target, values.flip(0).to(at::kHalf)));
}

TEST(CopyMappedTest, SeparatesAMemoryThatIsSharedUntilWritten) {
  const at::Tensor original = at::zeros({4}, at::kByte);
  const at::Tensor lazy = at::_lazy_clone(original);
  const StridedMap map = *StridedMap::Create(LayoutOf(lazy), LayoutOf(original));
  const at::Tensor source = at::full({4}, 9, at::kByte);
  ASSERT_THAT(CopyMapped(map, {}, ByteSide::OfStorage(lazy), ByteSide::OfStorage(source)), IsOk());
  EXPECT_TRUE(at::equal(lazy, source));
  EXPECT_TRUE(at::equal(original, at::zeros({4}, at::kByte)));
}

TEST(CopyMappedTest, CopyingOntoMetaDoesNothing) {
  const at::Tensor meta = at::empty({4}, at::TensorOptions(at::kMeta).dtype(at::kByte));
  const at::Tensor source = Iota(4);
  const StridedMap map = *StridedMap::Create(LayoutOf(meta), LayoutOf(source));
  EXPECT_THAT(CopyMapped(map, {}, ByteSide::OfStorage(meta), ByteSide::OfStorage(source)), IsOk());
}

TEST(CopyMappedTest, RefusesToReachOutsideEitherStorage) {
  at::Tensor small = at::zeros({4}, at::kByte);
  const at::Tensor large = Iota(8);
  const StridedMap map = *StridedMap::Create(LayoutOf(large), LayoutOf(large));
  EXPECT_THAT(CopyMapped(map, {}, ByteSide::OfStorage(small), ByteSide::OfStorage(large)),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("writes bytes [0, 8)")));
  EXPECT_THAT(CopyMapped(map, {}, ByteSide::OfStorage(large), ByteSide::OfStorage(small)),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("reads bytes [0, 8)")));
}

}  // namespace
}  // namespace loadplan
