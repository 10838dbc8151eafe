// Every table of kernels of the trace device. See Note [The mode key] in backend/mode.h.
#include <ATen/ops/split_copy_compositeexplicitautogradnonfunctional_dispatch.h>
#include <ATen/ops/unbind_copy_compositeexplicitautogradnonfunctional_dispatch.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <string_view>

#include "absl/container/flat_hash_set.h"
#include "backend/copy_kernels.h"
#include "backend/factory_kernels.h"
#include "backend/mode.h"
#include "backend/trace_tensor.h"
#include "backend/view_kernels.h"
#include "backend/watcher.h"

namespace loadplan {
namespace {

// Operators that are no views but only combine views, factories and copies: they
// fall through, and their parts are seen one by one. Anything that rounds stays out: recorded whole
// it is bit-equal to the eager call.
bool IsDecomposed(std::string_view name) {
  static const auto* const names =
      new absl::flat_hash_set<std::string_view>{"_reshape_copy",
                                                "_unsafe_view",
                                                "atleast_1d",
                                                "atleast_2d",
                                                "atleast_3d",
                                                "block_diag",
                                                "broadcast_tensors",
                                                "column_stack",
                                                "concat",
                                                "concatenate",
                                                "constant_pad_nd",
                                                "dstack",
                                                "empty_like",
                                                "flatten_dense_tensors",
                                                "full_like",
                                                "hstack",
                                                "meshgrid",
                                                "narrow_copy",
                                                "new_empty",
                                                "new_empty_strided",
                                                "new_full",
                                                "new_ones",
                                                "new_zeros",
                                                "ones_like",
                                                "pad",
                                                "pin_memory",
                                                "repeat",
                                                "row_stack",
                                                "split_with_sizes_copy",
                                                "tile",
                                                "type_as",
                                                "unsafe_chunk",
                                                "unsafe_split",
                                                "unflatten_dense_tensors",
                                                "unsafe_split_with_sizes",
                                                "vstack",
                                                "zeros_like",
                                                "permute_copy",
                                                "expand_copy",
                                                "transpose_copy",
                                                "t_copy",
                                                "select_copy",
                                                "slice_copy",
                                                "squeeze_copy",
                                                "unsqueeze_copy",
                                                "view_copy",
                                                "unbind_copy",
                                                "split_copy",
                                                "detach_copy",
                                                "alias_copy"};
  return names->contains(name) || name.starts_with("_foreach_");
}

bool TakesTensors(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.type()->str().find("Tensor") != std::string::npos) return true;
  }
  return false;
}

// Views, and operators that may return their argument (`reshape`, `to`, `contiguous`).
bool IsPureAlias(const c10::FunctionSchema& schema) {
  bool aliases = false;
  for (const c10::Argument& argument : schema.arguments()) {
    const c10::AliasInfo* const alias = argument.alias_info();
    if (alias == nullptr) continue;
    if (alias->isWrite()) return false;
    aliases = true;
  }
  return aliases;
}

// Set by the tables below, in this file's order; never torn down, as torch's own are.
struct Tables {
  std::unique_ptr<torch::Library> mode;
  std::unique_ptr<torch::Library> backend;
};

void RegisterFallthroughs(torch::Library& mode) {
  for (const c10::OperatorName& op_name : c10::Dispatcher::singleton().getAllOpNames()) {
    const std::string_view full = op_name.name;
    if (!full.starts_with("aten::")) continue;
    const auto op = c10::Dispatcher::singleton().findOp(op_name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(kModeKey)) continue;
    const c10::FunctionSchema& schema = op->schema();
    if (IsPureAlias(schema) || !TakesTensors(schema) || IsDecomposed(full.substr(6))) {
      mode.impl(c10::toString(op_name).c_str() + 6, torch::CppFunction::makeFallthrough());
    }
  }
}

// Structured operators end in a composite kernel that outranks a backend fallback and asks
// for data pointers, so each is registered by name.
void RegisterFallbacks(torch::Library& backend) {
  for (const c10::OperatorName& op_name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!op_name.name.starts_with("aten::")) continue;
    const auto op = c10::Dispatcher::singleton().findOp(op_name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional))
      continue;
    backend.impl(c10::toString(op_name).c_str() + 6,
                 torch::CppFunction::makeFromBoxedFunction<&JoinAndCall>());
  }
}

