#include "transfer/schedule.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
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

using ::testing::AllOf;
using ::testing::Each;
using testing::Elements;
using testing::ForEachRandom;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::kBFloat16;
using testing::kFloat32;
using testing::RandomBox;
using testing::RandomPartition;
using testing::StatusIs;
using testing::Uniform;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

using Pieces = std::vector<ShardPiece>;
using Described = std::map<std::string, TensorGeometry>;

std::shared_ptr<const GeometryTable> Table(const Described& tensors) {
  GeometryTableBuilder builder;
  for (const auto& [name, geometry] : tensors) builder.Add(name, geometry);
  return std::make_shared<const GeometryTable>(std::move(builder).Build().value());
}

// The messages that `rank` sends, or receives, as text: what both ends have to agree on.
std::multiset<std::string> Texts(const Schedule& schedule, std::int32_t rank, bool sends,
                                 std::int32_t peer) {
  std::multiset<std::string> texts;
  for (const Message& message : schedule.MessagesOf(rank)) {
    if ((sends ? message.sender : message.receiver) != rank) continue;
    if ((sends ? message.receiver : message.sender) != peer) continue;
    std::string text = absl::StrCat(message.index, " ", message.nbytes);
    for (const MessagePart& part : message.parts)
      absl::StrAppend(&text, " ", part.name, ":", part.chunk);
    texts.insert(text);
  }
  return texts;
}

// What every rank receives, and what is true of any schedule.
void CheckSchedule(const Schedule& schedule, const std::vector<RankTables>& ranks,
                   const ScheduleOptions& options) {
  for (std::int32_t rank = 0; rank < schedule.num_ranks(); ++rank) {
    std::map<std::string, std::multiset<Index>> got;
    std::tuple<Index, Index, Index> last = {-1, -1, -1};
    std::vector<std::int32_t> num_parts(schedule.names().size(), 0);
    for (const Message& message : schedule.MessagesOf(rank)) {
      const Index n = schedule.num_ranks();
      const std::tuple<Index, Index, Index> key = {
          message.index, (message.receiver - message.sender + n) % n, message.sender};
      EXPECT_LT(last, key);
      last = key;
      Index nbytes = 0;
      for (const MessagePart& part : message.parts) {
        nbytes += schedule.ChunkOf(part).nbytes;
        // Alone it can be received in place.
        const bool is_large = schedule.ChunkOf(part).nbytes >= options.solo_nbytes;
        EXPECT_TRUE(!is_large || message.parts.size() == 1);
      }
      EXPECT_EQ(nbytes, message.nbytes);
      EXPECT_LE(nbytes, std::max<Index>(options.bucket_nbytes, 4));
      if (message.receiver != rank) continue;
      for (const MessagePart& part : message.parts) {
        const NameClass& name_class = schedule.ClassOf(part.name);
        const std::string& name = schedule.names()[static_cast<std::size_t>(part.name)];
        ++num_parts[static_cast<std::size_t>(part.name)];
        const Box& box = schedule.ChunkOf(part).box;
        const std::vector<Index> elements = Elements(box, name_class.shape);
        got[name].insert(elements.begin(), elements.end());
        // The sender holds all of it.
        const GeometryTable& held = *ranks[static_cast<std::size_t>(message.sender)].held;
        const auto at = std::ranges::find(*held.names(), name) - held.names()->begin();
        const TensorGeometry& geometry = held.geometries()[static_cast<std::size_t>(
            held.geometry_of()[static_cast<std::size_t>(at)])];
        EXPECT_TRUE(std::ranges::any_of(geometry.pieces,
                                        [&](const ShardPiece& piece) {
                                          return piece.rank == message.sender &&
                                                 Intersect(piece.box, box) == box;
                                        }))
            << name << " " << ToString(box);
      }
    }
    EXPECT_EQ(num_parts, schedule.NumPartsTo(rank));
    std::map<std::string, std::multiset<Index>> wanted;
    if (const auto& needed = ranks[static_cast<std::size_t>(rank)].needed) {
      for (std::size_t i = 0; i < needed->names()->size(); ++i) {
        const TensorGeometry& geometry =
            needed->geometries()[static_cast<std::size_t>(needed->geometry_of()[i])];
        for (const ShardPiece& piece : geometry.pieces) {
          const std::vector<Index> elements = Elements(piece.box, geometry.shape);
          wanted[(*needed->names())[i]].insert(elements.begin(), elements.end());
        }
      }
    }
    EXPECT_EQ(got, wanted) << "rank " << rank;
    for (std::int32_t peer = 0; peer < schedule.num_ranks(); ++peer) {
      if (peer == rank) continue;
      EXPECT_EQ(Texts(schedule, rank, true, peer), Texts(schedule, peer, false, rank));
    }
  }
}

