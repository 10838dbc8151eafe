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

// One dtype of a chain of casts. The first of a chain is what the items are read as.
//
// torch converts a row of items that lie one after another with vector instructions, others
// one by one, and the two leave other bits for NaN (backend/cast_bits.h). `scattered`: the eager
// call converted to this dtype one by one. Only told for pairs of dtypes where it matters.
struct CastStep {
  DType dtype;
  bool scattered = false;

  CastStep(DType to, bool one_by_one = false) : dtype(to), scattered(one_by_one) {}
  friend bool operator==(const CastStep&, const CastStep&) = default;
};

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_DTYPE_H_
