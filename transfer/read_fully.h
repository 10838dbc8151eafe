// pread until all is there.
#ifndef LOADPLAN_TRANSFER_READ_FULLY_H_
#define LOADPLAN_TRANSFER_READ_FULLY_H_

#include <cstddef>

#include "absl/status/status.h"
#include "geometry/index.h"

namespace loadplan {

// Reads bytes [offset, offset + nbytes) of `fd` into `to`. DataLoss: the file ends before them, or
// cannot be read; what was read until then is in `to`. The message starts with a verb: put the file
// in front of it. `failed_at`: then the first byte of the file that is missing.
absl::Status ReadFully(int fd, Index offset, Index nbytes, std::byte* to,
                       Index* failed_at = nullptr);

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_READ_FULLY_H_
