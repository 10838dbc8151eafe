// Symbolic memory: what was read, at a time, in terms of initial bytes.
#include "plan/resolve.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "plan/node_table.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/status_matchers.h"

namespace loadplan::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

std::vector<std::string> Texts(const absl::StatusOr<std::vector<Piece>>& pieces) {
  std::vector<std::string> texts;
  EXPECT_THAT(pieces, IsOk());
  if (!pieces.ok()) return texts;
  for (const Piece& piece : *pieces) {
    texts.push_back(absl::StrCat(piece.storage, ": ", ToString(piece.map)));
  }
  return texts;
}

absl::StatusOr<std::vector<Piece>> Read(const RecordLog& log, const View& view, Index time) {
  return SymbolicMemory(log).Resolve(view.storage, StridedMap::Identity(view.layout), {}, time);
}

// The example of the header.
class CatTest : public ::testing::Test {
 protected:
  LogBuilder log_;
  View q_ = log_.Source("q", {8});
  View k_ = log_.Source("k", {8});
  View tmp_ = log_.Temporary({16});

  CatTest() {
    log_.Copy(tmp_.Slice(0, 0, 8), q_);
    log_.Copy(tmp_.Slice(0, 8, 16), k_);
  }
};

TEST_F(CatTest, ReadsPiecesOfBoth) {
  EXPECT_THAT(Texts(Read(log_.input().log, tmp_.Slice(0, 4, 12), 2)),
              UnorderedElementsAre("0: 4 + ():() x 4 <- 4 + ():() x 4",
                                   "1: 8 + ():() x 4 <- 0 + ():() x 4"));
}

TEST_F(CatTest, ReadsWhatWasThereBefore) {
  EXPECT_THAT(Texts(Read(log_.input().log, tmp_.Slice(0, 4, 12), 1)),
              UnorderedElementsAre("0: 4 + ():() x 4 <- 4 + ():() x 4",
                                   "2: 8 + ():() x 4 <- 8 + ():() x 4"));
  EXPECT_THAT(Read(log_.input().log, tmp_, 0), IsOk());
  EXPECT_THAT(*Read(log_.input().log, tmp_, 0), SizeIs(1));
}

TEST_F(CatTest, EmptyReadsHaveNoPieces) {
  EXPECT_THAT(*Read(log_.input().log, tmp_.Slice(0, 3, 3), 2), SizeIs(0));
}

TEST_F(CatTest, KnowsItsHistory) {
  const SymbolicMemory memory(log_.input().log);
  EXPECT_THAT(memory.WritesInto(tmp_.storage), ElementsAre(0, 1));
  EXPECT_THAT(memory.WritesInto(q_.storage), ElementsAre());
  EXPECT_FALSE(memory.WasWritten(tmp_.storage, 0));
  EXPECT_TRUE(memory.WasWritten(tmp_.storage, 1));
}

TEST_F(CatTest, NamesBehindFollowSpansAndTimes) {
  const SymbolicMemory memory(log_.input().log);
  EXPECT_THAT(memory.NamesBehind(tmp_.storage, {0, 16}, 2), ElementsAre(0, 1));
  EXPECT_THAT(memory.NamesBehind(tmp_.storage, {9, 10}, 2), ElementsAre(1));
  EXPECT_THAT(memory.NamesBehind(tmp_.storage, {0, 16}, 1), ElementsAre(0));
  EXPECT_THAT(memory.NamesBehind(q_.storage, {0, 1}, 0), ElementsAre(0));
}

TEST_F(CatTest, NamesBehindGoThroughOperators) {
  const View y = log_.Node("aten::exp", {tmp_.Slice(0, 0, 8)}, {8});
  const SymbolicMemory memory(log_.input().log);
  EXPECT_THAT(memory.NamesBehind(y.storage, {0, 8}, 2), ElementsAre(0));
}

TEST(SymbolicMemoryTest, JoinsWhatACatHadCut) {
  LogBuilder log;
  const View w = log.Source("w", {6, 2});
  const View tmp = log.Temporary({6, 2});
  for (Index row = 0; row < 6; ++row) log.Copy(tmp.Select(0, row), w.Select(0, row));
  EXPECT_THAT(Texts(Read(log.input().log, tmp, log.now())),
              ElementsAre("0: 0 + ():() x 12 <- 0 + ():() x 12"));
}

// 4,096 disjoint writes in scattered order, read whole and one by one.
TEST(SymbolicMemoryTest, ManyWritesAreFoundByPlace) {
  constexpr Index kCount = 4096;
  LogBuilder log;
  const View w = log.Source("w", {kCount, 8});
  const View tmp = log.Temporary({kCount, 8});
  for (Index i = 0; i < kCount; ++i) {
    const Index row = i * 1237 % kCount;
    log.Copy(tmp.Select(0, row), w.Select(0, kCount - 1 - row));
  }
  const SymbolicMemory memory(log.input().log);
  for (Index row = 0; row < kCount; ++row) {
    const absl::StatusOr<std::vector<Piece>> pieces =
        memory.Resolve(tmp.storage, StridedMap::Identity(tmp.Select(0, row).layout), {}, log.now());
    ASSERT_THAT(pieces, IsOk());
    ASSERT_THAT(*pieces, SizeIs(1));
    EXPECT_EQ((*pieces)[0].map.from().byte_offset, (kCount - 1 - row) * 8);
  }
  const absl::StatusOr<std::vector<Piece>> whole =
      memory.Resolve(tmp.storage, StridedMap::Identity(tmp.layout), {}, log.now());
  ASSERT_THAT(whole, IsOk());
  Index nbytes = 0;
  for (const Piece& piece : *whole) nbytes += piece.map.nbytes();
  EXPECT_EQ(nbytes, kCount * 8);
}

