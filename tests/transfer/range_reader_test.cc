#include "transfer/range_reader.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"
#include "tests/transfer/pread_hook.h"
#include "tests/transfer/written_files.h"
#include "transfer/checkpoint_files.h"
#include "transfer/leased_window.h"

namespace loadplan {
namespace {

using ::loadplan::testing::ForEachRandom;
using ::loadplan::testing::IsOk;
using ::loadplan::testing::MadviseHook;
using ::loadplan::testing::PreadHook;
using ::loadplan::testing::StatusIs;
using ::loadplan::testing::WrittenFiles;
using ::testing::AllOf;
using ::testing::HasSubstr;

enum class Way { kCached, kAdvised, kDirect };

class RangeReaderTest : public ::testing::TestWithParam<Way> {
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
  RangeReader::Options options() const {
    return {.num_threads = 3,
            .direct = GetParam() == Way::kDirect,
            .advises = GetParam() == Way::kAdvised};
  }
  // All of `text_`, in reads of `nbytes`.
  std::vector<ReadJob> Pieces(Index nbytes, std::string& buffer) const {
    std::vector<ReadJob> jobs;
    const auto size = static_cast<Index>(text_.size());
    buffer.assign(text_.size(), '\0');
    for (Index at = 0; at < size; at += nbytes) {
      jobs.push_back(Job(at, std::min(nbytes, size - at), buffer.data() + at));
    }
    return jobs;
  }
  static void Wait(RangeReader& reader, const ReadGroup& group) {
    while (!reader.WaitFor(group, 10)) {
    }
  }