void RegisterViews(torch::Library& m) {
  m.impl("_reshape_alias", TORCH_FN(kernels::_reshape_alias));
  m.impl("as_strided", TORCH_FN(kernels::as_strided));
  m.impl("as_strided_", TORCH_FN(kernels::as_strided_));
  m.impl("empty.memory_format", TORCH_FN(kernels::empty_memory_format));
  m.impl("empty_strided", TORCH_FN(kernels::empty_strided));
  m.impl("select.int", TORCH_FN(kernels::select));
  m.impl("set_.source_Storage", TORCH_FN(kernels::set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(kernels::set_storage_offset));
  m.impl("slice.Tensor", TORCH_FN(kernels::slice));
  m.impl("unfold", TORCH_FN(kernels::unfold));
  m.impl("view", TORCH_FN(kernels::view));
  // Torch's own: views, and a copy of each.
  namespace parts = at::compositeexplicitautogradnonfunctional;
  m.impl("split_copy.Tensor", TORCH_FN(parts::split_copy));
  m.impl("unbind_copy.int", TORCH_FN(parts::unbind_copy));
  m.impl("view_as_complex", TORCH_FN(kernels::view_as_complex));
  m.impl("view_as_real", TORCH_FN(kernels::view_as_real));
  // Reached only in a thread that does not take part yet.
  for (const char* name : {"_copy_from", "_local_scalar_dense", "_to_copy", "cat", "clone", "copy_",
                           "fill_.Scalar", "fill_.Tensor", "stack", "zero_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&JoinAndCall>());
  }
}

void RegisterCopies(torch::Library& m) {
  m.impl("_pin_memory", TORCH_FN(kernels::_pin_memory));
  m.impl("_to_copy", TORCH_FN(kernels::_to_copy));
  m.impl("cat", TORCH_FN(kernels::cat));
  m.impl("clone", TORCH_FN(kernels::clone));
  m.impl("copy_", TORCH_FN(kernels::copy_));
  m.impl("empty.memory_format", TORCH_FN(kernels::noted_empty));
  m.impl("empty_strided", TORCH_FN(kernels::noted_empty_strided));
  m.impl("fill_.Scalar", TORCH_FN(kernels::fill_scalar));
  m.impl("fill_.Tensor", TORCH_FN(kernels::fill_tensor));
  m.impl("lift_fresh", TORCH_FN(kernels::noted_lift_fresh));
  m.impl("stack", TORCH_FN(kernels::stack));
  m.impl("to.device", TORCH_FN(kernels::to_device));
  m.impl("to.dtype_layout", TORCH_FN(kernels::to_dtype_layout));
  m.impl("to.other", TORCH_FN(kernels::to_other));
  m.impl("zero_", TORCH_FN(kernels::zero_));
}

// A second copy of the library (two wheels, a host that links it as well) must be
// harmless: the first one serves the process.
bool AlreadyRegistered() {
  const auto copy = c10::Dispatcher::singleton().findOp({"aten::copy_", ""});
  return copy.has_value() && copy->hasKernelForDispatchKey(kModeKey);
}

const Tables* Register() {
  if (AlreadyRegistered()) return nullptr;
  auto* const tables = new Tables;
  RegisterTraceDevice();
  tables->mode =
      std::make_unique<torch::Library>(torch::Library::IMPL, "aten", kModeKey, __FILE__, __LINE__);
  RegisterCopies(*tables->mode);
  RegisterFallthroughs(*tables->mode);
  if (TraceDeviceError().empty()) {
    tables->backend = std::make_unique<torch::Library>(
        torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    RegisterViews(*tables->backend);
    RegisterFallbacks(*tables->backend);
  }
  static torch::Library mode_fallback(torch::Library::IMPL, "_", kModeKey, __FILE__, __LINE__);
  mode_fallback.fallback(torch::CppFunction::makeFromBoxedFunction<&WatchOperator>());
  if (TraceDeviceError().empty()) {
    static torch::Library backend_fallback(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1,
                                           __FILE__, __LINE__);
    backend_fallback.fallback(torch::CppFunction::makeFromBoxedFunction<&JoinAndCall>());
  }
  return tables;
}

// Kept, though nobody reads it: what it points to would be a leak.
[[gnu::used]] const Tables* const registered = Register();

}  // namespace
}  // namespace loadplan
