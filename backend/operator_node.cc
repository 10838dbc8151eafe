#include "backend/operator_node.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "backend/mode.h"

namespace loadplan {
namespace {

// Replay must see the default dtype that the loader saw: `torch.arange(3.0)`, and
// the promotion of Python numbers, depend on it.
class DefaultDtypeGuard {
 public:
  explicit DefaultDtypeGuard(at::ScalarType dtype) : before_(at::get_default_dtype()) {
    at::set_default_dtype(c10::scalarTypeToTypeMeta(dtype));
  }
  ~DefaultDtypeGuard() { at::set_default_dtype(before_); }
  DefaultDtypeGuard(const DefaultDtypeGuard&) = delete;
  DefaultDtypeGuard& operator=(const DefaultDtypeGuard&) = delete;

 private:
  caffe2::TypeMeta before_;
};

void CheckResult(const OperatorNode& node, const at::Tensor& result, const ResultMeta& meta) {
  TORCH_CHECK(result.sizes() == at::IntArrayRef(meta.sizes) && result.scalar_type() == meta.dtype,
              "`", node.op.operator_name(), "` gave a result of shape ", result.sizes(), " and dtype ",
              result.scalar_type(), " where the trace saw ", at::IntArrayRef(meta.sizes), " and ", meta.dtype,
              "; plan again");
}

}  // namespace

void SetArgument(c10::IValue& argument, int64_t element, const at::Tensor& value) {
  if (element < 0) {
    argument = value;
    return;
  }
  const auto index = static_cast<std::size_t>(element);
  if (argument.isTensorList()) {
    c10::List<at::Tensor> list = argument.toTensorList().copy();
    list.set(index, value);
    argument = list;
    return;
  }
  c10::List<std::optional<at::Tensor>> list = argument.toOptionalTensorList().copy();
  list.set(index, value);
  argument = list;
}

std::vector<std::size_t> WrittenArguments(const c10::FunctionSchema& schema) {
  std::vector<std::size_t> written;
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* const alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) written.push_back(i);
  }
  return written;
}

std::vector<at::Tensor> FreshOutputs(const c10::FunctionSchema& schema,
                                     std::span<const c10::IValue> returned) {
  std::vector<at::Tensor> outputs;
  for (std::size_t i = 0; i < returned.size(); ++i) {
    const c10::AliasInfo* const alias = schema.returns()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) continue;
    if (returned[i].isTensor()) {
      outputs.push_back(returned[i].toTensor());
    } else if (returned[i].isTensorList()) {
      for (const at::Tensor& tensor : returned[i].toTensorVector()) outputs.push_back(tensor);
    }
  }
  return outputs;
}

bool AnswersWithoutBytes(const c10::OperatorName& name) {
  constexpr std::string_view kNames[] = {
      "aten::_debug_has_internal_overlap", "aten::_has_compatible_shallow_copy_type",
      "aten::is_distributed", "aten::is_pinned", "aten::is_set_to"};
  return std::ranges::find(kNames, name.name) != std::end(kNames);
}

ResultMeta MetaOf(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

std::vector<at::Tensor> OperatorNode::Run(std::span<const at::Tensor> inputs) const {
  TORCH_CHECK(static_cast<int64_t>(inputs.size()) == num_inputs, "`", op.operator_name(), "` takes ", num_inputs,
              " inputs, got ", inputs.size());
  const ModeOff mode_off;
  const at::AutoDispatchBelowAutograd no_autograd;
  const DefaultDtypeGuard dtype_guard(default_dtype);
  std::vector<c10::IValue> stack = arguments;
  std::size_t next = 0;
  for (const ArgumentSlot& slot : slots) {
    const at::Tensor value = slot.is_output ? at::empty_strided(slot.meta.sizes, slot.meta.strides,
                                                                at::TensorOptions(slot.meta.dtype))
                                            : inputs[next++];
    SetArgument(stack[slot.position], slot.element, value);
  }
  const c10::FunctionSchema& schema = op.schema();
  std::vector<at::Tensor> mutated;
  for (const std::size_t position : WrittenArguments(schema)) {
    if (stack[position].isTensor()) mutated.push_back(stack[position].toTensor());
  }
  op.callBoxed(&stack);
  std::vector<at::Tensor> values = FreshOutputs(schema, stack);
  values.insert(values.end(), mutated.begin(), mutated.end());
  TORCH_CHECK(values.size() == results.size(), "`", op.operator_name(), "` gave ", values.size(),
              " results where the trace saw ", results.size(), "; plan again");
  for (std::size_t i = 0; i < values.size(); ++i) {
    CheckResult(*this, values[i], results[i]);
    // Consumers read the bytes by the strides that the trace saw.
    if (values[i].strides() != at::IntArrayRef(results[i].strides)) {
      values[i] = at::empty_strided(results[i].sizes, results[i].strides, values[i].options())
                      .copy_(values[i]);
    }
  }
  return values;
}

}  // namespace loadplan
