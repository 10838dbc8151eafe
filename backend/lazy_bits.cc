#include "backend/lazy_bits.h"

#include <ATen/ops/_neg_view.h>
#include <c10/util/Exception.h>

#include <utility>

#include "backend/operator_call.h"

namespace loadplan {
namespace {

at::Tensor Recorded(TraceSession& session, const char* name, const at::Tensor& tensor) {
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  torch::jit::Stack stack{tensor};
  OperatorCall(session, op, &stack).Run();
  return std::move(stack.back()).toTensor();
}

}  // namespace

at::Tensor ResolveLazy(TraceSession& session, const at::Tensor& tensor) {
  const bool is_conj = tensor.is_conj();
  const bool is_neg = tensor.is_neg();
  at::Tensor result = is_conj ? tensor.conj() : tensor;
  if (is_neg) result = result._neg_view();
  // Both only turn signs, so that their order does not matter.
  if (is_conj) result = Recorded(session, "aten::_conj_physical", result);
  if (is_neg) result = Recorded(session, "aten::neg", result);
  return result;
}

void RefuseLazyWrite(TraceSession& session, const char* op,
                     std::initializer_list<at::Tensor> tensors) {
  session.RecordRefusal(op, "writes through a lazily conjugated or negated view", std::nullopt,
                        tensors);
  if (session.stand_ins() != nullptr) return;
  TORCH_CHECK(false, "`", op, "` writes through a lazily conjugated or negated view of ",
              session.Describe(*tensors.begin()), ", which cannot be planned; write to the tensor itself");
}

}  // namespace loadplan
