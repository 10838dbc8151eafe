#include "transfer/checkpoint_files.h"

#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"
#include "tests/transfer/written_files.h"
#include "transfer/checkpoint_index.h"

namespace loadplan {
namespace {

using ::loadplan::testing::IsOk;
using ::loadplan::testing::StatusIs;
using ::loadplan::testing::WrittenFiles;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

class CheckpointFilesTest : public ::testing::Test {
 protected:
  static absl::StatusOr<CheckpointFiles> Open(const std::vector<std::string>& paths) {
    return CheckpointFiles::Open(paths);
  }
  static std::vector<std::string> NamesOf(const CheckpointFiles& files) {
    std::vector<std::string> names;
    for (const FileTensor& tensor : files.tensors()) names.push_back(tensor.name);
    return names;
  }
  std::string folder() const { return written_.folder().string(); }

  WrittenFiles written_;
};

TEST_F(CheckpointFilesTest, OpensFilesFoldersAndIndices) {
  const std::string b = written_.Write({{"b", at::zeros({3}, at::kByte)}}, "2.safetensors");
  written_.Write({{"a", at::zeros({2, 2}, at::kHalf)}}, "10.safetensors");
  EXPECT_THAT(NamesOf(Open({b}).value()), ElementsAre("b"));
  const CheckpointFiles files = Open({folder()}).value();
  EXPECT_THAT(NamesOf(files), ElementsAre("a", "b"));
  const FileTensor& tensor = files.tensors()[0];
  EXPECT_THAT(tensor.shape, ElementsAre(2, 2));
  EXPECT_EQ(tensor.dtype, at::kHalf);
  EXPECT_EQ(tensor.nbytes, 8);
  EXPECT_EQ(files.tensors()[1].offset,
            static_cast<Index>(std::filesystem::file_size(b)) - 3);  // data come last
  const std::string index =
      written_.WriteText(R"({"weight_map": {"b": "2.safetensors", "a": "10.safetensors"}})",
                         "model.safetensors.index.json");
  EXPECT_THAT(NamesOf(Open({folder()}).value()), ElementsAre("b", "a"));
  EXPECT_THAT(NamesOf(Open({index}).value()), ElementsAre("b", "a"));
}

TEST_F(CheckpointFilesTest, SubByteDtypes) {
  const std::string path = written_.WriteRaw(
      R"({"f4": {"dtype": "F4", "shape": [3, 4], "data_offsets": [0, 6]},
          "odd": {"dtype": "F4", "shape": [2, 3], "data_offsets": [6, 9]},
          "f6": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [9, 12]}})",
      std::string(12, 'x'));
  const CheckpointFiles files = Open({path}).value();
  EXPECT_EQ(files.tensors()[0].dtype, at::kFloat4_e2m1fn_x2);
  EXPECT_THAT(files.tensors()[0].shape, ElementsAre(3, 2));
  EXPECT_EQ(files.tensors()[1].dtype, std::nullopt);
  EXPECT_EQ(files.tensors()[2].dtype, std::nullopt);
}

TEST_F(CheckpointFilesTest, ErrorsNameFileAndTensor) {
  EXPECT_THAT(Open({folder() + "/none"}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("none` cannot be opened")));
  EXPECT_THAT(Open({folder()}), StatusIs(absl::StatusCode::kNotFound, HasSubstr("holds neither")));
  EXPECT_THAT(Open({"/dev/null"}), StatusIs(kInvalid, HasSubstr("is no file that can be read")));
  const std::string empty = written_.WriteText("", "empty.safetensors");
  EXPECT_THAT(Open({empty}), StatusIs(kInvalid, HasSubstr("0 bytes in 0 bytes")));
  const std::string cut = written_.Write({{"w", at::zeros({30})}});
  std::filesystem::resize_file(cut, std::filesystem::file_size(cut) - 1);
  EXPECT_THAT(Open({cut}), StatusIs(kInvalid, AllOf(HasSubstr(cut), HasSubstr("`w` has"),
                                                    HasSubstr("cut short"))));
  const std::string again = written_.Write({{"w", at::zeros({1})}});
  const std::string twice = written_.Write({{"w", at::zeros({1})}});
  EXPECT_THAT(Open({again, twice}), StatusIs(kInvalid, AllOf(HasSubstr("`w` is declared twice"),
                                                             HasSubstr(again), HasSubstr(twice))));
}

// Opening a pipe for reading would wait until somebody writes to it.
TEST_F(CheckpointFilesTest, APipeIsNoFile) {
  const std::string pipe = folder() + "/pipe.safetensors";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(Open({pipe}), StatusIs(kInvalid, HasSubstr("is no file that can be read")));
}

TEST_F(CheckpointFilesTest, AnIndexOfManyBytesIsNotRead) {
  const std::string index = written_.WriteText("{}", "model.safetensors.index.json");
  std::filesystem::resize_file(index, std::uintmax_t{1} << 40);  // without blocks on the disk
  EXPECT_THAT(Open({index}),
              StatusIs(kInvalid, HasSubstr("is no index: it has 1099511627776 bytes")));
}

TEST_F(CheckpointFilesTest, NoticesFilesThatChange) {
  const std::string path = written_.Write({{"w", at::zeros({3})}});
  const CheckpointFiles files = Open({path}).value();
  EXPECT_THAT(files.CheckUnchanged(0), IsOk());
  std::filesystem::rename(path, path + ".old");
  EXPECT_THAT(files.CheckUnchanged(0), IsOk());  // still open
  std::filesystem::resize_file(path + ".old", 4);
  EXPECT_THAT(files.CheckUnchanged(0),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("was changed while it was read")));
}

TEST_F(CheckpointFilesTest, AnIndexMustBeTrue) {
  written_.Write({{"a", at::zeros({1})}}, "1.safetensors");
  const auto open = [&](const std::string& map) {
    return Open({written_.WriteText(map, "model.safetensors.index.json")});
  };
  EXPECT_THAT(open(R"({"weight_map": {"b": "1.safetensors"}})"),
              StatusIs(kInvalid, HasSubstr("places `b` in `1.safetensors`, which does not hold")));
  EXPECT_THAT(open(R"({"weight_map": {"a": "2.safetensors"}})"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("2.safetensors")));
  EXPECT_THAT(open("[]"), StatusIs(kInvalid, HasSubstr("it has no `weight_map`")));
}

TEST(CheckpointIndexTest, RefusesInWords) {
  const std::pair<std::string, std::string> cases[] = {
      {"", "no `weight_map`"},
      {R"({"weight_map": 3})", "no `weight_map`"},
      {R"({"weight_map": {"a": 3}})", "`a` in no file of its folder"},
      {R"({"weight_map": {"a": ""}})", "`a` in no file of its folder"},
      {R"({"weight_map": {"a": "/etc/passwd"}})", "`a` in no file of its folder"},
      {R"({"weight_map": {"a": "x/../../y"}})", "`a` in no file of its folder"},
      {R"({"weight_map": {"a": "f", "a": "g"}})", "places `a` twice"}};
  for (const auto& [json, says] : cases) {
    EXPECT_THAT(ParseCheckpointIndex(json), StatusIs(kInvalid, HasSubstr(says))) << json;
  }
}

}  // namespace
}  // namespace loadplan
