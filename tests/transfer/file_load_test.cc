#include "transfer/file_load.h"

#include <ATen/ATen.h>
#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
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
#include "tests/transfer/pread_hook.h"
#include "tests/transfer/written_files.h"
#include "transfer/leased_window.h"

namespace loadplan {
namespace {

using ::loadplan::testing::ForEachRandom;
using ::loadplan::testing::IsOk;
using ::loadplan::testing::kBFloat16;
using ::loadplan::testing::kUint8;
using ::loadplan::testing::LiveLog;
using ::loadplan::testing::PreadHook;
using ::loadplan::testing::RandomLog;
using ::loadplan::testing::StatusIs;
using ::loadplan::testing::View;
using ::loadplan::testing::WrittenFiles;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kDataLoss = absl::StatusCode::kDataLoss;

absl::Status LoadAll(FileLoad& load) {
  while (true) {
    const absl::StatusOr<bool> done = load.Step(0.01);
    if (!done.ok()) return done.status();
    if (*done) return absl::OkStatus();
  }
}

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

constexpr Index kRows = 512;
constexpr Index kColumns = 4096;

// What a rank of several does: `rows` <- half the rows of `r`; `columns` <- a column slice of `c`;
// `half` (bfloat16) <- `h`; `norm` <- `n`; `product` <- `a * b`.
class FileLoadTest : public ::testing::Test {
 protected:
  FileLoadTest() {
    for (const auto& [name, shape] :
         std::vector<std::pair<std::string, std::vector<std::int64_t>>>{{"n", {kColumns}},
                                                                        {"r", {kRows, kColumns}},
                                                                        {"c", {kRows, kColumns}},
                                                                        {"h", {kRows, kColumns}},
                                                                        {"a", {1000}},
                                                                        {"b", {1000}}}) {
      tensors_.emplace_back(name, at::randn(shape));
    }
    Reset();
  }
  void Reset() {
    log_.emplace();
    const View rows = log_->Target("rows", {kRows / 2, kColumns});
    const View columns = log_->Target("columns", {kRows, kColumns / 8});
    const View half = log_->Target("half", {kRows, kColumns}, kBFloat16);
    const View norm = log_->Target("norm", {kColumns});
    const View product = log_->Target("product", {1000});
    log_->Copy(norm, log_->Source("n", {kColumns}));
    log_->Copy(rows, log_->Source("r", {kRows, kColumns}).Slice(0, kRows / 2, kRows));
    log_->Copy(columns, log_->Source("c", {kRows, kColumns}).Slice(1, 512, 1024));
    log_->Copy(half, log_->Source("h", {kRows, kColumns}));
    const View a = log_->Source("a", {1000});
    log_->Copy(product, log_->Multiply(a, log_->Source("b", {1000})));
    plan_ = log_->Bind().value();
    session_.emplace();
    ASSERT_THAT(session_->Start({}), IsOk());
    ASSERT_THAT(session_->Begin(plan_, log_->live()), IsOk());
  }
  absl::StatusOr<std::unique_ptr<FileLoad>> Start(const std::vector<std::string>& paths,
                                                  const FileLoadOptions& options = {}) {
    return FileLoad::Start(*session_, plan_, paths, options);
  }
  void ExpectNewBytes() {
    EXPECT_TRUE(at::equal(log_->target(0), tensors_[1].second.slice(0, kRows / 2)));
    EXPECT_TRUE(at::equal(log_->target(1), tensors_[2].second.slice(1, 512, 1024)));
    EXPECT_TRUE(at::equal(log_->target(2), tensors_[3].second.to(at::kBFloat16)));
    EXPECT_TRUE(at::equal(log_->target(3), tensors_[0].second));
    EXPECT_TRUE(at::equal(log_->target(4), tensors_[4].second * tensors_[5].second));
  }
  bool IsOld(std::size_t target) {
    const at::Tensor& now = log_->target(target);
    return at::equal(now, at::full_like(now, 77));
  }

  WrittenFiles written_;
  WrittenFiles::Tensors tensors_;
  std::optional<LiveLog> log_;
  std::shared_ptr<const BoundPlan> plan_;
  std::optional<ReloadSession> session_;
};

TEST_F(FileLoadTest, ReadsWhatIsNeededInEveryWay) {
  const std::string path = written_.Write(tensors_);
  for (const bool direct : {false, true}) {
    for (const Index gap : {Index{1000}, Index{1} << 20}) {
      for (const Index staging : {Index{1} << 18, Index{1} << 28}) {
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
        // `rows` and no other is large, contiguous and copied as it is.
        EXPECT_EQ(stats.in_place_nbytes, kAll / 2);
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

// Rows of `c`, among others, have been read when the change is seen, and none is written.
TEST_F(FileLoadTest, AFileThatChangesWhileABatchIsReadLeavesWhatWasStaged) {
  for (const bool is_cut_short : {false, true}) {
    Reset();
    const std::string path = written_.Write(tensors_);
    auto load = Start({path}, {.num_threads = 1, .gap = 1000});
    ASSERT_THAT(load, IsOk());
    std::atomic<int> num_reads = 0;
    const PreadHook hook([&](int fd, void* to, std::size_t nbytes, off_t offset) {
      if (++num_reads == 20) {
        const auto size = std::filesystem::file_size(path);
        std::filesystem::resize_file(path, is_cut_short ? size / 3 : size + 1);
      }
      return PreadHook::Read(fd, to, nbytes, offset);
    });
    EXPECT_THAT(LoadAll(**load),
                StatusIs(kDataLoss, AllOf(HasSubstr(path),
                                          HasSubstr(is_cut_short ? "cut short" : "changed"))));
    EXPECT_GE(num_reads, 20);
    EXPECT_TRUE(IsOld(1));
    EXPECT_TRUE(IsOld(2));
    EXPECT_EQ(session_->report().state, SessionState::kFailed);
    EXPECT_FALSE(session_->report().undefined.empty());
  }
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
    // `h` is cast: it is not copied by the threads that read it.
    EXPECT_GE(read, is_open_for_writing ? 2 * kAll : kAll);
    if (!is_open_for_writing) {
      EXPECT_EQ(read, kAll);
      EXPECT_EQ((*load)->stats().read_nbytes, (*load)->stats().needed_nbytes);
      EXPECT_EQ((*load)->stats().planned_nbytes, (*load)->stats().needed_nbytes);
    }
    EXPECT_EQ((*load)->stats().in_place_nbytes, kAll / 2 + kAll / 8 + kColumns * 4 + 8000);
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

TEST_F(FileLoadTest, AFileThatChangesBetweenTwoBatchesFailsTheSession) {
  const std::string path = written_.Write(tensors_);
  auto load = Start({path}, {.max_staging_nbytes = 1 << 18});
  ASSERT_THAT(load, IsOk());
  ASSERT_THAT((*load)->Step(0), IsOk());  // some batches are under way
  std::ofstream(path, std::ios::app) << "more";
  EXPECT_THAT(LoadAll(**load), StatusIs(kDataLoss, AllOf(HasSubstr("was changed"),
                                                         HasSubstr("undefined until a complete"))));
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
    EXPECT_EQ((*load)->stats().in_place_nbytes, atomic ? 0 : 4'000'000);
    ASSERT_THAT(session.PrepareFinish(std::nullopt, log.live()), IsOk());
    ASSERT_THAT(session.Finish(), IsOk());
    EXPECT_TRUE(at::equal(log.live().front().tensor, x));
  }
}

}  // namespace
}  // namespace loadplan
