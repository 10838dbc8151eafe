// Status to exception: what every class of ops/ ends its calls with.
#ifndef LOADPLAN_OPS_RAISE_H_
#define LOADPLAN_OPS_RAISE_H_

#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace loadplan {

inline void Raise(const absl::Status& status) {
  if (status.ok()) return;
  const std::string message(status.message());
  TORCH_CHECK_VALUE(!absl::IsInvalidArgument(status), message);
  TORCH_CHECK(false, message);
}

template <typename T>
T Value(absl::StatusOr<T> result) {
  Raise(result.status());
  return *std::move(result);
}

}  // namespace loadplan

#endif  // LOADPLAN_OPS_RAISE_H_