// Work is bounded: a permutation in single bytes, over and over.
TEST(SymbolicMemoryTest, GivesUpInWordsWhereItTakesTooManySteps) {
  LogBuilder log;
  const View w = log.Source("w", {40000});
  const View tmp = log.Temporary({40000});
  for (Index i = 0; i < 40000; ++i) {
    log.Copy(tmp.Slice(0, i, i + 1), w.Slice(0, i * 7919 % 40000, i * 7919 % 40000 + 1));
  }
  EXPECT_THAT(Read(log.input().log, tmp, log.now()),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("steps")));
}

TEST(SymbolicMemoryTest, CastsAddUp) {
  LogBuilder log;
  const View w = log.Source("w", {4}, kFloat32);
  const View half = log.Temporary({4}, kBFloat16);
  const View full = log.Temporary({4}, kFloat32);
  log.Copy(half, w);
  log.Copy(full, half);
  const auto pieces = Read(log.input().log, full, 2);
  ASSERT_THAT(pieces, IsOk());
  ASSERT_THAT(*pieces, SizeIs(1));
  EXPECT_THAT((*pieces)[0].casts, ElementsAre(kFloat32, kBFloat16, kFloat32));
  EXPECT_EQ((*pieces)[0].storage, w.storage);
}

TEST(BufferMapsTest, StartAtTheFirstByte) {
  const auto maps = BufferMaps(StridedLayout::Unchecked(10, {2, 3}, {8, 2}, 2));
  ASSERT_THAT(maps, IsOk());
  ASSERT_THAT(*maps, SizeIs(1));
  EXPECT_EQ(ToString((*maps)[0]), "0 + (2, 3):(8, 2) x 2 <- 10 + (2, 3):(8, 2) x 2");
}

TEST(BufferMapsTest, WindowsThatShareBytesFillEachOnce) {
  const auto maps = BufferMaps(StridedLayout::Unchecked(4, {3, 4}, {2, 1}, 1));
  ASSERT_THAT(maps, IsOk());
  Index nbytes = 0;
  for (const StridedMap& map : *maps) {
    nbytes += map.nbytes();
    EXPECT_EQ(map.from().byte_offset, map.to().byte_offset + 4);
  }
  EXPECT_EQ(nbytes, 8);
}

TEST(BufferMapsTest, EmptyLayoutsNeedNothing) {
  EXPECT_THAT(*BufferMaps(StridedLayout::Unchecked(4, {0, 4}, {2, 1}, 1)), SizeIs(0));
}

TEST(NodeTableTest, SumsUpWhatIsBehindAChain) {
  LogBuilder log;
  const View a = log.Source("a", {2});
  const View b = log.Source("b", {2});
  const View live = log.Target("p", {2});
  View sum = log.Node("aten::exp", {b}, {2});
  for (int i = 0; i < 5000; ++i) sum = log.Node("aten::add.Tensor", {sum, a}, {2});
  const View y = log.Node("aten::add.Tensor", {sum, live}, {2});
  const RecordLog& records = log.input().log;
  const SymbolicMemory memory(records);
  NodeTable nodes(records, memory);
  const ResolvedNode& last = nodes.Get(records.storages[static_cast<size_t>(y.storage)].ref);
  EXPECT_THAT(last.names, ElementsAre(0, 1));
  EXPECT_THAT(last.needs, ElementsAre(5000));
  EXPECT_TRUE(last.reads_live);
  EXPECT_FALSE(nodes.Get(5000).reads_live);
  EXPECT_EQ(last.obstacle, "");
}

TEST(NodeTableTest, OutputsOfLaterOperatorsAreNoInputs) {
  LogBuilder log;
  const View a = log.Node("aten::exp", {log.Source("w", {2})}, {2});
  const View b = log.Node("aten::neg", {a}, {2});
  RecordLog& records = log.input().log;
  records.nodes[0].inputs[0].storage = b.storage;
  const SymbolicMemory memory(records);
  NodeTable nodes(records, memory);
  EXPECT_EQ(nodes.Get(1).obstacle,
            "`aten::exp` cannot be replayed: it reads the output of a later operator");
}

// A product is rounded in the order of its input's strides, an elementwise operator is not.
TEST(NodeTableTest, DoubtAboutALayoutIsHandedOnToWhatReadsByIt) {
  LogBuilder log;
  const View w = log.Source("w", {4, 4});
  const View svd = log.Node("aten::linalg_svd", {w}, {4, 4});
  const View scaled = log.Node("aten::mul", {svd}, {4, 4});
  log.Node("aten::matmul", {scaled}, {4, 4});
  log.Node("aten::matmul", {w}, {4, 4});
  std::vector<NodeRecord>& nodes = log.input().log.nodes;
  nodes[0].layout_is_unsure = true;
  nodes[1].is_elementwise = true;
  const SymbolicMemory memory(log.input().log);
  NodeTable table(log.input().log, memory);
  EXPECT_EQ(table.Get(0).obstacle, "");
  EXPECT_EQ(table.Get(1).obstacle, "");
  EXPECT_EQ(
      table.Get(2).obstacle,
      "`aten::matmul` cannot be replayed: it reads what `aten::mul` computed, in a layout that "
      "only a real call tells");
  EXPECT_EQ(table.Get(3).obstacle, "");
}

}  // namespace
}  // namespace loadplan::testing
