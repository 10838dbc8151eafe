// PreadHook: what a test makes of every pread of its program while it lives; MadviseHook likewise.
//
//   PreadHook hook([](int fd, void* to, std::size_t nbytes, off_t offset) {
//     return PreadHook::Read(fd, to, std::min<std::size_t>(nbytes, 7), offset);  // short reads
//   });
#ifndef LOADPLAN_TESTS_TRANSFER_PREAD_HOOK_H_
#define LOADPLAN_TESTS_TRANSFER_PREAD_HOOK_H_

#include <sys/types.h>

#include <cstddef>
#include <functional>

namespace loadplan::testing {

class PreadHook {
 public:
  using Call = std::function<ssize_t(int fd, void* to, std::size_t nbytes, off_t offset)>;

  // Called by several threads at once. No thread reads when a hook comes or goes.
  explicit PreadHook(Call call);
  ~PreadHook();
  PreadHook(const PreadHook&) = delete;
  PreadHook& operator=(const PreadHook&) = delete;

  static ssize_t Read(int fd, void* to, std::size_t nbytes, off_t offset);

 private:
  const Call call_;
};

class MadviseHook {
 public:
  using Call = std::function<int(void* start, std::size_t nbytes, int advice)>;

  // As above.
  explicit MadviseHook(Call call);
  ~MadviseHook();
  MadviseHook(const MadviseHook&) = delete;
  MadviseHook& operator=(const MadviseHook&) = delete;

 private:
  const Call call_;
};

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_TRANSFER_PREAD_HOOK_H_
