#include "transfer/leased_window.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transfer/page_cache.h"

namespace loadplan {
namespace {

constexpr int kPopulateRead = 22;           // MADV_POPULATE_READ, Linux 5.14; not in every header
constexpr Index kBrought = Index{1} << 16;  // gaps up to it come with what is touched

Index PageOf(Index offset) {
  static const Index page = sysconf(_SC_PAGESIZE);
  return offset - offset % page;
}

// A descriptor that holds a lease until it is closed.
OwnedFd Lease(int fd) {
  // Not by its name, which may be another file's by now.
  OwnedFd leased(
      open(absl::StrCat("/proc/self/fd/", fd).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (leased.get() < 0) return leased;
  // Who waits for the lease sends a signal. Nobody here needs it, and SIGIO would end the process:
  // it is one that is ignored, and then it has no receiver.
  if (fcntl(leased.get(), F_SETSIG, SIGURG) != 0 || fcntl(leased.get(), F_SETLEASE, F_RDLCK) != 0 ||
      fcntl(leased.get(), F_SETOWN, 0) != 0) {
    return OwnedFd();
  }
  return leased;
}

}  // namespace

bool LeasedWindow::IsPossible(int fd) {
  const ByteRange first{0, 1};
  return IsOnLocalFileSystem(fd) && Open(fd, first, {&first, 1}).has_value();
}

std::optional<LeasedWindow> LeasedWindow::Open(int fd, ByteRange range) {
  LeasedWindow window;
  window.leased_ = Lease(fd);
  if (window.leased_.get() < 0) return std::nullopt;
  // Not left to the pages: the last one may be touched behind the end, and shows zeros.
  struct stat found {};
  if (fstat(window.leased_.get(), &found) != 0 || found.st_size < range.stop) return std::nullopt;
  const Index start = PageOf(range.start);
  const auto nbytes = static_cast<std::size_t>(range.stop - start);
  void* const pages = mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, window.leased_.get(), start);
  if (pages == MAP_FAILED) return std::nullopt;
  window.pages_ = pages;
  window.nbytes_ = nbytes;
  window.range_ = range;
  window.data_ = static_cast<std::byte*>(pages) + (range.start - start);
  return window;
}

std::optional<LeasedWindow> LeasedWindow::Open(int fd, ByteRange range,
                                               std::span<const ByteRange> touched) {
  std::optional<LeasedWindow> window = Open(fd, range);
  if (window.has_value() && !window->Bring(touched)) return std::nullopt;
  return window;
}

bool LeasedWindow::Bring(std::span<const ByteRange> touched) const {
  auto* const base = static_cast<std::byte*>(pages_);
  const Index start = PageOf(range_.start);
  for (std::size_t i = 0; i < touched.size();) {
    const Index first = PageOf(touched[i].start);
    Index stop = touched[i].stop;
    while (++i < touched.size() && touched[i].start - stop <= kBrought) stop = touched[i].stop;
    if (madvise(base + (first - start), static_cast<std::size_t>(stop - first), kPopulateRead) !=
        0) {
      return false;
    }
  }
  return true;
}

bool LeasedWindow::IsQuiet() const { return fcntl(leased_.get(), F_GETLEASE) == F_RDLCK; }

LeasedWindow::LeasedWindow(LeasedWindow&& other) noexcept
    : leased_(std::move(other.leased_)),
      pages_(std::exchange(other.pages_, nullptr)),
      nbytes_(other.nbytes_),
      range_(other.range_),
      data_(other.data_) {}

// The pages before the lease.
LeasedWindow::~LeasedWindow() {
  if (pages_ != nullptr) munmap(pages_, nbytes_);
  // Not by closing alone: a child of a fork has the same open file.
  if (leased_.get() >= 0) fcntl(leased_.get(), F_SETLEASE, F_UNLCK);
}

}  // namespace loadplan