// Ranks that hold at most `window` messages at a time, each handled in order, finish.
void CheckNobodyWaitsInACircle(const Schedule& schedule, std::size_t window) {
  const auto n = static_cast<std::size_t>(schedule.num_ranks());
  std::vector<std::vector<Message>> lists;
  for (std::size_t rank = 0; rank < n; ++rank) {
    lists.push_back(schedule.MessagesOf(static_cast<std::int32_t>(rank)));
  }
  std::vector<std::size_t> next(n, 0);  // all before it are done
  const auto is_posted = [&](std::int32_t rank, const Message& message) {
    const auto& list = lists[static_cast<std::size_t>(rank)];
    const std::size_t from = next[static_cast<std::size_t>(rank)];
    for (std::size_t i = from; i < std::min(from + window, list.size()); ++i) {
      if (list[i].sender == message.sender && list[i].receiver == message.receiver &&
          list[i].index == message.index) {
        return true;
      }
    }
    return false;
  };
  bool moved = true;
  while (moved) {
    moved = false;
    for (std::size_t rank = 0; rank < n; ++rank) {
      if (next[rank] == lists[rank].size()) continue;
      const Message& message = lists[rank][next[rank]];
      const auto r = static_cast<std::int32_t>(rank);
      const std::int32_t peer = message.sender == r ? message.receiver : message.sender;
      // The peer may have finished with it: a send that was received is done.
      const auto& other = lists[static_cast<std::size_t>(peer)];
      const std::size_t done = next[static_cast<std::size_t>(peer)];
      bool is_done = peer == r;
      for (std::size_t i = 0; i < done; ++i) {
        is_done =
            is_done || (other[i].sender == message.sender &&
                        other[i].receiver == message.receiver && other[i].index == message.index);
      }
      if (is_done || is_posted(peer, message)) {
        ++next[rank];
        moved = true;
      }
    }
  }
  for (std::size_t rank = 0; rank < n; ++rank) EXPECT_EQ(next[rank], lists[rank].size());
}

TEST(SchedulePropertyTest, EveryNeededElementCrossesOnce) {
  ForEachRandom(150, [](std::mt19937& gen) {
    const auto num_ranks = static_cast<std::size_t>(Uniform(gen, 1, 6));
    const auto num_holders = Uniform(gen, 1, static_cast<Index>(num_ranks));
    std::vector<Described> held(num_ranks);
    std::vector<Described> needed(num_ranks);
    for (Index n = Uniform(gen, 1, 8); n > 0; --n) {
      DimVector shape;
      for (Index d = Uniform(gen, 0, 3); d > 0; --d) shape.push_back(Uniform(gen, 1, 7));
      const DType dtype = Uniform(gen, 0, 1) == 0 ? kFloat32 : kBFloat16;
      // Some names share all of their geometry, others none of it.
      const auto alike = static_cast<std::size_t>(Uniform(gen, 1, 5));
      std::vector<Pieces> of_rank(num_ranks);
      for (const ShardPiece& piece : RandomPartition(gen, Box::Whole(shape), 5)) {
        std::set<Index> holders;
        for (Index k = Uniform(gen, 1, 3); k > 0; --k)
          holders.insert(Uniform(gen, 0, num_holders - 1));
        for (const Index rank : holders) {
          of_rank[static_cast<std::size_t>(rank)].push_back(
              {static_cast<std::int32_t>(rank), piece.box});
        }
      }
      // Some overlap others.
      for (Index k = Uniform(gen, 0, 2); k > 0; --k) {
        const auto rank = static_cast<std::int32_t>(Uniform(gen, 0, num_holders - 1));
        const ShardPiece piece = {rank, RandomBox(gen, shape)};
        Pieces& own = of_rank[static_cast<std::size_t>(rank)];
        if (std::ranges::find(own, piece) == own.end()) own.push_back(piece);
      }
      std::vector<Pieces> boxes(num_ranks);
      for (std::size_t rank = 0; rank < num_ranks; ++rank) {
        if (Uniform(gen, 0, 2) == 0) continue;
        for (ShardPiece& piece : RandomPartition(gen, RandomBox(gen, shape), 3)) {
          boxes[rank].push_back({static_cast<std::int32_t>(rank), piece.box});
        }
      }
      for (std::size_t k = 0; k < alike; ++k) {
        const std::string name = absl::StrCat("layer.", n, ".", k);
        for (std::size_t rank = 0; rank < num_ranks; ++rank) {
          if (!of_rank[rank].empty()) held[rank][name] = {shape, dtype, of_rank[rank]};
          if (!boxes[rank].empty() || Uniform(gen, 0, 1) == 0) {
            needed[rank][name] = {shape, dtype, boxes[rank]};
          }
        }
      }
    }
    std::vector<RankTables> ranks(num_ranks);
    for (std::size_t rank = 0; rank < num_ranks; ++rank) {
      if (!held[rank].empty()) ranks[rank].held = Table(held[rank]);
      if (!needed[rank].empty()) ranks[rank].needed = Table(needed[rank]);
    }
    const ScheduleOptions options{.bucket_nbytes = Uniform(gen, 4, 200),
                                  .solo_nbytes = Uniform(gen, 1, 100)};
    const auto schedule = Schedule::Make(ranks, options);
    ASSERT_THAT(schedule, IsOk());
    CheckSchedule(*schedule, ranks, options);
    CheckNobodyWaitsInACircle(*schedule, static_cast<std::size_t>(Uniform(gen, 1, 3)));
    Index total = 0;
    for (std::int32_t rank = 0; rank < schedule->num_ranks(); ++rank) {
      for (const Message& message : schedule->MessagesOf(rank)) {
        if (message.receiver == rank && message.sender != rank) total += message.nbytes;
      }
    }
    EXPECT_EQ(total, schedule->traffic().total_nbytes);
  });
}

