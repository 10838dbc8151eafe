#include "transfer/leased_window.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/transfer/written_files.h"

namespace loadplan {
namespace {

using ::loadplan::testing::WrittenFiles;

class LeasedWindowTest : public ::testing::Test {
 protected:
  LeasedWindowTest() {
    for (std::size_t i = 0; i < text_.size(); ++i) text_[i] = static_cast<char>(i * i % 251);
    path_ = written_.WriteText(text_, "file");
    fd_ = OwnedFd(open(path_.c_str(), O_RDONLY));
  }
  void SetUp() override {
    if (!LeasedWindow::IsPossible(fd_.get())) {
      GTEST_SKIP() << "no leases on files in " << written_.folder();
    }
  }
  std::optional<LeasedWindow> Open(ByteRange range) const {
    return LeasedWindow::Open(fd_.get(), range, {&range, 1});
  }
  std::string_view Bytes(const LeasedWindow& window, Index nbytes) const {
    return {reinterpret_cast<const char*>(window.data()), static_cast<std::size_t>(nbytes)};
  }
  // Open files of this process, and mappings of the file.
  std::size_t NumHeld() const {
    std::size_t count = 0;
    for (const auto& fd : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      if (std::filesystem::read_symlink(fd, gone) == path_) ++count;
    }
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find(path_) != std::string::npos) ++count;
    }
    return count;
  }

  WrittenFiles written_;
  std::string text_ = std::string(300'001, '\0');
  std::string path_;
  OwnedFd fd_;
};

TEST_F(LeasedWindowTest, ShowsTheBytesOfTheFile) {
  const std::string_view text = text_;
  for (const ByteRange range :
       {ByteRange{0, 1}, ByteRange{4095, 4097}, ByteRange{70'001, 300'001}}) {
    const auto window = Open(range);
    ASSERT_TRUE(window.has_value());
    EXPECT_EQ(Bytes(*window, range.nbytes()),
              text.substr(static_cast<std::size_t>(range.start),
                          static_cast<std::size_t>(range.nbytes())));
    EXPECT_EQ(NumHeld(), 3U);  // two descriptors and a mapping
  }
  EXPECT_EQ(NumHeld(), 1U);
  const ByteRange parts[] = {{10, 20}, {299'000, 299'100}};
  const auto window = LeasedWindow::Open(fd_.get(), {10, 299'100}, parts);
  ASSERT_TRUE(window.has_value());
  EXPECT_EQ(window->data()[298'990 + 5], static_cast<std::byte>(text_[299'005]));
}

TEST_F(LeasedWindowTest, IsRefusedBehindTheEnd) {
  EXPECT_FALSE(Open({0, 300'002}).has_value());  // on the last page
  EXPECT_FALSE(Open({0, 400'000}).has_value());
  EXPECT_FALSE(Open({1 << 20, (1 << 20) + 5}).has_value());
  EXPECT_EQ(NumHeld(), 1U);
}

TEST_F(LeasedWindowTest, IsRefusedWhileAnyoneMayWrite) {
  {
    const OwnedFd writer(open(path_.c_str(), O_WRONLY));
    ASSERT_GE(writer.get(), 0);
    EXPECT_FALSE(Open({0, 10}).has_value());
    EXPECT_FALSE(LeasedWindow::IsPossible(fd_.get()));
  }
  EXPECT_TRUE(Open({0, 10}).has_value());
}

// Of this thread alone.
bool GiveUpLeaseCapability() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3];
  if (syscall(SYS_capget, &header, data) != 0) return false;
  data[0].effective &= ~(1U << CAP_LEASE);
  return syscall(SYS_capset, &header, data) == 0;
}

// It is read then, as by any process that is not root.
TEST_F(LeasedWindowTest, IsRefusedForAFileOfAnotherUser) {
  if (chown(path_.c_str(), getuid() + 1, static_cast<gid_t>(-1)) != 0) {
    GTEST_SKIP() << "only root can give a file away";
  }
  ASSERT_TRUE(Open({0, 10}).has_value());
  std::thread([this] {
    ASSERT_TRUE(GiveUpLeaseCapability());
    EXPECT_FALSE(Open({0, 10}).has_value());
    EXPECT_FALSE(LeasedWindow::IsPossible(fd_.get()));
    EXPECT_EQ(NumHeld(), 1U);
  }).join();
  EXPECT_TRUE(Open({0, 10}).has_value());
}

// Whoever would cut the file short waits for the window, without ending this process by a signal,
// and no new window is had meanwhile.
TEST_F(LeasedWindowTest, KeepsTheFileAsItIsWhileItLives) {
  auto window = Open({0, 300'001});
  ASSERT_TRUE(window.has_value());
  std::thread other([&] { std::filesystem::resize_file(path_, 5); });
  bool has_another = true;
  for (int i = 0; i < 5'000 && has_another; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    has_another = Open({0, 10}).has_value();
  }
  EXPECT_FALSE(has_another);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(Bytes(*window, 300'001), text_);
  EXPECT_EQ(std::filesystem::file_size(path_), 300'001U);
  window.reset();
  other.join();
  EXPECT_EQ(std::filesystem::file_size(path_), 5U);
  EXPECT_FALSE(Open({0, 300'001}).has_value());
}

TEST(LeasedWindowFileSystemTest, FilesOfOtherKindsAreNotMapped) {
  const OwnedFd fd(open("/proc/self/maps", O_RDONLY));
  EXPECT_FALSE(LeasedWindow::IsPossible(fd.get()));
  EXPECT_FALSE(LeasedWindow::IsPossible(-1));
}

}  // namespace
}  // namespace loadplan
