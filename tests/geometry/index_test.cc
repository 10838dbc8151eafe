#include "geometry/index.h"

#include <limits>

#include "geometry/checked_product.h"
#include "gtest/gtest.h"

namespace loadplan {
namespace {

constexpr Index kMax = std::numeric_limits<Index>::max();
constexpr Index kMin = std::numeric_limits<Index>::min();

TEST(CheckedAddTest, IsNothingWhereTheSumDoesNotFit) {
  EXPECT_EQ(CheckedAdd(2, 3), 5);
  EXPECT_EQ(CheckedAdd(kMax - 1, 1), kMax);
  EXPECT_EQ(CheckedAdd(kMax, 1), std::nullopt);
  EXPECT_EQ(CheckedAdd(kMin, -1), std::nullopt);
}

TEST(CheckedMultiplyTest, IsNothingWhereTheProductDoesNotFit) {
  EXPECT_EQ(CheckedMultiply(-2, 3), -6);
  EXPECT_EQ(CheckedMultiply(kMax, 1), kMax);
  EXPECT_EQ(CheckedMultiply(kMax / 2 + 1, 2), std::nullopt);
  EXPECT_EQ(CheckedMultiply(kMin, -1), std::nullopt);
}

TEST(CheckedProductTest, IsNothingWhereItDoesNotFitOrAnExtentIsNegative) {
  const DimVector scalar;
  EXPECT_EQ(CheckedProduct(4, scalar), 4);
  EXPECT_EQ(CheckedProduct(4, DimVector{2, 3}), 24);
  EXPECT_EQ(CheckedProduct(4, DimVector{kMax, 0}), std::nullopt);
  EXPECT_EQ(CheckedProduct(1, DimVector{kMax / 2 + 1, 2}), std::nullopt);
  EXPECT_EQ(CheckedProduct(1, DimVector{-1, -1}), std::nullopt);
}

TEST(ByteRangeTest, IsHalfOpen) {
  EXPECT_EQ((ByteRange{3, 7}).nbytes(), 4);
  EXPECT_FALSE((ByteRange{3, 7}).empty());
  EXPECT_TRUE((ByteRange{3, 3}).empty());
  EXPECT_TRUE(ByteRange{}.empty());
}

}  // namespace
}  // namespace loadplan
