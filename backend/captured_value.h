// Real tensors that take part in an operator of a pass, as its program keeps them.
#ifndef LOADPLAN_BACKEND_CAPTURED_VALUE_H_
#define LOADPLAN_BACKEND_CAPTURED_VALUE_H_

#include <ATen/core/Tensor.h>

namespace loadplan {

// A copy with what decides about kernels and promotion: strides, and whether Python wrapped a
// number (`w.sum() * 0.1`), which promotes unlike a tensor.
at::Tensor CapturedValue(const at::Tensor& tensor);

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_CAPTURED_VALUE_H_
