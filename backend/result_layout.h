// Whether the layout that a meta kernel gives a result is the one of a real call.
#ifndef LOADPLAN_BACKEND_RESULT_LAYOUT_H_
#define LOADPLAN_BACKEND_RESULT_LAYOUT_H_

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <span>

namespace loadplan {

// False where a real call may order the strides of a new result otherwise: meta kernels that were
// written apart from the real ones, for another device, or by the author of a custom operator.
bool LayoutIsSure(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments);

// Whether an element of the result depends on the same element of the arguments alone, so that its
// bits do not depend on the order in which elements are visited.
bool IsElementwise(const c10::OperatorHandle& op);

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_RESULT_LAYOUT_H_
