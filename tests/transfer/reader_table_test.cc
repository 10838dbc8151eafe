#include "transfer/reader_table.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/oracle.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"
#include "tests/transfer/random_shards.h"

namespace loadplan {
namespace {

using testing::Elements;
using testing::ForEachRandom;
using testing::IsOk;
using testing::kFloat32;
using testing::RandomBox;
using testing::Uniform;

using Described = std::map<std::string, TensorGeometry>;

std::vector<RankTables> TablesOf(const std::vector<Described>& needed) {
  std::vector<RankTables> ranks;
  for (const Described& of_rank : needed) {
    GeometryTableBuilder builder;
    for (const auto& [name, geometry] : of_rank) builder.Add(name, geometry);
    ranks.push_back(
        {nullptr, std::make_shared<const GeometryTable>(std::move(builder).Build().value())});
  }
  return ranks;
}

const TensorGeometry& GeometryOf(const GeometryTable& table, const std::string& name) {
  const auto at = std::ranges::find(*table.names(), name) - table.names()->begin();
  return table
      .geometries()[static_cast<std::size_t>(table.geometry_of()[static_cast<std::size_t>(at)])];
}

TEST(ReaderTableTest, RowsAreReadByWhoNeedsThem) {
  const auto table =
      ReaderTable(TablesOf({{{"w", {{4, 8}, kFloat32, {{0, Box({{0, 2}, {0, 8}})}}}}},
                            {{"w", {{4, 8}, kFloat32, {{1, Box({{2, 4}, {0, 8}})}}}}}}));
  ASSERT_THAT(table, IsOk());
  EXPECT_EQ(GeometryOf(*table, "w").pieces,
            (std::vector<ShardPiece>{{0, Box({{0, 2}, {0, 8}})}, {1, Box({{2, 4}, {0, 8}})}}));
}

TEST(ReaderTableTest, ColumnsAreReadTogether) {
  const DimVector shape = {1024, 1024};
  const auto table =
      ReaderTable(TablesOf({{{"w", {shape, kFloat32, {{0, Box({{0, 1024}, {0, 512}})}}}}},
                            {{"w", {shape, kFloat32, {{1, Box({{0, 1024}, {512, 1024}})}}}}}}));
  ASSERT_THAT(table, IsOk());
  EXPECT_EQ(GeometryOf(*table, "w").pieces,
            (std::vector<ShardPiece>{{0, Box({{0, 512}, {0, 1024}})},
                                     {1, Box({{512, 1024}, {0, 1024}})}}));
}

TEST(ReaderTableTest, SmallNamesTakeTurns) {
  std::vector<Described> needed(2);
  for (std::int32_t rank = 0; rank < 2; ++rank) {
    for (int i = 0; i < 4; ++i) {
      needed[static_cast<std::size_t>(rank)][absl::StrCat("n", i)] = {
          {8}, kFloat32, {{rank, Box({{0, 8}})}}};
    }
  }
  const auto table = ReaderTable(TablesOf(needed));
  ASSERT_THAT(table, IsOk());
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(GeometryOf(*table, absl::StrCat("n", i)).pieces,
              (std::vector<ShardPiece>{{i % 2, Box({{0, 8}})}}));
  }
}

TEST(ReaderTablePropertyTest, EachNeededElementIsReadOnce) {
  ForEachRandom(200, [](std::mt19937& gen) {
    std::vector<Described> needed(static_cast<std::size_t>(Uniform(gen, 1, 4)));
    std::map<std::string, std::vector<int>> wanted;
    for (int n = 0; n < 4; ++n) {
      const std::string name = absl::StrCat("n", n);
      const DimVector shape = {Uniform(gen, 1, 6), Uniform(gen, 1, 6)};
      std::vector<int>& count = wanted[name];
      count.assign(static_cast<std::size_t>(shape[0] * shape[1]), 0);
      for (std::size_t rank = 0; rank < needed.size(); ++rank) {
        TensorGeometry geometry{shape, kFloat32, {}};
        for (Index k = Uniform(gen, 0, 2); k > 0; --k) {
          geometry.pieces.push_back({static_cast<std::int32_t>(rank), RandomBox(gen, shape)});
          for (const Index element : Elements(geometry.pieces.back().box, shape)) {
            count[static_cast<std::size_t>(element)] = 1;
          }
        }
        needed[rank][name] = std::move(geometry);
      }
    }
    const auto table = ReaderTable(TablesOf(needed));
    ASSERT_THAT(table, IsOk());
    for (auto& [name, count] : wanted) {
      std::vector<int> read(count.size(), 0);
      if (std::ranges::find(*table->names(), name) != table->names()->end()) {
        const TensorGeometry& geometry = GeometryOf(*table, name);
        for (const ShardPiece& piece : geometry.pieces) {
          for (const Index element : Elements(piece.box, geometry.shape)) {
            ++read[static_cast<std::size_t>(element)];
          }
        }
      }
      EXPECT_EQ(read, count) << name;
    }
  });
}

}  // namespace
}  // namespace loadplan
