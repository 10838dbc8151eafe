// LeasedWindow: a range of a file, mapped while nobody can change the file.
//
//   if (const auto window = LeasedWindow::Open(fd, {0, nbytes}, {{0, nbytes}})) {
//     std::memcpy(to, window->data(), nbytes);
//   } else {
//     // pread, which says what is wrong, if anything is
//   }
#ifndef LOADPLAN_TRANSFER_LEASED_WINDOW_H_
#define LOADPLAN_TRANSFER_LEASED_WINDOW_H_

#include <cstddef>
#include <optional>
#include <span>

#include "geometry/export.h"
#include "geometry/index.h"
#include "transfer/owned_fd.h"

namespace loadplan {

// Note [Mapped files]
//
// Who touches a mapped page behind the end of its file dies of SIGBUS, so a file that another
// process may cut short must not be mapped. A read lease (F_SETLEASE) rules that out: it is refused
// while anyone has the file open for writing, and whoever would open it for writing, or truncate
// it, waits until it is given back. A lease that is not given back ends after
// /proc/sys/fs/lease-break-time (45 s); a window lasts milliseconds, or as long as one large tensor
// takes. While a writer waits there are no new leases: what comes next is read instead, and the
// stamps of the file tell what happened.
//
// What can go wrong with a page is found when the window is opened: MADV_POPULATE_READ brings all
// that will be touched, and fails where a touch would end the process.
//
// A lease needs a file of the process's own user (or CAP_LEASE). File systems of a network can
// change a file from elsewhere, and those of a user as they like: only those are mapped that are
// known to keep the rule.
class LOADPLAN_API LeasedWindow {
 public:
  // Whether windows of the file, which has a byte, can be had as things are now.
  static bool IsPossible(int fd);
  // Maps `range` of the file. nullopt: it cannot be had now; read instead. Compare the stamp of the
  // file after it: what it was before the lease is not known.
  static std::optional<LeasedWindow> Open(int fd, ByteRange range);
  // The same with Bring.
  static std::optional<LeasedWindow> Open(int fd, ByteRange range,
                                          std::span<const ByteRange> touched);
  LeasedWindow(LeasedWindow&& other) noexcept;
  LeasedWindow& operator=(LeasedWindow&& other) = delete;
  ~LeasedWindow();

  // Brings `touched`, parts of the range, ascending: no other byte may be read. False: some cannot
  // be had, of which a read says more. Several threads may at once.
  bool Bring(std::span<const ByteRange> touched) const;
  // Whether nobody waits to change the file.
  bool IsQuiet() const;

  // Byte `range.start` of the file.
  const std::byte* data() const { return data_; }

 private:
  LeasedWindow() = default;

  OwnedFd leased_;  // an open file of its own: a lease belongs to one
  void* pages_ = nullptr;
  std::size_t nbytes_ = 0;  // of the pages
  ByteRange range_;
  const std::byte* data_ = nullptr;
};

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_LEASED_WINDOW_H_
