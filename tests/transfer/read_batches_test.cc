#include "transfer/read_batches.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/transfer/written_files.h"

namespace loadplan {
namespace {

using ::loadplan::testing::WrittenFiles;
using ::testing::ElementsAre;

std::vector<std::string> Show(const std::vector<ReadBatch>& batches) {
  std::vector<std::string> shown;
  for (const ReadBatch& batch : batches) {
    std::string text;
    for (const Segment& segment : batch.segments) {
      text += std::to_string(segment.tensor) + "[" + std::to_string(segment.bytes.start) + "," +
              std::to_string(segment.bytes.stop) + ") ";
    }
    text += "|";
    for (const std::int32_t tensor : batch.finishes) text += " " + std::to_string(tensor);
    shown.push_back(text);
  }
  return shown;
}

TEST(ReadBatchesTest, FilesTakeTurnsAndTensorsStayWhole) {
  WrittenFiles written;
  const auto first = written.Write({{"a", at::zeros({60}, at::kByte)},
                                    {"b", at::zeros({60}, at::kByte)},
                                    {"none", at::zeros({10}, at::kByte)},
                                    {"big", at::zeros({250}, at::kByte)},
                                    {"last", at::zeros({5}, at::kByte)}});
  const auto second = written.Write({{"z", at::zeros({5}, at::kByte)}});
  const auto files = CheckpointFiles::Open(std::vector<std::string>{first, second}).value();
  const std::vector<std::vector<ByteRange>> ranges = {
      {{0, 60}}, {{0, 20}, {30, 60}}, {}, {{0, 250}}, {{0, 5}}, {{1, 4}}};
  const std::vector<bool> none(6, false);
  EXPECT_THAT(Show(MakeBatches(files, ranges, none, {100})),
              ElementsAre("0[0,60) | 0", "5[1,4) | 5", "1[0,20) 1[30,60) | 1 2", "3[0,250) | 3",
                          "4[0,5) | 4"));
  EXPECT_EQ(MakeBatches(files, ranges, none, {100})[2].nbytes, 50);
  // What is larger than all that may be is cut.
  EXPECT_THAT(Show(MakeBatches(files, ranges, none, {.nbytes = 100, .most = 200})),
              ElementsAre("0[0,60) | 0", "5[1,4) | 5", "1[0,20) 1[30,60) | 1 2", "3[0,100) |",
                          "3[100,200) |", "3[200,250) | 3", "4[0,5) | 4"));
  EXPECT_THAT(Show(MakeBatches(files, ranges, {true, false, true, true, true, true}, {100})),
              ElementsAre("1[0,20) 1[30,60) | 1"));
}

TEST(ReadBatchesTest, SegmentsAreWhatOneThreadCopies) {
  WrittenFiles written;
  const auto path = written.Write({{"a", at::zeros({2 * kMaxSegment + 9}, at::kByte)}});
  const auto files = CheckpointFiles::Open(std::vector<std::string>{path}).value();
  const std::vector<ReadBatch> batches =
      MakeBatches(files, std::vector<std::vector<ByteRange>>{{{5, 2 * kMaxSegment + 9}}}, {false},
                  {.nbytes = 100});
  ASSERT_EQ(batches.size(), 1U);
  ASSERT_EQ(batches[0].segments.size(), 3U);
  EXPECT_EQ(batches[0].segments[1].bytes.start, kMaxSegment + 5);
  EXPECT_EQ(batches[0].segments[2].bytes.nbytes(), 4);
}

// In the file `a` is [0, 60), `b` [60, 120), `c` [120, 370) behind the header.
TEST(ReadBatchesTest, ASpanBoundsWhatLiesBetween) {
  WrittenFiles written;
  const auto path = written.Write({{"a", at::zeros({60}, at::kByte)},
                                   {"b", at::zeros({60}, at::kByte)},
                                   {"c", at::zeros({250}, at::kByte)}});
  const auto files = CheckpointFiles::Open(std::vector<std::string>{path}).value();
  const std::vector<std::vector<ByteRange>> ranges = {
      {{0, 10}}, {{0, 20}, {30, 60}}, {{0, 10}, {150, 160}, {240, 250}}};
  const std::vector<bool> none(3, false);
  EXPECT_THAT(Show(MakeBatches(files, ranges, none, {100, 125})),
              ElementsAre("0[0,10) 1[0,20) 1[30,60) | 0 1", "2[0,10) 2[150,160) 2[240,250) | 2"));
  EXPECT_THAT(
      Show(MakeBatches(files, ranges, none, {100, 125, 20})),
      ElementsAre("0[0,10) 1[0,20) 1[30,60) | 0 1", "2[0,10) |", "2[150,160) 2[240,250) | 2"));
}

TEST(ReadBatchesTest, EqualStepsBecomeOneMap) {
  const std::vector<ByteRun> rows = {{0, 8, 4}, {10, 12, 4}, {20, 16, 4}, {30, 20, 4}};
  ASSERT_EQ(ToMaps(rows).size(), 1U);
  EXPECT_EQ(ToString(ToMaps(rows).front()), "0 + (4):(10) x 4 <- 8 + (4):(4) x 4");
  const std::vector<ByteRun> uneven = {{0, 8, 4}, {10, 12, 4}, {21, 16, 4}, {30, 20, 3}};
  EXPECT_EQ(ToMaps(uneven).size(), 3U);
  EXPECT_TRUE(ToMaps({}).empty());
}

}  // namespace
}  // namespace loadplan
