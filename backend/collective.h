// Operators that exchange tensors with other processes, and what operators write that do not say
// so in their schema.
#ifndef LOADPLAN_BACKEND_COLLECTIVE_H_
#define LOADPLAN_BACKEND_COLLECTIVE_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace loadplan {

// Whether the operator exchanges tensors with other processes: `c10d`'s, the functional ones, and
// custom ones that take the name of a group (`vllm::all_reduce`). No single process can run one
// again, and a meta kernel says nothing of the other processes' bytes.
bool IsCollective(const c10::OperatorHandle& op);

// Whether it moves no bytes: a barrier, or what waits for an exchange and returns its tensor.
bool OnlyWaits(const c10::OperatorHandle& op);

// Whether the operator may write the argument. The schemas of `c10d` do not say
// (`broadcast_(Tensor[] tensors, ...)` has no `(a!)`), so that all that they take counts as
// written.
bool MayWrite(const c10::OperatorHandle& op, std::size_t position);

// Calls `visit(element, tensor)` for each tensor of an argument; `element` is -1 where it is a
// tensor itself, and counts through lists of lists (`allgather_`).
template <typename Visitor>
void ForEachTensor(const c10::IValue& argument, Visitor&& visit) {
  if (argument.isTensor()) return visit(int64_t{-1}, argument.toTensor());
  int64_t element = 0;
  if (argument.isTensorList()) {
    for (const at::Tensor& tensor : argument.toTensorVector()) visit(element++, tensor);
  } else if (argument.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : argument.toOptionalTensorVector())
      visit(element++, tensor.value_or(at::Tensor()));
  } else if (argument.isList()) {
    for (const c10::IValue& list : argument.toListRef()) {
      if (!list.isTensorList()) return;
      for (const at::Tensor& tensor : list.toTensorVector()) visit(element++, tensor);
    }
  }
}

// What an operator that has not run returns: its arguments, and a Work that is done. A
// pass that explores goes on with it.
std::vector<c10::IValue> ReturnsOfNoExchange(const c10::FunctionSchema& schema,
                                             c10::ArrayRef<c10::IValue> arguments);

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_COLLECTIVE_H_
