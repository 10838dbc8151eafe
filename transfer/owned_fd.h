// OwnedFd: a file descriptor that is closed with its owner.
#ifndef LOADPLAN_TRANSFER_OWNED_FD_H_
#define LOADPLAN_TRANSFER_OWNED_FD_H_

#include <unistd.h>

#include <utility>

namespace loadplan {

class OwnedFd {
 public:
  explicit OwnedFd(int fd = -1) : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~OwnedFd() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_OWNED_FD_H_
