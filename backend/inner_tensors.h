// The tensors that hold the bytes of one that wraps others.
#ifndef LOADPLAN_BACKEND_INNER_TENSORS_H_
#define LOADPLAN_BACKEND_INNER_TENSORS_H_

#include <ATen/core/Tensor.h>

#include <vector>

namespace loadplan {

// Wrapper subclasses and functorch tensors: their own dispatch comes first. What it calls on real
// tensors alone is not seen, as torch switches the mode off there; where it meets a trace tensor,
// the operators inside are seen in turn.
bool IsWrapper(const at::Tensor& tensor);

// `tensor` itself, or what it wraps, as the host's implementation of the operator
// `loadplan::inner_tensors` tells it; empty where there is none. Call it without a lock.
std::vector<at::Tensor> InnerTensors(const at::Tensor& tensor);

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_INNER_TENSORS_H_
