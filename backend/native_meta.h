// Meta kernels of torch's own for the commonest arithmetic.
#ifndef LOADPLAN_BACKEND_NATIVE_META_H_
#define LOADPLAN_BACKEND_NATIVE_META_H_

#include <ATen/core/operator_name.h>
#include <ATen/core/stack.h>

#include <string_view>

namespace loadplan {

// Torch puts meta kernels written in Python before its own, and the first call of one of them
// imports torch._dynamo: some seconds, for a shape. Those in C++ are a part of the kernels that run
// on real tensors, so that sizes and strides are exactly theirs.
//
// Calls the operator on the meta tensors on `stack`, in place of the dispatcher; false where it is
// none of these.
bool RunNativeMeta(const c10::OperatorName& name, torch::jit::Stack& stack);

// Whether a meta kernel refused for want of values. Those written in Python do so in words of
// their own.
bool SaysThatMetaHasNoValues(std::string_view error);

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_NATIVE_META_H_
