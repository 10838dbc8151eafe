// OperatorNode: an operator call seen by the trace device, kept so that it can run
// again on real bytes without the loader.
#ifndef LOADPLAN_BACKEND_OPERATOR_NODE_H_
#define LOADPLAN_BACKEND_OPERATOR_NODE_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <span>
#include <string>
#include <vector>

namespace loadplan {

// Sizes and strides (elements) and dtype of a result, as the trace saw them.
struct ResultMeta {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType dtype = at::ScalarType::Byte;
};

// A place among the arguments that is filled anew for each run.
struct ArgumentSlot {
  std::size_t position = 0;  // argument
  int64_t element = -1;      // inside a list; -1: the argument itself
  bool is_output = false;    // an `out=` argument: new memory laid out as `meta`, not an input
  ResultMeta meta;
};

struct OperatorNode {
  c10::OperatorHandle op;
  // Arguments as called; the tensors in `slots` are left out, the others captured by value.
  std::vector<c10::IValue> arguments;
  std::vector<ArgumentSlot> slots;
  // How many of the slots are inputs; Run takes as many tensors, in slot order.
  int64_t num_inputs = 0;
  std::vector<ResultMeta> results;  // fresh outputs first, then mutated arguments
  at::ScalarType default_dtype = at::ScalarType::Float;

  // Runs the operator on `inputs` (laid out as the trace saw them; mutated
  // arguments are mutated in place) and returns the values of `results`. Raises
  // c10::Error if a result has another shape or dtype than the trace saw.
  std::vector<at::Tensor> Run(std::span<const at::Tensor> inputs) const;
};

// Puts `value` in a place of an argument list (lists are copied first, since
// IValue lists are shared by reference).
void SetArgument(c10::IValue& argument, int64_t element, const at::Tensor& value);

// Tensors among the returned values, in order, lists flattened; values that are no
// tensors are skipped. A return that is one of the mutated arguments is skipped too.
std::vector<at::Tensor> FreshOutputs(const c10::FunctionSchema& schema,
                                     std::span<const c10::IValue> returned);

// Positions of the arguments that the operator writes.
std::vector<std::size_t> WrittenArguments(const c10::FunctionSchema& schema);

// Whether what it returns, no tensor, depends on what the arguments are and never on their bytes.
// `module.to(device)` asks such a question of each parameter before it leaves it as it is.
bool AnswersWithoutBytes(const c10::OperatorName& name);

ResultMeta MetaOf(const at::Tensor& tensor);

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_OPERATOR_NODE_H_
