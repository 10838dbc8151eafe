#include "transfer/read_fully.h"

#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace loadplan {

absl::Status ReadFully(int fd, Index offset, Index nbytes, std::byte* to, Index* failed_at) {
  Index done = 0;
  while (done < nbytes) {
    const ssize_t got =
        pread(fd, to + done, static_cast<std::size_t>(nbytes - done), offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0 && failed_at != nullptr) *failed_at = offset + done;
    if (got < 0) {
      const std::string why = std::generic_category().message(errno);
      return absl::DataLossError(absl::StrCat("cannot be read at byte ", offset + done, ": ", why));
    }
    if (got == 0) {
      return absl::DataLossError(
          absl::StrFormat("ends at byte %d, where bytes [%d, %d) were to be "
                          "read; it was cut short",
                          offset + done, offset, offset + nbytes));
    }
    done += got;
  }
  return absl::OkStatus();
}

}  // namespace loadplan
