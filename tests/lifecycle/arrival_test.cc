#include "lifecycle/arrival.h"

#include <ATen/ATen.h>

#include <ostream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using ::loadplan::testing::IsOk;
using ::loadplan::testing::kFloat32;
using ::loadplan::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

const SourceTensor kDeclared{"x", {2, 3}, kFloat32, 0};

struct ArrivalCase {
  std::string name;
  at::Tensor tensor;
  std::string words;
};
std::ostream& operator<<(std::ostream& stream, const ArrivalCase& c) { return stream << c.name; }

class ArrivalTest : public ::testing::TestWithParam<ArrivalCase> {};

TEST_P(ArrivalTest, IsRefusedNamingTheTensor) {
  EXPECT_THAT(CheckDeclared(kDeclared, GetParam().tensor, /*needs_memory=*/true),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("`x`"), HasSubstr(GetParam().words))));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, ArrivalTest,
    ::testing::Values(
        ArrivalCase{"Shape", at::zeros({3, 2}), "arrived with shape [3, 2], expected [2, 3]"},
        ArrivalCase{"Rank", at::zeros({6}), "arrived with shape [6], expected [2, 3]"},
        ArrivalCase{"Dtype", at::zeros({2, 3}, at::kHalf), "arrived as float16, expected float32"},
        ArrivalCase{"Undefined", at::Tensor(), "is undefined"},
        ArrivalCase{"Sparse", at::zeros({2, 3}).to_sparse(), "sparse, nested or quantised"},
        ArrivalCase{"Meta", at::zeros({2, 3}, at::kMeta), "arrived on meta"}),
    [](const auto& test) { return test.param.name; });

TEST(CheckDeclaredTest, AcceptsAnyStrides) {
  EXPECT_THAT(CheckDeclared(kDeclared, at::zeros({3, 2}).t(), true), IsOk());
}

TEST(CheckDeclaredTest, AcceptsMetaWhereNothingIsRead) {
  EXPECT_THAT(CheckDeclared(kDeclared, at::zeros({2, 3}, at::kMeta), false), IsOk());
}

TEST(MatchesPatternTest, StarsMatchDots) {
  EXPECT_TRUE(MatchesPattern("layers.*.weight", "layers.0.attn.weight"));
  EXPECT_TRUE(MatchesPattern("w?", "w1"));
  EXPECT_TRUE(MatchesPattern("w[12]", "w2"));
  EXPECT_FALSE(MatchesPattern("w", "w1"));
}

}  // namespace
}  // namespace loadplan
