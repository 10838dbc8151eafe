#include "backend/inner_tensors.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "backend/mode.h"

namespace loadplan {
namespace {

constexpr c10::DispatchKeySet kWrapperKeys{
    c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize};

}  // namespace

bool IsWrapper(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has_any(kWrapperKeys);
}

std::vector<at::Tensor> InnerTensors(const at::Tensor& tensor) {
  if (!IsWrapper(tensor)) return {tensor};
  const auto op = c10::Dispatcher::singleton().findOp({"loadplan::inner_tensors", ""});
  constexpr auto kKey = c10::DispatchKey::CompositeExplicitAutograd;
  if (!op.has_value() || !op->hasKernelForDispatchKey(kKey)) return {};
  const ModeOff mode_off;
  torch::jit::Stack stack{tensor};
  // Past the wrapper's own dispatch.
  op->redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  return stack.back().toTensorVector();
}

}  // namespace loadplan
