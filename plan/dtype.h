// Element types, without torch.
#ifndef LOADPLAN_PLAN_DTYPE_H_
#define LOADPLAN_PLAN_DTYPE_H_

#include <cstdint>
#include <string_view>

#include "geometry/index.h"

namespace loadplan {

// A dtype as torch numbers it (`c10::ScalarType`; backend/convert.h checks that
// at compile time), its size in bytes, and the name people read (`bfloat16`).
// `name` points to static storage.
struct DType {
  std::int8_t code = 0;
  std::int8_t itemsize = 1;
  std::string_view name = "uint8";

  friend bool operator==(const DType& a, const DType& b) { return a.code == b.code; }
};

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_DTYPE_H_
