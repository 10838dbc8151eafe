#include "transfer/file_shards.h"

#include <ATen/ATen.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/status_matchers.h"
#include "tests/transfer/written_files.h"
#include "transfer/reader_table.h"

namespace loadplan {
namespace {

using ::loadplan::testing::IsOk;
using ::loadplan::testing::LogBuilder;
using ::loadplan::testing::StatusIs;
using ::loadplan::testing::View;
using ::loadplan::testing::WrittenFiles;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// One rank that needs all of `a` and `b`, 8 bytes each.
class FileShardsTest : public ::testing::Test {
 protected:
  FileShardsTest() : plan_(MakePlan()) {}

  static LoadPlan MakePlan() {
    LogBuilder log;
    for (const char* name : {"a", "b"}) {
      log.Copy(log.Target(std::string("to ") + name, {8}), log.Source(name, {8}));
    }
    return log.Build().value();
  }
  std::string Write(int value, std::int64_t size = 8) {
    return written_.Write(
        {{"a", at::full({size}, value, at::kByte)}, {"b", at::full({8}, value, at::kByte)}},
        "model.safetensors");
  }
  // Opens `path`, and assigns all of it to rank 0.
  std::unique_ptr<FileShards> Open(const std::string& path) {
    const std::vector<std::string> paths = {path};
    auto shards = FileShards::Open(paths, plan_).value();
    std::vector<RankTables> ranks(1);
    ranks[0].needed = std::make_shared<const GeometryTable>(NeededTable(plan_, 0).value());
    ranks[0].held = std::make_shared<const GeometryTable>(ReaderTable(ranks).value());
    const Schedule schedule = Schedule::Make(ranks, {}).value();
    shards->Assign(*ranks[0].held, schedule, schedule.MessagesOf(0), 0);
    return shards;
  }

  WrittenFiles written_;
  const LoadPlan plan_;
};

TEST_F(FileShardsTest, GivesTheBytesOfTheFile) {
  const auto shards = Open(Write(7));
  const auto bytes = shards->Find("b", 0, Box({{2, 6}}));
  ASSERT_THAT(bytes, IsOk());
  EXPECT_EQ(bytes->layout.byte_offset(), 2);
  EXPECT_EQ(shards->nbytes_read(), 8);
}

TEST_F(FileShardsTest, AFileThatWasWrittenMeanwhileIsRefused) {
  const auto shards = Open(Write(7));
  ASSERT_THAT(shards->Find("a", 0, Box({{0, 8}})), IsOk());
  // The same file, not another one in its place.
  const std::string path = Write(8);
  std::filesystem::last_write_time(
      path, std::filesystem::file_time_type::clock::now() + std::chrono::seconds(1));
  EXPECT_THAT(shards->Find("b", 0, Box({{0, 8}})),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("model.safetensors` was changed while it was read")));
}

TEST_F(FileShardsTest, EveryNameOfTheFilesIsComparedWithThePlan) {
  const auto open = [&](const std::string& path, bool skips) {
    const std::vector<std::string> paths = {path};
    return FileShards::Open(paths, plan_, skips).status();
  };
  EXPECT_THAT(open(Write(7, 9), false),
              StatusIs(kInvalid, HasSubstr("`a` lies in its file as U8")));
  const auto bytes = at::zeros({8}, at::kByte);
  const std::string more = written_.Write({{"a", bytes}, {"b", bytes}, {"c", bytes}});
  EXPECT_THAT(open(more, false), StatusIs(kInvalid, HasSubstr("holds `c` which was not declared")));
  EXPECT_THAT(open(more, true), IsOk());
  EXPECT_THAT(open(written_.Write({{"a", bytes}}), false),
              StatusIs(kInvalid, HasSubstr("`b` is needed and is in none of the files")));
}

TEST_F(FileShardsTest, FilesAreDescribedInAnyOrder) {
  const auto bytes = at::zeros({8}, at::kByte);
  const std::string a = written_.Write({{"a", bytes}});
  const std::string b = written_.Write({{"b", bytes}});
  const auto text = [](const std::vector<std::string>& paths) {
    return CheckpointFiles::Open(paths)->Description();
  };
  EXPECT_EQ(text({a, b}), text({b, a}));
  EXPECT_NE(text({a, b}), text({a}));
  EXPECT_NE(text({a}), text({b}));
}

}  // namespace
}  // namespace loadplan
