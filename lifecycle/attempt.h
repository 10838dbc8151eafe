// Attempt: what raises, as a status.
#ifndef LOADPLAN_LIFECYCLE_ATTEMPT_H_
#define LOADPLAN_LIFECYCLE_ATTEMPT_H_

#include <c10/util/Exception.h>

#include <exception>
#include <string>
#include <type_traits>

#include "absl/status/status.h"

namespace loadplan {

// Calls `step`, which gives a Status or a StatusOr. What torch or the standard library raises in
// it, memory that cannot be had above all, becomes Internal; `on_raise` says what is made of that.
template <typename Step, typename OnRaise>
std::invoke_result_t<Step> Attempt(const Step& step, const OnRaise& on_raise) {
  std::string what;
  try {
    return step();
  } catch (const c10::Error& error) {
    what = error.what_without_backtrace();
  } catch (const std::exception& error) {
    what = error.what();
  }
  return on_raise(absl::InternalError(what));
}

template <typename Step>
std::invoke_result_t<Step> Attempt(const Step& step) {
  return Attempt(step, [](const absl::Status& raised) { return raised; });
}

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_ATTEMPT_H_
