#include "backend/cast_bits.h"

#include <ATen/ATen.h>

#include <cstdint>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "backend/convert.h"
#include "gtest/gtest.h"
#include "tests/testing/seed.h"

namespace loadplan::testing {
namespace {

at::Tensor Bits(const at::Tensor& tensor) { return tensor.view(BitsOf(tensor.scalar_type())); }

// Sizes, and a view of them with gaps, steps or permuted dimensions.
at::Tensor RandomView(std::mt19937& gen, const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  const auto rank = static_cast<int64_t>(sizes.size());
  std::vector<int64_t> order(sizes.size());
  for (int64_t d = 0; d < rank; ++d) order[static_cast<std::size_t>(d)] = d;
  if (gen() % 2 == 0) std::shuffle(order.begin(), order.end(), gen);
  std::vector<int64_t> outer(sizes.size());
  for (std::size_t d = 0; d < sizes.size(); ++d)
    outer[d] = sizes[static_cast<std::size_t>(order[d])] * (gen() % 3 == 0 ? 2 : 1);
  at::Tensor tensor = at::zeros(outer, at::TensorOptions(dtype));
  for (int64_t d = 0; d < rank; ++d) {
    const int64_t want = sizes[static_cast<std::size_t>(order[static_cast<std::size_t>(d)])];
    if (tensor.size(d) == want) continue;
    tensor = gen() % 2 == 0 ? tensor.slice(d, 0, want) : tensor.slice(d, 0, 2 * want, 2);
  }
  std::vector<int64_t> back(sizes.size());
  for (int64_t d = 0; d < rank; ++d)
    back[static_cast<std::size_t>(order[static_cast<std::size_t>(d)])] = d;
  return tensor.permute(back);
}

class CastBitsProperty : public ::testing::Test {
 protected:
  void SetUp() override {
    if (CastBitsOf(at::kFloat, at::kBFloat16) != CastBits::kByRow)
      GTEST_SKIP() << "this CPU converts every float32 alike";
  }
};

TEST_F(CastBitsProperty, TellsHowTorchConverts) {
  std::mt19937 gen(static_cast<std::uint32_t>(TestSeed()));
  const at::Tensor nan = at::full({64}, 0x7fc00001, at::kInt).view(at::kFloat);
  const auto in_rows = Bits(nan.to(at::kBFloat16))[0].item<std::int16_t>();
  int scattered = 0;
  for (int i = 0; i < 2000; ++i) {
    std::vector<int64_t> sizes;
    for (auto rank = gen() % 4; rank > 0; --rank)
      sizes.push_back(static_cast<int64_t>(1 + gen() % 5));
    const at::Tensor to = RandomView(gen, sizes, at::kBFloat16);
    const at::Tensor from = RandomView(gen, sizes, at::kFloat);
    from.copy_(nan[0]);
    to.copy_(from);
    const bool rows = Bits(to).eq(in_rows).all().item<bool>();
    ASSERT_EQ(ConvertsScattered(to, from), !rows)
        << to.sizes() << " strides " << to.strides() << " from " << from.strides() << "\n"
        << ReplayHint(TestSeed());
    scattered += rows ? 0 : 1;
    // And both kinds can be had whatever the layouts.
    for (const bool wanted : {false, true}) {
      CopyConverting(to, from, CastStep(ToDType(at::kBFloat16), wanted));
      ASSERT_EQ(Bits(to).eq(in_rows).all().item<bool>(), !wanted) << ReplayHint(TestSeed());
    }
  }
  EXPECT_GT(scattered, 100);
  EXPECT_LT(scattered, 1900);
}

// On CPUs where the last items of a row are converted in a way of their own (half -> float32 with
// AVX512), and on all others: what a record can say is enough, item by item.
TEST(CastBitsTest, MovableCastsAreTheEagerOnesItemByItem) {
  std::mt19937 gen(static_cast<std::uint32_t>(TestSeed()));
  constexpr std::pair<at::ScalarType, at::ScalarType> kPairs[] = {{at::kHalf, at::kFloat},
                                                                  {at::kFloat, at::kHalf},
                                                                  {at::kBFloat16, at::kFloat},
                                                                  {at::kFloat, at::kBFloat16}};
  int movable = 0;
  for (int i = 0; i < 2000; ++i) {
    const auto [from_dtype, to_dtype] = kPairs[gen() % std::size(kPairs)];
    std::vector<int64_t> sizes;
    for (auto rank = gen() % 4; rank > 0; --rank)
      sizes.push_back(gen() % 8 == 0 ? 64 : static_cast<int64_t>(1 + gen() % 5));
    const at::Tensor to = RandomView(gen, sizes, to_dtype);
    const at::Tensor from = RandomView(gen, sizes, from_dtype);
    from.fill_(std::numeric_limits<double>::quiet_NaN());
    to.copy_(from);
    bool scattered = false;
    if (!CastIsMovable(to, from, &scattered)) continue;
    ++movable;
    const CastStep step(ToDType(to_dtype), scattered);
    const at::Tensor whole = at::empty(to.sizes(), to.options());
    CopyConverting(whole, from, step);
    ASSERT_TRUE(at::equal(Bits(whole), Bits(to))) << ReplayHint(TestSeed());
    const at::Tensor source = from.contiguous().view({from.numel()});
    const at::Tensor parts = at::empty({to.numel()}, to.options());
    for (int64_t k = 0; k < to.numel(); ++k)
      CopyConverting(parts.slice(0, k, k + 1), source.slice(0, k, k + 1), step);
    ASSERT_TRUE(at::equal(Bits(parts), Bits(to.contiguous()).view({to.numel()})))
        << from_dtype << " to " << to_dtype << " " << to.sizes() << " strides " << to.strides()
        << " from " << from.strides() << "\n"
        << ReplayHint(TestSeed());
  }
  EXPECT_GT(movable, 400);
}

TEST(CastBitsTest, NumbersOfOneDtypeAreEqual) {
  EXPECT_EQ(CastBitsOf(at::kFloat, at::kFloat), CastBits::kEqual);
  EXPECT_EQ(CastBitsOf(at::kInt, at::kFloat), CastBits::kEqual);
}

}  // namespace
}  // namespace loadplan::testing
