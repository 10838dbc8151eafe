// Attempt: what raises, as a status.
#ifndef LOADPLAN_LIFECYCLE_ATTEMPT_H_
#define LOADPLAN_LIFECYCLE_ATTEMPT_H_

#include <c10/util/Exception.h>

#include <exception>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace loadplan {

// What `Step` gives: a Status or a StatusOr; a Status where it gives nothing.
template <typename Step>
using Attempted = std::conditional_t<std::is_void_v<std::invoke_result_t<Step>>, absl::Status,
                                     std::invoke_result_t<Step>>;

// Calls `step`. What torch, a library under it or the standard library raises in it, memory that
// cannot be had above all, becomes Internal; `on_raise` says what is made of that.
template <typename Step, typename OnRaise>
Attempted<Step> Attempt(const Step& step, const OnRaise& on_raise) {
  std::string raised;
  try {
    if constexpr (std::is_void_v<std::invoke_result_t<Step>>) {
      step();
      return absl::OkStatus();
    } else {
      return step();
    }
  } catch (const c10::Error& error) {
    raised = error.what_without_backtrace();
  } catch (const std::exception& error) {
    raised = error.what();
  }
  return on_raise(absl::InternalError(raised));
}

template <typename Step>
Attempted<Step> Attempt(const Step& step) {
  return Attempt(step, [](const absl::Status& raised) { return raised; });
}

// The same; `what` was attempted stands before what was raised.
template <typename Step>
Attempted<Step> Attempt(const std::string& what, const Step& step) {
  return Attempt(step, [&](const absl::Status& raised) {
    return absl::InternalError(absl::StrCat(what, ": ", std::string(raised.message())));
  });
}

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_ATTEMPT_H_
