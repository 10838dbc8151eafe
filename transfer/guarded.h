// Exceptions of torch and of allocation as a Status, where other ranks or threads wait for this
// one.
#ifndef LOADPLAN_TRANSFER_GUARDED_H_
#define LOADPLAN_TRANSFER_GUARDED_H_

#include <c10/util/Exception.h>

#include <exception>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace loadplan {

// Runs `f`, which returns nothing or a Status. Unavailable, after `what`, where it throws. Gloo's
// exceptions are no c10::Error.
template <typename F>
absl::Status Guarded(const std::string& what, F f) {
  try {
    if constexpr (std::is_void_v<std::invoke_result_t<F>>) {
      f();
      return absl::OkStatus();
    } else {
      return f();
    }
  } catch (const c10::Error& error) {
    return absl::UnavailableError(absl::StrCat(what, ": ", error.what_without_backtrace()));
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat(what, ": ", error.what()));
  }
}

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_GUARDED_H_
