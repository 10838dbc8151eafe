// What random programs must stay away from: values whose conversion is not defined, and memory
// whose contents would depend on the order in which a kernel visits elements.
#ifndef LOADPLAN_TESTS_DIFFERENTIAL_VALUE_BOUNDS_H_
#define LOADPLAN_TESTS_DIFFERENTIAL_VALUE_BOUNDS_H_

#include <ATen/core/Tensor.h>

#include <limits>
#include <optional>

namespace loadplan::testing {

// The bound of a tensor that may hold any bit pattern.
inline constexpr double kAnything = std::numeric_limits<double>::infinity();

// The largest magnitude that RandomValues gives a dtype.
double BoundOf(at::ScalarType dtype);

// The bound after a conversion; nullopt where it would not be the same on every path.
std::optional<double> CastBound(double bound, at::ScalarType from, at::ScalarType to);

// Whether two elements share memory, by looking at each.
bool TouchesTwice(const at::Tensor& tensor);

// Whether the spans of two tensors share memory: an over-approximation.
bool MayOverlap(const at::Tensor& a, const at::Tensor& b);

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_DIFFERENTIAL_VALUE_BOUNDS_H_
