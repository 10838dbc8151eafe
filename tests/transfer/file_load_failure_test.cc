// What a load from files leaves when a file changes or cannot be read.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/lifecycle/live_log.h"
#include "tests/testing/status_matchers.h"
#include "tests/transfer/file_load_fixture.h"
#include "tests/transfer/pread_hook.h"
#include "tests/transfer/written_files.h"
#include "transfer/file_load.h"
#include "transfer/leased_window.h"

namespace loadplan {
namespace {

using ::loadplan::testing::FileLoadTest;
using ::loadplan::testing::IsOk;
using ::loadplan::testing::kUint8;
using ::loadplan::testing::LiveLog;
using ::loadplan::testing::LoadAll;
using ::loadplan::testing::MadviseHook;
using ::loadplan::testing::PreadHook;
using ::loadplan::testing::StatusIs;
using ::loadplan::testing::View;
using ::loadplan::testing::WrittenFiles;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kDataLoss = absl::StatusCode::kDataLoss;

TEST_F(FileLoadTest, AFileThatIsCutShortWhileItIsReadFailsTheSession) {
  const std::string path = written_.Write(tensors_);
  auto load = Start({path});
  ASSERT_THAT(load, IsOk());
  std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
  EXPECT_THAT(LoadAll(**load),
              StatusIs(kDataLoss, AllOf(HasSubstr(path), HasSubstr("was changed"))));
  for (std::size_t i = 0; i < 5; ++i) EXPECT_TRUE(IsOld(i)) << i;
  EXPECT_EQ(session_->report().state, SessionState::kFailed);
  EXPECT_FALSE((*load)->Step(0).ok() && !*(*load)->Step(0));
}

// Ways in which bytes come, in each of which a tensor is whole or as it was.
struct ReadWay {
  std::string name;
  FileLoadOptions options;
  bool is_cold = false;
};
class FileLoadFailureTest : public FileLoadTest, public ::testing::WithParamInterface<ReadWay> {
 protected:
  // One tensor, in a file.
  std::string Write(std::size_t tensor) {
    const std::string path = written_.Write({tensors_[tensor]});
    if (GetParam().is_cold) {
      const OwnedFd fd(open(path.c_str(), O_RDONLY));
      fdatasync(fd.get());
      posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
    }
    return path;
  }
  void ExpectNothingWritten(std::size_t target) {
    EXPECT_TRUE(IsOld(target));
    EXPECT_EQ(session_->report().state, SessionState::kFailed);
  }
};
// With a gap, so that no file is mapped.
INSTANTIATE_TEST_SUITE_P(
    Ways, FileLoadFailureTest,
    ::testing::Values(
        ReadWay{"Warm", {.num_threads = 1, .gap = 1000}},
        ReadWay{"WarmInThreads", {.num_threads = 4, .gap = 1000}},
        ReadWay{"Cold", {.num_threads = 1, .gap = 1000}, true},
        ReadWay{"ColdThroughTheCache", {.num_threads = 1, .direct = false, .gap = 1000}, true},
        ReadWay{"Direct", {.num_threads = 1, .direct = true}, true}),
    [](const auto& param) { return param.param.name; });

constexpr std::pair<std::size_t, std::size_t> kTargetOf[] = {{1, 0}, {2, 1}, {3, 2}, {0, 3}};

// The second half of `name` is on a bad sector.
TEST_P(FileLoadFailureTest, ADiskThatFailsInTheMiddleOfATensorLeavesItAsItWas) {
  for (const auto& [tensor, target] : kTargetOf) {
    Reset();
    const std::string& name = tensors_[tensor].first;
    const std::string path = Write(tensor);
    auto load = Start({path}, GetParam().options);
    ASSERT_THAT(load, IsOk());
    const auto bad = static_cast<off_t>(std::filesystem::file_size(path) * 5 / 8);
    const PreadHook hook([&](int fd, void* to, std::size_t nbytes, off_t offset) -> ssize_t {
      if (offset < bad) {
        return PreadHook::Read(fd, to, std::min(nbytes, static_cast<std::size_t>(bad - offset)),
                               offset);
      }
      errno = EIO;
      return -1;
    });
    EXPECT_THAT(LoadAll(**load),
                StatusIs(kDataLoss, AllOf(HasSubstr("`" + path + "` cannot be read at byte"),
                                          HasSubstr("nput/output error"),
                                          HasSubstr("nothing was written of `" + name + "`"))))
        << name;
    ExpectNothingWritten(target);
  }
}

// The one read that reaches the middle changes the file: what was read before it is of the old
// bytes, what comes after it of the new ones.
TEST_P(FileLoadFailureTest, AFileThatChangesWhileATensorIsReadLeavesItAsItWas) {
  for (const bool is_cut_short : {false, true}) {
    for (const auto& [tensor, target] : kTargetOf) {
      Reset();
      const std::string& name = tensors_[tensor].first;
      const std::string path = Write(tensor);
      auto load = Start({path}, GetParam().options);
      ASSERT_THAT(load, IsOk());
      const auto size = std::filesystem::file_size(path);
      const auto middle = static_cast<off_t>(size * 5 / 8);
      std::atomic<bool> is_changed = false;
      const PreadHook hook([&](int fd, void* to, std::size_t nbytes, off_t offset) {
        if (offset + static_cast<off_t>(nbytes) > middle && !is_changed.exchange(true)) {
          std::filesystem::resize_file(path, is_cut_short ? size / 3 : size + 1);
        }
        return PreadHook::Read(fd, to, nbytes, offset);
      });
      EXPECT_THAT(LoadAll(**load),
                  StatusIs(kDataLoss, AllOf(HasSubstr(path), HasSubstr("of `" + name + "`"),
                                            HasSubstr(is_cut_short ? "cut short" : "was changed"))))
          << name;
      EXPECT_TRUE(is_changed);
      ExpectNothingWritten(target);
    }
  }
}

// Of a tensor of several windows, all is there before a byte is written.
TEST(FileLoadMappedTest, APageThatCannotBeHadLeavesTheTensorAsItWas) {
  constexpr Index kLarge = Index{20} << 20;
  LiveLog log;
  const View target = log.Target("w", {kLarge}, kUint8);
  log.Copy(target, log.Source("x", {kLarge}, kUint8));
  const auto bound = log.Bind().value();
  WrittenFiles written;
  const at::Tensor x = at::randint(256, {kLarge}, at::kByte);
  const std::string path = written.Write({{"x", x}});
  const OwnedFd reader(open(path.c_str(), O_RDONLY));
  if (!LeasedWindow::IsPossible(reader.get())) GTEST_SKIP() << "no leases on " << path;
  const at::Tensor w = log.live().front().tensor;
  for (const bool can_be_read : {true, false}) {
    w.fill_(77);
    ReloadSession session;
    ASSERT_THAT(session.Start({}), IsOk());
    ASSERT_THAT(session.Begin(bound, log.live()), IsOk());
    auto load = FileLoad::Start(session, bound, std::vector<std::string>{path}, {});
    ASSERT_THAT(load, IsOk());
    std::atomic<int> num_brought = 0;
    const MadviseHook bring([&](void* start, std::size_t nbytes, int advice) {
      if (advice != 22) return 0;
      if (++num_brought < 3) return static_cast<int>(syscall(SYS_madvise, start, nbytes, advice));
      errno = EFAULT;
      return -1;
    });
    std::atomic<int> num_reads = 0;
    const PreadHook hook([&](int fd, void* to, std::size_t nbytes, off_t offset) -> ssize_t {
      if (++num_reads < 3 || can_be_read) return PreadHook::Read(fd, to, nbytes, offset);
      errno = EIO;
      return -1;
    });
    const absl::Status status = LoadAll(**load);
    EXPECT_GE(num_brought, 3);
    if (can_be_read) {
      EXPECT_THAT(status, IsOk());
      EXPECT_TRUE(at::equal(w, x));
    } else {
      EXPECT_THAT(status, StatusIs(kDataLoss, AllOf(HasSubstr(path), HasSubstr("nput/output"),
                                                    HasSubstr("nothing was written of `x`"))));
      EXPECT_TRUE(at::equal(w, at::full_like(w, 77)));
    }
  }
}

// One that is larger than what may be staged is mapped, cold or not.
TEST(FileLoadMappedTest, ATensorThatIsLargerThanStagingIsWhole) {
  constexpr Index kLarge = Index{3} << 20;
  for (const bool is_open_for_writing : {false, true}) {
    LiveLog log;
    const View target = log.Target("w", {kLarge}, kUint8);
    log.Copy(target, log.Source("x", {kLarge}, kUint8));
    const auto bound = log.Bind().value();
    WrittenFiles written;
    const std::string path = written.Write({{"x", at::randint(256, {kLarge}, at::kByte)}});
    const OwnedFd reader(open(path.c_str(), O_RDONLY));
    if (!LeasedWindow::IsPossible(reader.get())) GTEST_SKIP() << "no leases on " << path;
    fdatasync(reader.get());
    posix_fadvise(reader.get(), 0, 0, POSIX_FADV_DONTNEED);
    const OwnedFd writer(is_open_for_writing ? open(path.c_str(), O_WRONLY) : -1);
    ReloadSession session;
    ASSERT_THAT(session.Start({}), IsOk());
    ASSERT_THAT(session.Begin(bound, log.live()), IsOk());
    const FileLoadOptions options{.max_staging_nbytes = Index{1} << 20};
    auto load = FileLoad::Start(session, bound, std::vector<std::string>{path}, options);
    ASSERT_THAT(load, IsOk());
    std::atomic<int> num_reads = 0;
    const PreadHook hook([&](int fd, void* to, std::size_t nbytes, off_t offset) -> ssize_t {
      if (++num_reads < 3) return PreadHook::Read(fd, to, nbytes, offset);
      errno = EIO;
      return -1;
    });
    const absl::Status status = LoadAll(**load);
    if (is_open_for_writing) {  // the one exception, and the error says so
      EXPECT_THAT(status, StatusIs(kDataLoss, HasSubstr("some of `x`, which is larger")));
    } else {
      EXPECT_THAT(status, IsOk());
      EXPECT_EQ(num_reads, 0);
    }
  }
}

// Another thread cuts the file short and puts it back, again and again: each load ends well, with
// the right bytes, or says what happened.
TEST_F(FileLoadTest, AFileThatIsCutShortAgainAndAgainEndsNoProcess) {
  const std::string path = written_.Write(tensors_);
  const auto size = std::filesystem::file_size(path);
  std::string text(size, '\0');
  std::ifstream(path, std::ios::binary).read(text.data(), static_cast<std::streamsize>(size));
  std::atomic<bool> stops = false;
  std::thread other([&] {
    for (unsigned i = 0; !stops; ++i) {
      std::filesystem::resize_file(path, size * (i % 4) / 4);
      std::ofstream(path, std::ios::binary) << text;
      std::this_thread::sleep_for(std::chrono::milliseconds(i % 16));
    }
  });
  int good = 0;
  for (int i = 0; i < 100; ++i) {
    Reset();
    auto load = Start({path}, {.num_threads = 2});
    if (!load.ok()) continue;
    const absl::Status status = LoadAll(**load);
    if (status.ok()) {
      ++good;
      ExpectNewBytes();
    } else {
      EXPECT_THAT(status, StatusIs(kDataLoss, HasSubstr(path)));
    }
  }
  stops = true;
  other.join();
  EXPECT_LT(good, 100);
}

TEST_F(FileLoadTest, AFileThatChangesBetweenTwoBatchesFailsTheSession) {
  const std::string path = written_.Write(tensors_);
  auto load = Start({path}, {.max_staging_nbytes = 1 << 18});
  ASSERT_THAT(load, IsOk());
  ASSERT_THAT((*load)->Step(0), IsOk());  // some batches are under way
  std::ofstream(path, std::ios::app) << "more";
  EXPECT_THAT(LoadAll(**load), StatusIs(kDataLoss, AllOf(HasSubstr("was changed"),
                                                         HasSubstr("undefined until a complete"))));
}

}  // namespace
}  // namespace loadplan
