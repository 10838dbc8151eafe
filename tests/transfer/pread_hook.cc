#include "tests/transfer/pread_hook.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

namespace loadplan::testing {
namespace {

const PreadHook::Call* g_call = nullptr;
const MadviseHook::Call* g_madvise = nullptr;

}  // namespace

PreadHook::PreadHook(Call call) : call_(std::move(call)) { g_call = &call_; }
PreadHook::~PreadHook() { g_call = nullptr; }

MadviseHook::MadviseHook(Call call) : call_(std::move(call)) { g_madvise = &call_; }
MadviseHook::~MadviseHook() { g_madvise = nullptr; }

ssize_t PreadHook::Read(int fd, void* to, std::size_t nbytes, off_t offset) {
  return syscall(SYS_pread64, fd, to, nbytes, offset);
}

}  // namespace loadplan::testing

// Before that of the C library, because it is the program's own.
extern "C" ssize_t pread(int fd, void* to, std::size_t nbytes, off_t offset) {
  using loadplan::testing::g_call;
  using loadplan::testing::PreadHook;
  return g_call == nullptr ? PreadHook::Read(fd, to, nbytes, offset)
                           : (*g_call)(fd, to, nbytes, offset);
}

extern "C" int madvise(void* start, std::size_t nbytes, int advice) noexcept {
  using loadplan::testing::g_madvise;
  return g_madvise == nullptr ? static_cast<int>(syscall(SYS_madvise, start, nbytes, advice))
                              : (*g_madvise)(start, nbytes, advice);
}
