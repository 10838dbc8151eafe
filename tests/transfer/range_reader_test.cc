#include "transfer/range_reader.h"

#include <fcntl.h>

#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"
#include "tests/transfer/written_files.h"
#include "transfer/checkpoint_files.h"

namespace loadplan {
namespace {

using ::loadplan::testing::ForEachRandom;
using ::loadplan::testing::IsOk;
using ::loadplan::testing::StatusIs;
using ::loadplan::testing::WrittenFiles;
using ::testing::AllOf;
using ::testing::HasSubstr;

class RangeReaderTest : public ::testing::TestWithParam<bool> {
 protected:
  RangeReaderTest() {
    std::mt19937 gen(1);
    for (char& byte : text_) byte = static_cast<char>(gen());
    path_ = written_.WriteText(text_, "file");
    fd_ = OwnedFd(open(path_.c_str(), O_RDONLY));
  }
  ReadJob Job(Index offset, Index nbytes, char* to) const {
    return {fd_.get(), &path_, offset, nbytes, reinterpret_cast<std::byte*>(to)};
  }
  RangeReader::Options options() const { return {.num_threads = 3, .direct = GetParam()}; }

  WrittenFiles written_;
  std::string text_ = std::string(static_cast<std::size_t>(RangeReader::kMaxRead) + 70'001, '\0');
  std::string path_;
  OwnedFd fd_;
};
INSTANTIATE_TEST_SUITE_P(Ways, RangeReaderTest, ::testing::Bool(), [](const auto& param) {
  return std::string(param.param ? "Direct" : "Cached");
});

TEST_P(RangeReaderTest, ReadsWhatWasAsked) {
  RangeReader reader(options());
  ForEachRandom(20, [&](std::mt19937& gen) {
    std::vector<ReadJob> jobs;
    std::vector<std::string> buffers(1 + gen() % 20);
    for (std::string& buffer : buffers) {
      const auto most = gen() % 4 == 0 ? text_.size() : std::size_t{5000};
      buffer.assign(1 + gen() % most, '\0');
      jobs.push_back(Job(static_cast<Index>(gen() % (text_.size() - buffer.size() + 1)),
                         static_cast<Index>(buffer.size()), buffer.data()));
    }
    const auto group = reader.Submit(jobs);
    while (!reader.WaitFor(*group, 10)) {
    }
    ASSERT_THAT(reader.StatusOf(*group), IsOk());
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      ASSERT_EQ(buffers[i],
                text_.substr(static_cast<std::size_t>(jobs[i].offset), buffers[i].size()));
    }
  });
  EXPECT_GT(reader.nbytes_read(), 0);
}

TEST_P(RangeReaderTest, SaysWhereAFileEnds) {
  RangeReader reader(options());
  std::string buffer(100, 'x');
  const auto size = static_cast<Index>(text_.size());
  const auto group = reader.Submit({Job(size - 10, 100, buffer.data())});
  ASSERT_TRUE(reader.WaitFor(*group, 60));
  EXPECT_THAT(reader.StatusOf(*group),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr("`" + path_ + "` ends at byte " + std::to_string(size)),
                             HasSubstr("cut short"))));
  const auto nothing = reader.Submit({});
  EXPECT_TRUE(reader.WaitFor(*nothing, 0));
}

TEST_P(RangeReaderTest, CancelLeavesNoThreadThatWrites) {
  for (int round = 0; round < 20; ++round) {
    std::string buffer(text_.size(), '\0');
    RangeReader reader(options());
    std::vector<ReadJob> jobs;
    for (Index offset = 0; offset < 8'000'000; offset += 10'000) {
      jobs.push_back(Job(offset, 10'000, buffer.data() + offset));
    }
    (void)reader.Submit(jobs);
    reader.Cancel();
    const std::string then = buffer;
    ASSERT_EQ(buffer, then);
  }  // under a sanitizer, a thread that still wrote would be seen
}

}  // namespace
}  // namespace loadplan
