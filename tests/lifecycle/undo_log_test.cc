#include "lifecycle/undo_log.h"

#include <ATen/ATen.h>
#include <dirent.h>

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using ::loadplan::testing::IsOk;
using ::loadplan::testing::StatusIs;
using ::testing::HasSubstr;

StridedLayout Range(Index start, Index stop) {
  return StridedLayout::Unchecked(start, {stop - start}, {1}, 1);
}

class UndoLogTest : public ::testing::TestWithParam<Index> {
 protected:
  // In memory, in a file, or the first bytes here and the others there.
  UndoLog log_{{.memory_nbytes = GetParam()}};
  const at::Tensor live_ = at::randint(0, 256, {6, 8}, at::kByte);
  const at::Tensor before_ = live_.clone();
};

TEST_P(UndoLogTest, PutsRegionsBackAndForgetsThem) {
  const StridedLayout column = StridedLayout::Unchecked(3, {6}, {8}, 2);
  ASSERT_THAT(log_.Keep(live_, column), IsOk());
  ASSERT_THAT(log_.Keep(live_, Range(8, 11)), IsOk());
  EXPECT_EQ(log_.memory_nbytes() + log_.file_nbytes(), 15);
  live_.narrow(1, 3, 2).fill_(1);
  live_[1].narrow(0, 0, 3).fill_(2);
  live_[5][7] = 9;  // not kept
  ASSERT_THAT(log_.PutBack(), IsOk());
  EXPECT_TRUE(log_.empty());
  at::Tensor expected = before_.clone();
  expected[5][7] = 9;
  EXPECT_TRUE(at::equal(live_, expected));
  live_.fill_(3);
  ASSERT_THAT(log_.PutBack(), IsOk());
  EXPECT_TRUE((live_ == 3).all().item<bool>());
}

TEST_P(UndoLogTest, AWholeStorageTakesTheBytesOfItsRegions) {
  ASSERT_THAT(log_.Keep(live_, Range(0, 4)), IsOk());
  live_[0].fill_(1);
  // The other four bytes of the row are lost: nobody kept them.
  ASSERT_THAT(log_.KeepWhole(live_[2]), IsOk());
  EXPECT_EQ(log_.memory_nbytes() + log_.file_nbytes(), GetParam() == 0 ? 52 : 48);
  ASSERT_THAT(log_.KeepWhole(live_), IsOk());
  live_.fill_(2);
  ASSERT_THAT(log_.Keep(live_, Range(20, 24)), IsOk());  // is kept already
  ASSERT_THAT(log_.PutBack(), IsOk());
  at::Tensor expected = before_.clone();
  expected[0].narrow(0, 4, 4).fill_(1);
  EXPECT_TRUE(at::equal(live_, expected));
}

TEST_P(UndoLogTest, DropsStoragesThatNothingElseHolds) {
  ASSERT_THAT(log_.KeepWhole(live_.alias()), IsOk());
  ASSERT_THAT(log_.KeepWhole(at::ones({3})), IsOk());
  log_.DropUnshared();
  EXPECT_LE(log_.memory_nbytes(), 48);
  live_.fill_(1);
  ASSERT_THAT(log_.PutBack(), IsOk());
  EXPECT_TRUE(at::equal(live_, before_));
}

INSTANTIATE_TEST_SUITE_P(Places, UndoLogTest, ::testing::Values(-1, 0, 13), [](const auto& test) {
  return test.param < 0 ? "Memory" : test.param == 0 ? "File" : "Both";
});

TEST(UndoLogFileTest, SaysThatItCannotKeep) {
  UndoLog log({.memory_nbytes = 0, .directory = "/nowhere"});
  const at::Tensor live = at::zeros({4});
  EXPECT_THAT(log.Keep(live, Range(0, 16)),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("could not be kept: 16 bytes after 0 in memory and 0 in a file "
                                 "in `/nowhere`")));
}

TEST(UndoLogFileTest, HasNoName) {
  const std::string directory = ::testing::TempDir() + "/undo_log_test";
  ASSERT_EQ(system(("mkdir -p " + directory).c_str()), 0);
  UndoLog log({.memory_nbytes = 0, .directory = directory});
  const at::Tensor live = at::zeros({4});
  ASSERT_THAT(log.Keep(live, Range(0, 16)), IsOk());
  DIR* const folder = opendir(directory.c_str());
  int count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  EXPECT_EQ(count, 2);  // itself and its parent
}

TEST(UndoLogTest, MetaHasNothingToKeep) {
  UndoLog log({});
  EXPECT_THAT(log.KeepWhole(at::zeros({4}, at::kMeta)), IsOk());
  EXPECT_TRUE(log.empty());
}

}  // namespace
}  // namespace loadplan