  WrittenFiles written_;
  std::string text_ = std::string(static_cast<std::size_t>(RangeReader::kMaxRead) + 70'001, '\0');
  std::string path_;
  OwnedFd fd_;
};
INSTANTIATE_TEST_SUITE_P(Ways, RangeReaderTest,
                         ::testing::Values(Way::kCached, Way::kAdvised, Way::kDirect),
                         [](const auto& param) -> std::string {
                           if (param.param == Way::kCached) return "Cached";
                           return param.param == Way::kAdvised ? "Advised" : "Direct";
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

// First the check, when all is there; then each write once.
TEST_P(RangeReaderTest, ThenRunsWhenAllIsRead) {
  RangeReader reader(options());
  for (int round = 0; round < 20; ++round) {
    std::string buffer;
    std::atomic<int> num_checks = 0;
    std::vector<std::atomic<int>> num_writes(7);
    std::atomic<bool> is_complete = true;
    const auto check = [&] {
      ++num_checks;
      is_complete = is_complete && buffer == text_;
      return absl::OkStatus();
    };
    const auto write = [&](std::size_t i, const std::byte*) {
      ++num_writes[i];
      is_complete = is_complete && num_checks == 1;
    };
    const auto group = reader.Submit(Pieces(4'000, buffer), {check, write, num_writes.size()});
    Wait(reader, *group);
    ASSERT_THAT(reader.StatusOf(*group), IsOk());
    EXPECT_TRUE(is_complete);
    for (const std::atomic<int>& count : num_writes) EXPECT_EQ(count, 1);
  }
}

TEST_P(RangeReaderTest, MemoryOfTheThreadHoldsWhatHasNoPlace) {
  RangeReader reader(options());
  std::vector<std::shared_ptr<ReadGroup>> groups;
  std::atomic<int> num_equal = 0;
  for (Index nbytes = 100'000; nbytes <= 200'000; nbytes += 10'000) {
    std::vector<ReadJob> jobs;
    for (Index at = 0; at < nbytes; at += 100) {
      jobs.push_back(Job(nbytes - at, 100, nullptr));
      jobs.back().tag = at;
    }
    groups.push_back(reader.Submit(
        jobs,
        {nullptr,
         [&, nbytes](std::size_t, const std::byte* scratch) {
           bool is_equal = true;
           for (Index at = 0; at < nbytes; at += 100) {
             const std::string_view got(reinterpret_cast<const char*>(scratch) + at, 100);
             is_equal = is_equal && got == std::string_view(text_).substr(
                                               static_cast<std::size_t>(nbytes - at), 100);
           }
           if (is_equal) ++num_equal;
         },
         1},
        nbytes));
  }
  for (const auto& group : groups) {
    Wait(reader, *group);
    EXPECT_THAT(reader.StatusOf(*group), IsOk());
  }
  EXPECT_EQ(num_equal, 11);
}

// Bytes at their tags, of one window and of groups that several threads work at.
TEST_P(RangeReaderTest, AMappedGroupFindsItsBytesAtTheirTags) {
  if (!LeasedWindow::IsPossible(fd_.get())) GTEST_SKIP() << "no leases on " << path_;
  RangeReader reader(options());
  std::atomic<int> num_reads = 0;
  const PreadHook hook([&](int fd, void* to, std::size_t nbytes, off_t offset) {
    ++num_reads;
    return PreadHook::Read(fd, to, nbytes, offset);
  });
  for (const Index length : {Index{90}, Index{50'000}, Index{2'819'000}}) {
    std::vector<std::shared_ptr<ReadGroup>> groups;
    std::atomic<int> num_equal = 0;
    for (Index start = 5; start < 1'000'000; start += 99'999) {
      std::vector<ReadJob> jobs;
      for (const Index tag : {Index{0}, length + 10, 2 * length + 100}) {
        jobs.push_back(Job(start + tag, length, nullptr));
        jobs.back().tag = tag;
      }
      const auto write = [&, start, length](std::size_t i, const std::byte* base) {
        const Index tag = i == 0 ? 0 : i == 1 ? length + 10 : 2 * length + 100;
        if (std::string_view(reinterpret_cast<const char*>(base) + tag,
                             static_cast<std::size_t>(length)) ==
            std::string_view(text_).substr(static_cast<std::size_t>(start + tag),
                                           static_cast<std::size_t>(length))) {
          ++num_equal;
        }
      };
      if (jobs.back().offset + length > static_cast<Index>(text_.size())) break;
      groups.push_back(reader.SubmitMapped(jobs, {nullptr, write, 3}, 3 * length));
    }
    for (const auto& group : groups) {
      Wait(reader, *group);
      EXPECT_THAT(reader.StatusOf(*group), IsOk());
    }
    EXPECT_FALSE(groups.empty());
    EXPECT_EQ(num_equal, 3 * static_cast<int>(groups.size()));
  }
  EXPECT_EQ(num_reads, 0);
}

TEST_P(RangeReaderTest, AMappedGroupWritesNothingWhereItCannotBeHad) {
  RangeReader reader(options());
  const auto size = static_cast<Index>(text_.size());
  std::atomic<int> num_calls = 0;
  const auto write = [&](std::size_t, const std::byte*) { ++num_calls; };
  const auto try_it = [&](Index offset, Index nbytes) {
    const auto group =
        reader.SubmitMapped({Job(offset, nbytes, nullptr)}, {nullptr, write, 1}, nbytes);
    Wait(reader, *group);
    EXPECT_THAT(reader.StatusOf(*group), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("it")));
  };
  for (const Index nbytes : {Index{100}, size - 5}) {
    try_it(size - nbytes + 1, nbytes);  // behind the end
    {
      const OwnedFd writer(open(path_.c_str(), O_WRONLY));
      try_it(0, nbytes);
    }
    const MadviseHook hook([](void*, std::size_t, int) {
      errno = EFAULT;
      return -1;
    });
    try_it(0, nbytes);
  }
  EXPECT_EQ(num_calls, 0);
}

// Of memory that only just holds what lies in its pages: what is around it stays.
TEST_P(RangeReaderTest, PastTheCacheItGoesStraightToItsPlace) {
  RangeReader reader(options());
  constexpr std::size_t kPage = 4096;
  for (const std::size_t start : {std::size_t{0}, std::size_t{1234}, std::size_t{9000}}) {
    for (const std::size_t nbytes : {std::size_t{10}, std::size_t{100'000}, text_.size() - 9000}) {
      std::string memory(text_.size() + 4 * kPage, 'x');
      const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
      char* const first = memory.data() + (kPage - address % kPage) + kPage;
      ReadJob job =
          Job(static_cast<Index>(start), static_cast<Index>(nbytes), first + start % kPage);
      job.past_cache = true;
      const auto group = reader.Submit({job});
      Wait(reader, *group);
      ASSERT_THAT(reader.StatusOf(*group), IsOk());
      EXPECT_EQ(std::string_view(first + start % kPage, nbytes),
                std::string_view(text_).substr(start, nbytes));
      EXPECT_EQ(first[-1], 'x');
      EXPECT_EQ(first[(start % kPage + nbytes + kPage - 1) / kPage * kPage], 'x');
    }
  }
}

TEST_P(RangeReaderTest, WhatTheCheckSaysIsTheGroups) {
  RangeReader reader(options());
  std::string buffer;
  std::atomic<int> num_writes = 0;
  const auto group = reader.Submit(Pieces(1 << 20, buffer),
                                   {[] { return absl::AbortedError("no"); },
                                    [&](std::size_t, const std::byte*) { ++num_writes; }, 3});
  Wait(reader, *group);
  EXPECT_THAT(reader.StatusOf(*group), StatusIs(absl::StatusCode::kAborted, HasSubstr("no")));
  EXPECT_EQ(num_writes, 0);
}

TEST_P(RangeReaderTest, AfterAnErrorThereIsNoThen) {
  RangeReader reader(options());
  std::string buffer;
  std::atomic<int> num_calls = 0;
  std::vector<ReadJob> jobs = Pieces(1 << 20, buffer);
  jobs[2].offset = static_cast<Index>(text_.size()) - 10;
  const auto check = [&] {
    ++num_calls;
    return absl::OkStatus();
  };
  const auto group =
      reader.Submit(jobs, {check, [&](std::size_t, const std::byte*) { ++num_calls; }, 1});
  Wait(reader, *group);
  EXPECT_THAT(reader.StatusOf(*group),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("cut short")));
  EXPECT_EQ(num_calls, 0);
}

TEST_P(RangeReaderTest, GoesOnAfterShortAndInterruptedReads) {
  std::atomic<int> num_calls = 0;
  const PreadHook hook([&](int fd, void* to, std::size_t nbytes, off_t offset) -> ssize_t {
    const int call = num_calls++;
    if (call % 3 == 0) {
      errno = EINTR;
      return -1;
    }
    if (call % 3 == 1) nbytes = std::max(nbytes / 2, std::size_t{1});
    return PreadHook::Read(fd, to, nbytes, offset);
  });
  for (const Index nbytes : {Index{5'000}, Index{70'000}}) {
    RangeReader reader(options());
    std::string buffer;
    const auto group = reader.Submit(Pieces(nbytes, buffer));
    Wait(reader, *group);
    ASSERT_THAT(reader.StatusOf(*group), IsOk());
    ASSERT_EQ(buffer, text_);
  }
  EXPECT_GT(num_calls, 3'000);
}

TEST_P(RangeReaderTest, SaysWhatAReadFailedWith) {
  std::atomic<int> num_calls = 0;
  const PreadHook hook([&](int fd, void* to, std::size_t nbytes, off_t offset) -> ssize_t {
    if (++num_calls < 5) return PreadHook::Read(fd, to, nbytes, offset);
    errno = EIO;
    return -1;
  });
  RangeReader reader(options());
  std::string buffer;
  const auto group = reader.Submit(Pieces(4'000, buffer));
  Wait(reader, *group);
  EXPECT_THAT(
      reader.StatusOf(*group),
      StatusIs(absl::StatusCode::kDataLoss,
               AllOf(HasSubstr("`" + path_ + "` cannot be read at"), HasSubstr("nput/output"))));
  EXPECT_GT(group->failed_at, 0);
}

}  // namespace
}  // namespace loadplan
