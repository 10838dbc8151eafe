// Matchers for absl::Status and absl::StatusOr, which the packaged Abseil has none of.
//
//   EXPECT_THAT(StridedLayout::Create(...), StatusIs(kInvalidArgument, HasSubstr("shape")));
//   EXPECT_THAT(Overlaps(a, b), IsOkAndHolds(true));
#ifndef LOADPLAN_TESTS_TESTING_STATUS_MATCHERS_H_
#define LOADPLAN_TESTS_TESTING_STATUS_MATCHERS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"

namespace loadplan::testing {

inline absl::Status GetStatus(const absl::Status& status) { return status; }
template <typename T>
absl::Status GetStatus(const absl::StatusOr<T>& value) {
  return value.status();
}

MATCHER(IsOk, negation ? "is an error" : "is OK") {
  const absl::Status status = GetStatus(arg);
  if (!status.ok()) *result_listener << "whose status is " << status.ToString();
  return status.ok();
}

MATCHER_P(IsOkAndHolds, value, "is OK and holds " + ::testing::PrintToString(value)) {
  if (!arg.ok()) {
    *result_listener << "whose status is " << arg.status().ToString();
    return false;
  }
  return ::testing::ExplainMatchResult(value, *arg, result_listener);
}

MATCHER_P2(StatusIs, code, message, "has status code " + absl::StatusCodeToString(code)) {
  const absl::Status status = GetStatus(arg);
  *result_listener << "whose status is " << status.ToString();
  return status.code() == code &&
         ::testing::ExplainMatchResult(message, std::string(status.message()), result_listener);
}

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_TESTING_STATUS_MATCHERS_H_
