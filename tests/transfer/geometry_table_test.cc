#include "transfer/geometry_table.h"

#include <string>
#include <utility>

#include "bench/cases.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::kBFloat16;
using testing::kFloat32;
using testing::StatusIs;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

GeometryTable SmallTable() {
  GeometryTableBuilder builder;
  builder.Add("b.weight",
              {{4, 6}, kBFloat16, {{0, Box({{0, 2}, {0, 6}})}, {1, Box({{2, 4}, {0, 6}})}}});
  builder.Add("a.1.weight",
              {{4, 6}, kBFloat16, {{0, Box({{0, 2}, {0, 6}})}, {1, Box({{2, 4}, {0, 6}})}}});
  builder.Add("a.1.bias", {{}, kFloat32, {{5, Box()}}});
  builder.Add("", {{0}, kFloat32, {}});
  return std::move(builder).Build().value();
}

TEST(GeometryTableTest, NamesAreSortedAndShareGeometries) {
  const GeometryTable table = SmallTable();
  EXPECT_THAT(*table.names(), ElementsAre("", "a.1.bias", "a.1.weight", "b.weight"));
  EXPECT_EQ(table.geometries().size(), 3U);
  EXPECT_EQ(table.geometry_of()[2], table.geometry_of()[3]);
  EXPECT_EQ(table.geometries()[0].nbytes(), 48);
}

TEST(GeometryTableTest, RoundTrip) {
  const GeometryTable table = SmallTable();
  const auto names = GeometryTable::DecodeNames(GeometryTable::EncodeNames(*table.names()));
  ASSERT_THAT(names, IsOk());
  EXPECT_EQ(**names, *table.names());
  const auto decoded = GeometryTable::Decode(*names, table.EncodeGeometries());
  ASSERT_THAT(decoded, IsOk());
  EXPECT_EQ(decoded->geometries(), table.geometries());
  EXPECT_EQ(decoded->geometry_of(), table.geometry_of());
  EXPECT_EQ(decoded->geometries()[1].dtype.name, table.geometries()[1].dtype.name);
}

TEST(GeometryTableTest, TwiceIsRefused) {
  GeometryTableBuilder builder;
  builder.Add("w", {{1}, kFloat32, {}});
  builder.Add("w", {{2}, kFloat32, {}});
  EXPECT_THAT(std::move(builder).Build(), StatusIs(kInvalid, HasSubstr("`w` is described twice")));
}

// Every cut and every changed byte is an error or another table, never a crash.
TEST(GeometryTableTest, MalformedBytesAreRefused) {
  const GeometryTable table = SmallTable();
  const std::string names = GeometryTable::EncodeNames(*table.names());
  const std::string geometries = table.EncodeGeometries();
  for (std::size_t cut = 0; cut < names.size(); ++cut) {
    EXPECT_THAT(GeometryTable::DecodeNames(names.substr(0, cut)),
                StatusIs(kInvalid, HasSubstr("described its names")));
  }
  for (std::size_t cut = 0; cut < geometries.size(); ++cut) {
    EXPECT_THAT(GeometryTable::Decode(table.names(), geometries.substr(0, cut)),
                StatusIs(kInvalid, HasSubstr("described its tensors")));
  }
  EXPECT_THAT(GeometryTable::DecodeNames(names + "x"), StatusIs(kInvalid, HasSubstr("version")));
  for (std::size_t at = 0; at < geometries.size(); ++at) {
    for (const int value : {0, 1, 127, 128, 255}) {
      std::string changed = geometries;
      changed[at] = static_cast<char>(value);
      (void)GeometryTable::Decode(table.names(), changed);
    }
  }
  for (std::size_t at = 0; at < names.size(); ++at) {
    for (const int value : {0, 1, 127, 128, 255}) {
      std::string changed = names;
      changed[at] = static_cast<char>(value);
      (void)GeometryTable::DecodeNames(changed);
    }
  }
}

TEST(GeometryTableTest, NeededBoxesOfAPlan) {
  const auto plan = BuildLoadPlan(bench::MakeK2({.layers = 2}));
  ASSERT_THAT(plan, IsOk());
  const auto table = NeededTable(*plan, 7);
  ASSERT_THAT(table, IsOk());
  ASSERT_EQ(table->names()->size(), plan->sources().size());
  // A few geometries for more than a thousand names, a few bytes for each of them.
  EXPECT_LE(table->geometries().size(), 30U);
  EXPECT_LE(GeometryTable::EncodeNames(*table->names()).size(), 9 * plan->sources().size());
  for (std::size_t i = 0; i < table->names()->size(); ++i) {
    const std::int32_t entry = *plan->Find((*table->names())[i]);
    const TensorGeometry& geometry =
        table->geometries()[static_cast<std::size_t>(table->geometry_of()[i])];
    EXPECT_EQ(geometry.shape, plan->sources()[static_cast<std::size_t>(entry)].shape);
    const std::vector<Box> reads = plan->Reads(entry);
    ASSERT_EQ(geometry.pieces.size(), reads.size());
    for (std::size_t k = 0; k < reads.size(); ++k) {
      EXPECT_EQ(geometry.pieces[k], (ShardPiece{7, reads[k]}));
    }
  }
}

}  // namespace
}  // namespace loadplan
