#include "transfer/file_load.h"

#include <ATen/ATen.h>
#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/lifecycle/live_log.h"
#include "tests/lifecycle/random_log.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"
#include "tests/transfer/file_load_fixture.h"
#include "tests/transfer/pread_hook.h"
#include "tests/transfer/written_files.h"
#include "transfer/leased_window.h"

namespace loadplan {
namespace {

using ::loadplan::testing::FileLoadTest;
using ::loadplan::testing::ForEachRandom;
using ::loadplan::testing::IsOk;
using ::loadplan::testing::kBFloat16;
using ::loadplan::testing::kColumns;
using ::loadplan::testing::kRows;
using ::loadplan::testing::kUint8;
using ::loadplan::testing::LiveLog;
using ::loadplan::testing::LoadAll;
using ::loadplan::testing::PreadHook;
using ::loadplan::testing::RandomLog;
using ::loadplan::testing::StatusIs;
using ::loadplan::testing::View;
using ::loadplan::testing::WrittenFiles;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kDataLoss = absl::StatusCode::kDataLoss;

// Random records, from random files, read in random ways.
void LoadRandomLog(std::mt19937& gen, int& planned) {
  RandomLog log(gen);
  const auto bound = log.Bind();
  if (bound == nullptr) return;
  ++planned;
  WrittenFiles written;
  WrittenFiles::Tensors tensors = {
      {"a", log.weights()[0]}, {"b", log.weights()[1]}, {"c", log.weights()[2]}};
  std::shuffle(tensors.begin(), tensors.end(), gen);
  // Something before them, so that their data start anywhere.
  const auto pad = static_cast<Index>(gen() % 9);
  tensors.insert(tensors.begin(), {"pad", at::zeros({pad}, at::kByte)});
  const auto cut = static_cast<std::ptrdiff_t>(gen() % 4);
  const std::vector<std::string> paths = {written.Write({tensors.begin(), tensors.begin() + cut}),
                                          written.Write({tensors.begin() + cut, tensors.end()})};
  ReloadSession session;
  ASSERT_THAT(session.Start({}), IsOk());
  ASSERT_THAT(session.Begin(bound, log.live()), IsOk());
  FileLoadOptions options;
  options.skips_undeclared = true;
  options.num_threads = 1 + static_cast<int>(gen() % 3);
  options.gap = static_cast<Index>(gen() % 2 == 0 ? -1 : 0);
  options.direct = gen() % 4 == 0;
  auto load = FileLoad::Start(session, bound, paths, options);
  ASSERT_THAT(load, IsOk());
  ASSERT_THAT(LoadAll(**load), IsOk());
  EXPECT_EQ((*load)->stats().names_done, 3);
  ASSERT_THAT(session.PrepareFinish(std::nullopt, log.live()), IsOk());
  ASSERT_THAT(session.Finish(), IsOk());
  log.ExpectLeftAsRecorded();
}

TEST(FileLoadPropertyTest, LeavesWhatTheRecordsLeave) {
  int planned = 0;
  ForEachRandom(300, [&](std::mt19937& gen) { LoadRandomLog(gen, planned); });
  EXPECT_GT(planned, 150);
}

TEST_F(FileLoadTest, ReadsWhatIsNeededInEveryWay) {
  const std::string path = written_.Write(tensors_);
  for (const bool direct : {false, true}) {
    for (const Index gap : {Index{1000}, Index{1} << 20}) {
      for (const Index staging : {Index{1} << 18, Index{5} << 20, Index{1} << 28}) {
        Reset();
        auto load = Start({path}, {.direct = direct, .max_staging_nbytes = staging, .gap = gap});
        ASSERT_THAT(load, IsOk());
        ASSERT_THAT(LoadAll(**load), IsOk());
        ExpectNewBytes();
        const FileLoadStats stats = (*load)->stats();
        constexpr Index kAll = kRows * kColumns * 4;
        EXPECT_EQ(stats.needed_nbytes, kAll / 2 + kAll / 8 + kAll + kColumns * 4 + 8000);
        EXPECT_EQ(stats.names_done, 6);
        EXPECT_EQ(stats.num_names, 6);
        // Only `rows` is contiguous, copied as it is, and too large to be kept whole.
        EXPECT_EQ(stats.in_place_nbytes, staging == 1 << 18 ? kAll / 2 : 0);
        if (gap == 1000 && !direct) {
          EXPECT_LE(stats.read_nbytes, stats.needed_nbytes + 2000);
        }
        EXPECT_GE(stats.read_nbytes, stats.needed_nbytes);
        EXPECT_TRUE((*load)->Step(0).value());  // over
      }
    }
  }
}

TEST_F(FileLoadTest, SeveralLoadsMakeAnUpdate) {
  const std::string first = written_.Write({tensors_.begin(), tensors_.begin() + 2});
  const std::string second = written_.Write({tensors_.begin() + 2, tensors_.end()});
  auto load = Start({second});
  ASSERT_THAT(load, IsOk());
  ASSERT_THAT(LoadAll(**load), IsOk());
  EXPECT_THAT(session_->PrepareFinish(std::nullopt, log_->live()),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("2 planned name(s)")));
  load = Start({first});
  ASSERT_THAT(load, IsOk());
  ASSERT_THAT(LoadAll(**load), IsOk());
  ASSERT_THAT(session_->PrepareFinish(std::nullopt, log_->live()), IsOk());
  ASSERT_THAT(session_->Finish(), IsOk());
  ExpectNewBytes();
}

TEST_F(FileLoadTest, BadArrivalsAreSeenBeforeAByteIsRead) {
  const auto path_of = [&](const std::string& name, const at::Tensor& tensor) {
    return written_.Write({tensors_[0], {name, tensor}});
  };
  const std::vector<std::pair<std::string, std::string>> cases = {
      {path_of("b", at::zeros({999})), "`b` arrived with shape [999], expected [1000]"},
      {path_of("b", at::zeros({1000}, at::kByte)), "`b` arrived as uint8, expected float32"},
      {path_of("y", at::zeros({3})), "holds `y` which was not declared"}};
  for (const auto& [path, says] : cases) {
    Reset();
    EXPECT_THAT(Start({path}), StatusIs(kInvalid, AllOf(HasSubstr(path), HasSubstr(says))));
    EXPECT_TRUE(IsOld(3));
    EXPECT_EQ(session_->report().state, SessionState::kFailed);
    EXPECT_TRUE(session_->report().undefined.empty());
  }
  Reset();
  ASSERT_THAT(session_->Deliver("n", tensors_[0].second), IsOk());
  EXPECT_THAT(Start({written_.Write(tensors_)}), StatusIs(kInvalid, HasSubstr("arrived twice")));
  EXPECT_TRUE(IsOld(0));
  Reset();  // what is no checkpoint leaves the session as it was
  EXPECT_THAT(Start({"/nowhere"}), StatusIs(absl::StatusCode::kNotFound, HasSubstr("/nowhere")));
  EXPECT_EQ(session_->report().state, SessionState::kActive);
}

TEST_F(FileLoadTest, UndeclaredNamesCanBeLeftAlone) {
  tensors_.emplace_back("y", at::zeros({3}));
  auto load = Start({written_.Write(tensors_)}, {.skips_undeclared = true});
  ASSERT_THAT(load, IsOk());
  ASSERT_THAT(LoadAll(**load), IsOk());
  ExpectNewBytes();
}

TEST_F(FileLoadTest, ReadsThatComeShortLeaveTheSameBytes) {
  const std::string path = written_.Write(tensors_);
  std::atomic<unsigned> num_reads = 0;
  const PreadHook hook([&](int fd, void* to, std::size_t nbytes, off_t offset) -> ssize_t {
    if (++num_reads % 5 == 0) {
      errno = EINTR;
      return -1;
    }
    return PreadHook::Read(fd, to, std::max<std::size_t>(1, nbytes - nbytes / 3), offset);
  });
  for (const Index gap : {Index{0}, Index{1} << 20}) {
    Reset();
    auto load = Start({path}, {.gap = gap});
    ASSERT_THAT(load, IsOk());
    ASSERT_THAT(LoadAll(**load), IsOk());
    ExpectNewBytes();
  }
}

// How many reads a load makes once it has started, and in how many of them it lands new bytes.
TEST_F(FileLoadTest, FilesInThePageCacheAreMapped) {
  const std::string path = written_.Write(tensors_);
  for (const bool is_open_for_writing : {false, true}) {
    Reset();
    const OwnedFd reader(open(path.c_str(), O_RDONLY));
    if (!LeasedWindow::IsPossible(reader.get())) GTEST_SKIP() << "no leases on " << path;
    auto load = Start({path});
    ASSERT_THAT(load, IsOk());
    // From here on no lease is to be had, and what was to be mapped is read.
    const OwnedFd writer(is_open_for_writing ? open(path.c_str(), O_WRONLY) : -1);
    std::atomic<Index> read = 0;
    const PreadHook hook([&](int fd, void* to, std::size_t nbytes, off_t offset) {
      read += static_cast<Index>(nbytes);
      return PreadHook::Read(fd, to, nbytes, offset);
    });
    ASSERT_THAT(LoadAll(**load), IsOk());
    ExpectNewBytes();
    constexpr Index kAll = kRows * kColumns * 4;
    constexpr Index kPlaced = kAll / 2 + kAll / 8 + kColumns * 4 + 8000;
    // `h` is cast: it is not copied by the threads that read it.
    EXPECT_GE(read, is_open_for_writing ? kAll + kPlaced : kAll);
    EXPECT_EQ((*load)->stats().in_place_nbytes, is_open_for_writing ? 0 : kPlaced);
    if (!is_open_for_writing) {
      EXPECT_EQ(read, kAll);
      EXPECT_EQ((*load)->stats().read_nbytes, (*load)->stats().needed_nbytes);
      EXPECT_EQ((*load)->stats().planned_nbytes, (*load)->stats().needed_nbytes);
    }
  }
}

// Runs of many lengths at odd offsets, to two places each, beside each other in one target.
TEST(FileLoadColumnsTest, RunsOfEveryLengthLandByteForByte) {
  constexpr Index kHeight = 67;
  for (const Index run : {1, 3, 64, 191, 1024, 3584, 70'001}) {
    const Index pitch = 8 * run + 5;
    LiveLog log;
    const View both = log.Target("both", {kHeight, 2 * run}, kUint8);
    const View again = log.Target("again", {kHeight, run}, kUint8);
    const View x = log.Source("x", {kHeight, pitch}, kUint8);
    const View y = log.Source("y", {kHeight, pitch}, kUint8);
    log.Copy(both.Slice(1, 0, run), x.Slice(1, 3, 3 + run));
    log.Copy(both.Slice(1, run, 2 * run), y.Slice(1, 2 * run, 3 * run));
    log.Copy(again, x.Slice(1, 3, 3 + run));
    const auto bound = log.Bind().value();
    const at::Tensor x_bytes = at::randint(256, {kHeight, pitch}, at::kByte);
    const at::Tensor y_bytes = at::randint(256, {kHeight, pitch}, at::kByte);
    WrittenFiles written;
    const std::vector<std::string> paths = {
        written.Write({{"pad", at::zeros({3}, at::kByte)}, {"x", x_bytes}, {"y", y_bytes}})};
    for (const bool direct : {false, true}) {
      for (const Index gap : {Index{-1}, Index{0}, Index{1} << 20}) {
        for (const Index staging : {Index{1} << 18, Index{1} << 28}) {
          ReloadSession session;
          ASSERT_THAT(session.Start({}), IsOk());
          ASSERT_THAT(session.Begin(bound, log.live()), IsOk());
          for (const LiveTarget& target : log.live()) target.tensor.fill_(0);
          const FileLoadOptions options{.direct = direct,
                                        .max_staging_nbytes = staging,
                                        .gap = gap,
                                        .skips_undeclared = true};
          auto load = FileLoad::Start(session, bound, paths, options);
          ASSERT_THAT(load, IsOk());
          ASSERT_THAT(LoadAll(**load), IsOk());
          const at::Tensor x_run = x_bytes.slice(1, 3, 3 + run);
          const at::Tensor y_run = y_bytes.slice(1, 2 * run, 3 * run);
          ASSERT_TRUE(at::equal(log.live()[0].tensor, at::cat({x_run, y_run}, 1))) << run;
          ASSERT_TRUE(at::equal(log.live()[1].tensor, x_run)) << run;
          ASSERT_THAT(session.PrepareFinish(std::nullopt, log.live()), IsOk());
          ASSERT_EQ(session.Finish()->nbytes, 3 * kHeight * run);
        }
      }
    }
  }
}

// Whatever the reader has ready: a host that looks for interrupts gets its turn.
TEST_F(FileLoadTest, AStepEndsWithItsTime) {
  const std::string path = written_.Write(tensors_);
  auto load = Start({path}, {.max_staging_nbytes = 1 << 18});
  ASSERT_THAT(load, IsOk());
  int num_steps = 1;
  for (bool is_over = false; !is_over; ++num_steps) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the reads are done by then
    const absl::StatusOr<bool> step = (*load)->Step(0);
    ASSERT_THAT(step, IsOk());
    is_over = *step;
  }
  EXPECT_GT(num_steps, 20);  // a batch of 64 KiB each
  ExpectNewBytes();
}

TEST_F(FileLoadTest, CancelFailsTheSession) {
  const std::string path = written_.Write(tensors_);
  auto load = Start({path}, {.max_staging_nbytes = 1 << 18});
  ASSERT_THAT(load, IsOk());
  ASSERT_THAT((*load)->Step(0), IsOk());
  const absl::Status status = (*load)->Cancel("KeyboardInterrupt");
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kCancelled, HasSubstr("KeyboardInterrupt")));
  EXPECT_EQ(session_->report().state, SessionState::kFailed);
  load->reset();
  Reset();
  load = Start({path}, {.max_staging_nbytes = 1 << 18});
  ASSERT_THAT(load, IsOk());
  ASSERT_THAT((*load)->Step(0), IsOk());
  load->reset();  // given up
  EXPECT_EQ(session_->report().state, SessionState::kFailed);
}

