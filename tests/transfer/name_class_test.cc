#include "transfer/name_class.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/oracle.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"
#include "tests/transfer/random_shards.h"

namespace loadplan {
namespace {

using ::testing::AllOf;
using testing::Elements;
using ::testing::ElementsAre;
using testing::ForEachRandom;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::kBFloat16;
using testing::kFloat32;
using testing::RandomBox;
using testing::StatusIs;
using testing::Uniform;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// Holders are ranks 0 to 3, receivers 4 and 5.
const std::vector<std::int32_t> kHolders = {0, 1, 2, 3};
const std::vector<std::int32_t> kReceivers = {4, 5};

TEST(NameClassTest, ColumnsOutOfRows) {
  const TensorGeometry held{
      {4, 8}, kFloat32, {{0, Box({{0, 2}, {0, 8}})}, {1, Box({{2, 4}, {0, 8}})}}};
  const TensorGeometry needed{
      {4, 8}, kFloat32, {{4, Box({{0, 4}, {0, 4}})}, {5, Box({{0, 4}, {4, 8}})}}};
  const std::vector<TableStatement> statements = {{&held, &kHolders, true},
                                                  {&needed, &kReceivers, false}};
  const auto made = MakeNameClass("w", statements, {});
  ASSERT_THAT(made, IsOk());
  ASSERT_EQ(made->items.size(), 4U);
  EXPECT_EQ(made->num_receivers, 2);
  EXPECT_EQ(made->items[1].receiver, 4);
  EXPECT_EQ(made->items[1].box, Box({{2, 4}, {0, 4}}));
  EXPECT_EQ(made->items[1].nbytes, 32);
  EXPECT_THAT(made->items[1].senders, ElementsAre(1));
}

TEST(NameClassTest, OnlyWhatARankSaysOfItselfCounts) {
  const std::vector<std::int32_t> one = {1};
  const TensorGeometry held{{4}, kFloat32, {{0, Box({{0, 4}})}, {1, Box({{0, 4}})}}};
  const TensorGeometry needed{{4}, kFloat32, {{4, Box({{1, 3}})}}};
  const std::vector<TableStatement> statements = {{&held, &one, true},
                                                  {&needed, &kReceivers, false}};
  const auto made = MakeNameClass("w", statements, {});
  ASSERT_THAT(made, IsOk());
  EXPECT_THAT(made->items.at(0).senders, ElementsAre(1));
}

TEST(NameClassTest, OtherShapeOrDtype) {
  const TensorGeometry held{{4, 2}, kFloat32, {{0, Box({{0, 4}, {0, 2}})}}};
  TensorGeometry needed{{4, 3}, kFloat32, {{4, Box({{0, 4}, {0, 3}})}}};
  const std::vector<TableStatement> statements = {{&held, &kHolders, true},
                                                  {&needed, &kReceivers, false}};
  EXPECT_THAT(MakeNameClass("w", statements, {}),
              StatusIs(kInvalid, HasSubstr("`w` is (4, 2) float32 on rank 0 and (4, 3) float32 on "
                                           "rank 4")));
  needed.shape = {4, 2};
  needed.dtype = kBFloat16;
  EXPECT_THAT(MakeNameClass("w", statements, {}), StatusIs(kInvalid, HasSubstr("bfloat16")));
}

TEST(NameClassTest, NeededAndHeldByNobody) {
  const TensorGeometry held{{4}, kFloat32, {{0, Box({{0, 2}})}}};
  const TensorGeometry needed{{4}, kFloat32, {{4, Box({{1, 4}})}}};
  std::vector<TableStatement> statements = {{&held, &kHolders, true},
                                            {&needed, &kReceivers, false}};
  EXPECT_THAT(MakeNameClass("w", statements, {}),
              StatusIs(kInvalid, HasSubstr("no rank holds [2:4]")));
  EXPECT_THAT(MakeNameClass("w", statements, {.whole = false}),
              StatusIs(kInvalid, AllOf(HasSubstr("rank 4 needs [1:4] of `w`"),
                                       HasSubstr("no rank holds [2:4]"))));
  statements.erase(statements.begin());
  EXPECT_THAT(MakeNameClass("w", statements, {}),
              StatusIs(kInvalid, HasSubstr("no rank holds [1:4]")));
}

TEST(SplitBoxTest, RowsThenColumns) {
  EXPECT_THAT(SplitBox(Box({{0, 4}, {0, 8}}), 1, 100), ElementsAre(Box({{0, 4}, {0, 8}})));
  EXPECT_THAT(SplitBox(Box({{0, 3}, {0, 8}}), 1, 16),
              ElementsAre(Box({{0, 2}, {0, 8}}), Box({{2, 3}, {0, 8}})));
  EXPECT_THAT(SplitBox(Box({{5, 6}, {0, 8}}), 4, 16),
              ElementsAre(Box({{5, 6}, {0, 4}}), Box({{5, 6}, {4, 8}})));
  EXPECT_THAT(SplitBox(Box(), 8, 4), ElementsAre(Box()));
}

TEST(SplitBoxPropertyTest, IsThePackedBoxInOrder) {
  ForEachRandom(300, [](std::mt19937& gen) {
    DimVector shape;
    for (Index d = Uniform(gen, 0, 3); d > 0; --d) shape.push_back(Uniform(gen, 1, 6));
    const Box box = RandomBox(gen, shape);
    const Index limit = Uniform(gen, 1, 40);
    std::vector<Index> elements;
    for (const Box& part : SplitBox(box, 2, limit)) {
      EXPECT_LE(part.num_elements() * 2, std::max<Index>(limit, 2));
      const std::vector<Index> more = Elements(part, shape);
      elements.insert(elements.end(), more.begin(), more.end());
    }
    EXPECT_EQ(elements, Elements(box, shape));
    elements.clear();
    for (const Box& part : Stripes(box, Uniform(gen, 1, 8))) {
      const std::vector<Index> more = Elements(part, shape);
      elements.insert(elements.end(), more.begin(), more.end());
    }
    EXPECT_EQ(elements, Elements(box, shape));
  });
}

}  // namespace
}  // namespace loadplan