// D4: eight replicas of two row blocks.
TEST(ScheduleTest, ReplicasCostWhatOneDoes) {
  Pieces pieces;
  for (std::int32_t rank = 0; rank < 16; ++rank) {
    pieces.push_back({rank, rank % 2 == 0 ? Box({{0, 4}, {0, 4}}) : Box({{4, 8}, {0, 4}})});
  }
  std::vector<RankTables> ranks(17);
  const auto held = Table({{"w", {{8, 4}, kBFloat16, pieces}}});
  for (std::size_t rank = 0; rank < 16; ++rank) ranks[rank].held = held;
  ranks[16].needed = Table({{"w", {{8, 4}, kBFloat16, {{16, Box({{0, 8}, {0, 4}})}}}}});
  const auto schedule = Schedule::Make(ranks, {});
  ASSERT_THAT(schedule, IsOk());
  EXPECT_EQ(schedule->traffic().total_nbytes, 64);
  EXPECT_EQ(schedule->MessagesOf(16).size(), 2U);
}

// D8: rows [0:3) and [2:4) of a (4, 4) make 64 bytes, and not 80.
TEST(ScheduleTest, WhatOverlapsCrossesOnce) {
  std::vector<RankTables> ranks(3);
  ranks[0].held = Table({{"w", {{4, 4}, kFloat32, {{0, Box({{0, 3}, {0, 4}})}}}}});
  ranks[1].held = Table({{"w", {{4, 4}, kFloat32, {{1, Box({{2, 4}, {0, 4}})}}}}});
  ranks[2].needed = Table({{"w", {{4, 4}, kFloat32, {{2, Box({{0, 4}, {0, 4}})}}}}});
  const auto schedule = Schedule::Make(ranks, {});
  ASSERT_THAT(schedule, IsOk());
  EXPECT_EQ(schedule->traffic().total_nbytes, 64);
  CheckSchedule(*schedule, ranks, {});
}

TEST(ScheduleTest, ReplicasTakeTurns) {
  // Forty equal names on four ranks, and a large one that only rank 0 holds: rank 0 sends less.
  const Box whole({{0, 256}});
  Described held;
  Described needed;
  for (int i = 0; i < 40; ++i) {
    const std::string name = absl::StrCat("n", i);
    held[name] = {{256}, kFloat32, {{0, whole}, {1, whole}, {2, whole}, {3, whole}}};
    needed[name] = {{256}, kFloat32, {{4, whole}, {5, whole}}};
  }
  std::vector<RankTables> ranks(6);
  for (std::size_t rank = 0; rank < 4; ++rank) ranks[rank].held = Table(held);
  for (std::size_t rank = 4; rank < 6; ++rank) ranks[rank].needed = Table(needed);
  const auto schedule = Schedule::Make(ranks, {});
  ASSERT_THAT(schedule, IsOk());
  EXPECT_EQ(schedule->num_classes(), 1U);
  for (std::size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(schedule->traffic().sent[rank], 20 * 1024);
  }
  EXPECT_THAT(schedule->Report(),
              AllOf(HasSubstr("40 of 40 names in 1 classes"),
                    HasSubstr("busiest sender   20.0 KiB, 1.00 of the lower bound"),
                    HasSubstr("rank 0 sends")));
}

