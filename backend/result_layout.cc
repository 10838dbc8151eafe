#include "backend/result_layout.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <string_view>

namespace loadplan {
namespace {

// Found by comparing torch's kernels on the CPU with their meta kernels, for every operator of its
// own test inputs, contiguous and transposed. The watcher sees composite operators whole.
constexpr std::string_view kOwnLayout[] = {
    "aten::svd",
    "aten::linalg_svd",
    "aten::_linalg_svd",
    "aten::linalg_eig",
    "aten::max_unpool2d",
    "aten::max_unpool3d",
    "aten::group_norm",
    "aten::native_group_norm",
    "aten::batch_norm",
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit_no_training",
    "aten::_batch_norm_with_update",
    "aten::_batch_norm_no_update",
    "aten::nonzero_static",
    "aten::nll_loss_nd",
    "aten::nll_loss2d",
    "aten::nll_loss2d_forward",
};

// Sure on contiguous tensors only.
constexpr std::string_view kOwnLayoutOfStrides[] = {
    "aten::copysign",   "aten::div",         "aten::floor_divide", "aten::heaviside",
    "aten::ldexp",      "aten::logaddexp",   "aten::logaddexp2",   "aten::logical_and",
    "aten::logical_or", "aten::logical_xor",
};

}  // namespace

bool LayoutIsSure(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments) {
  const std::string_view name = op.operator_name().name;
  if (!name.starts_with("aten::") && !name.starts_with("prims::")) return false;
  if (name.starts_with("aten::fft_") || name.starts_with("aten::_fft_")) return false;
  if (std::ranges::find(kOwnLayout, name) != std::end(kOwnLayout)) return false;
  if (std::ranges::find(kOwnLayoutOfStrides, name) == std::end(kOwnLayoutOfStrides)) return true;
  return std::ranges::all_of(arguments, [](const c10::IValue& value) {
    return !value.isTensor() || value.toTensor().is_contiguous();
  });
}

bool IsElementwise(const c10::OperatorHandle& op) {
  const std::string_view name = op.operator_name().name;
  return op.hasTag(at::Tag::pointwise) || name == "aten::_to_copy" || name == "aten::floor_divide";
}

}  // namespace loadplan
