// What a status says, with more before or behind it.
#ifndef LOADPLAN_LIFECYCLE_ANNOTATE_H_
#define LOADPLAN_LIFECYCLE_ANNOTATE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace loadplan {

inline absl::Status Prefixed(const std::string& prefix, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(prefix, status.message()));
}

inline absl::Status Annotate(const absl::Status& status, const std::string& suffix) {
  return absl::Status(status.code(), absl::StrCat(status.message(), suffix));
}

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_ANNOTATE_H_