TEST(ScheduleTest, OneLargeNameIsCutForItsOwners) {
  const Box whole({{0, 1000}, {0, 100}});
  std::vector<RankTables> ranks(5);
  const auto held =
      Table({{"w", {{1000, 100}, kFloat32, {{0, whole}, {1, whole}, {2, whole}, {3, whole}}}}});
  for (std::size_t rank = 0; rank < 4; ++rank) ranks[rank].held = held;
  ranks[4].needed = Table({{"w", {{1000, 100}, kFloat32, {{4, whole}}}}});
  const auto schedule = Schedule::Make(ranks, {.bucket_nbytes = 20000, .solo_nbytes = 1000});
  ASSERT_THAT(schedule, IsOk());
  for (std::size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(schedule->traffic().sent[rank], 100000);
  }
}

TEST(ScheduleTest, WhatARankHoldsItCopies) {
  std::vector<RankTables> ranks(2);
  const Box whole({{0, 8}});
  for (std::int32_t rank = 0; rank < 2; ++rank) {
    ranks[static_cast<std::size_t>(rank)].held = Table({{"w", {{8}, kFloat32, {{rank, whole}}}}});
    ranks[static_cast<std::size_t>(rank)].needed = Table({{"w", {{8}, kFloat32, {{rank, whole}}}}});
  }
  const auto schedule = Schedule::Make(ranks, {});
  ASSERT_THAT(schedule, IsOk());
  EXPECT_EQ(schedule->traffic().total_nbytes, 0);
  EXPECT_EQ(schedule->traffic().local_nbytes, 64);
}

TEST(ScheduleTest, NameThatNobodyHolds) {
  std::vector<RankTables> ranks(2);
  ranks[0].held = Table({{"v", {{8}, kFloat32, {{0, Box({{0, 8}})}}}}});
  ranks[1].needed = Table({{"w", {{8}, kFloat32, {{1, Box({{2, 4}})}}}}});
  EXPECT_THAT(Schedule::Make(ranks, {}),
              StatusIs(kInvalid, HasSubstr("rank 1 needs [2:4] of `w` and no rank holds [2:4]")));
}

// The shape of PEER case D11: what is held and needed is cut along other dimensions.
TEST(ScheduleTest, TotalBytesAreTheTensor) {
  for (const auto& [holders, receivers] : {std::pair(4, 8), std::pair(8, 4), std::pair(3, 5)}) {
    for (const bool columns : {false, true}) {
      std::vector<RankTables> ranks(static_cast<std::size_t>(holders + receivers));
      for (int r = 0; r < holders; ++r) {
        const Interval rows{64 * r / holders, 64 * (r + 1) / holders};
        ranks[static_cast<std::size_t>(r)].held =
            Table({{"w", {{64, 16}, kFloat32, {{r, Box({rows, {0, 16}})}}}}});
      }
      for (int r = 0; r < receivers; ++r) {
        const Index extent = columns ? 16 : 64;
        const Interval part{extent * r / receivers, extent * (r + 1) / receivers};
        const Box box = columns ? Box({{0, 64}, part}) : Box({part, {0, 16}});
        ranks[static_cast<std::size_t>(holders + r)].needed =
            Table({{"w", {{64, 16}, kFloat32, {{holders + r, box}}}}});
      }
      const auto schedule = Schedule::Make(ranks, {});
      ASSERT_THAT(schedule, IsOk());
      CheckSchedule(*schedule, ranks, {});
      EXPECT_EQ(schedule->traffic().total_nbytes, 64 * 16 * 4);
      EXPECT_EQ(schedule->traffic().broadcast_nbytes, 64 * 16 * 4 * receivers);
    }
  }
}

TEST(ScheduleTest, NoRanksNoNames) {
  const auto schedule = Schedule::Make({}, {});
  ASSERT_THAT(schedule, IsOk());
  EXPECT_EQ(schedule->traffic().total_nbytes, 0);
  const auto idle = Schedule::Make(std::vector<RankTables>(3), {});
  ASSERT_THAT(idle, IsOk());
  EXPECT_TRUE(idle->MessagesOf(1).empty());
}

}  // namespace
}  // namespace loadplan