// Names that overlap go through the loader, whole.
TEST(FileLoadFallbackTest, PutsWholeTensorsTogether) {
  LiveLog log;
  const View w = log.Target("w", {100'000});
  log.Copy(w, log.Source("f", {100'000}));
  log.Copy(w, log.Source("g", {200'000}).Slice(0, 0, 200'000, 2));
  const auto bound = log.Bind(OverlapPolicy::kFallback).value();
  ReloadSession session;
  ASSERT_THAT(session.Start({}), IsOk());
  ASSERT_THAT(session.Begin(bound, log.live()), IsOk());
  WrittenFiles written;
  const at::Tensor f = at::randn({100'000});
  const at::Tensor g = at::randn({200'000});
  const std::string path = written.Write({{"g", g}, {"f", f}});
  auto load = FileLoad::Start(session, bound, std::vector<std::string>{path}, {});
  ASSERT_THAT(load, IsOk());
  ASSERT_THAT(LoadAll(**load), IsOk());
  EXPECT_EQ((*load)->stats().in_place_nbytes, 1'200'000);
  ASSERT_TRUE(session.FallbackCallReady());
  const auto call = *session.TakeFallbackCall();
  ASSERT_EQ(call.size(), 2U);
  EXPECT_TRUE(at::equal(call[0].second, g));  // as they arrived: they overlap
  EXPECT_TRUE(at::equal(call[1].second, f));
}

// A reading thread must not write into live bytes that may be put back meanwhile.
TEST(FileLoadAtomicTest, ReadsNothingStraightIntoLiveTensors) {
  LiveLog log;
  const View w = log.Target("w", {1'000'000});
  log.Copy(w, log.Source("x", {1'000'000}));
  const auto bound = log.Bind().value();
  WrittenFiles written;
  const at::Tensor x = at::randn({1'000'000});
  const std::vector<std::string> paths = {written.Write({{"x", x}})};
  for (const bool atomic : {false, true}) {
    ReloadSession session;
    ASSERT_THAT(session.Start({.atomic = atomic}), IsOk());
    ASSERT_THAT(session.Begin(bound, log.live()), IsOk());
    auto load = FileLoad::Start(session, bound, paths, {});
    ASSERT_THAT(load, IsOk());
    ASSERT_THAT(LoadAll(**load), IsOk());
    // Of what a device is to copy in a batch nothing is mapped.
    const char* const batch = std::getenv("LOADPLAN_CUDA_BATCH");
    const bool is_mapped = !atomic && (batch == nullptr || *batch == '\0');
    EXPECT_EQ((*load)->stats().in_place_nbytes, is_mapped ? 4'000'000 : 0);
    ASSERT_THAT(session.PrepareFinish(std::nullopt, log.live()), IsOk());
    ASSERT_THAT(session.Finish(), IsOk());
    EXPECT_TRUE(at::equal(log.live().front().tensor, x));
  }
}

}  // namespace
}  // namespace loadplan
