#include "backend/native_meta.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/_softmax_meta_dispatch.h>
#include <ATen/ops/_to_copy.h>
#include <ATen/ops/add_meta_dispatch.h>
#include <ATen/ops/amax_meta_dispatch.h>
#include <ATen/ops/amin_meta_dispatch.h>
#include <ATen/ops/clamp_max_meta_dispatch.h>
#include <ATen/ops/clamp_meta_dispatch.h>
#include <ATen/ops/clamp_min_meta_dispatch.h>
#include <ATen/ops/div_meta_dispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp_meta_dispatch.h>
#include <ATen/ops/maximum_meta_dispatch.h>
#include <ATen/ops/mean_meta_dispatch.h>
#include <ATen/ops/minimum_meta_dispatch.h>
#include <ATen/ops/mul_meta_dispatch.h>
#include <ATen/ops/neg_meta_dispatch.h>
#include <ATen/ops/pow_meta_dispatch.h>
#include <ATen/ops/reciprocal_meta_dispatch.h>
#include <ATen/ops/round_meta_dispatch.h>
#include <ATen/ops/rsqrt_meta_dispatch.h>
#include <ATen/ops/sigmoid_meta_dispatch.h>
#include <ATen/ops/sqrt_meta_dispatch.h>
#include <ATen/ops/sub_meta_dispatch.h>
#include <ATen/ops/sum_meta_dispatch.h>
#include <ATen/ops/tanh_meta_dispatch.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace loadplan {
namespace {

using torch::jit::Stack;
using Kernel = void (*)(Stack&);

// Results stand where the arguments stood.
void Return(Stack& stack, at::Tensor result) {
  stack.clear();
  stack.emplace_back(std::move(result));
}

template <at::Tensor (*kMeta)(const at::Tensor&)>
void Unary(Stack& stack) {
  Return(stack, kMeta(stack[0].toTensor()));
}
template <at::Tensor& (*kMeta)(at::Tensor&)>
void UnaryInPlace(Stack& stack) {
  at::Tensor self = stack[0].toTensor();
  Return(stack, kMeta(self));
}
template <at::Tensor (*kMeta)(const at::Tensor&, const at::Tensor&)>
void Binary(Stack& stack) {
  Return(stack, kMeta(stack[0].toTensor(), stack[1].toTensor()));
}
template <at::Tensor& (*kMeta)(at::Tensor&, const at::Tensor&)>
void BinaryInPlace(Stack& stack) {
  at::Tensor self = stack[0].toTensor();
  Return(stack, kMeta(self, stack[1].toTensor()));
}
template <at::Tensor (*kMeta)(const at::Tensor&, const at::Tensor&, const at::Scalar&)>
void Scaled(Stack& stack) {
  Return(stack, kMeta(stack[0].toTensor(), stack[1].toTensor(), stack[2].toScalar()));
}
template <at::Tensor& (*kMeta)(at::Tensor&, const at::Tensor&, const at::Scalar&)>
void ScaledInPlace(Stack& stack) {
  at::Tensor self = stack[0].toTensor();
  Return(stack, kMeta(self, stack[1].toTensor(), stack[2].toScalar()));
}

using Bound = std::optional<at::Scalar>;
Bound BoundOf(const c10::IValue& value) {
  return value.isNone() ? Bound() : Bound(value.toScalar());
}
void Clamp(Stack& stack) {
  Return(stack, at::meta::clamp(stack[0].toTensor(), BoundOf(stack[1]), BoundOf(stack[2])));
}
void ClampInPlace(Stack& stack) {
  at::Tensor self = stack[0].toTensor();
  Return(stack, at::meta::clamp_(self, BoundOf(stack[1]), BoundOf(stack[2])));
}
template <at::Tensor (*kMeta)(const at::Tensor&, const at::Scalar&)>
void WithScalar(Stack& stack) {
  Return(stack, kMeta(stack[0].toTensor(), stack[1].toScalar()));
}
template <at::Tensor& (*kMeta)(at::Tensor&, const at::Scalar&)>
void WithScalarInPlace(Stack& stack) {
  at::Tensor self = stack[0].toTensor();
  Return(stack, kMeta(self, stack[1].toScalar()));
}
void DivRounding(Stack& stack) {
  const auto mode = stack[2].toOptional<std::string>();
  Return(stack,
         at::meta::div(stack[0].toTensor(), stack[1].toTensor(),
                       mode.has_value() ? std::optional<c10::string_view>(*mode) : std::nullopt));
}

template <at::Tensor (*kMeta)(const at::Tensor&, at::IntArrayRef, bool)>
void Extremum(Stack& stack) {
  Return(stack, kMeta(stack[0].toTensor(), stack[1].toDimVector(), stack[2].toBool()));
}
// `sum(dim, keepdim, dtype)`; without dimensions it is over all of them, as the kernels say.
template <at::Tensor (*kMeta)(const at::Tensor&, at::OptionalIntArrayRef, bool,
                              std::optional<at::ScalarType>)>
void Reduction(Stack& stack) {
  const auto dims = stack[1].toOptional<std::vector<int64_t>>();
  Return(stack, kMeta(stack[0].toTensor(),
                      dims.has_value() ? at::OptionalIntArrayRef(*dims) : std::nullopt,
                      stack[2].toBool(), stack[3].toOptional<at::ScalarType>()));
}
template <at::Tensor (*kMeta)(const at::Tensor&, at::OptionalIntArrayRef, bool,
                              std::optional<at::ScalarType>)>
void WholeReduction(Stack& stack) {
  Return(stack, kMeta(stack[0].toTensor(), at::IntArrayRef(), false,
                      stack[1].toOptional<at::ScalarType>()));
}
// The composite kernel of `softmax` casts first, but for half on CUDA, where the result is the
// same.
void Softmax(Stack& stack) {
  const auto dtype = stack[2].toOptional<at::ScalarType>();
  at::Tensor self = stack[0].toTensor();
  if (dtype.has_value() && *dtype != self.scalar_type())
    self = at::_to_copy(self, at::TensorOptions(*dtype));
  Return(stack, at::meta::_softmax(self, stack[1].toInt(), /*half_to_float=*/false));
}

// Torch has none for it but in Python; its kernel writes into an `empty_like`.
void ConjPhysical(Stack& stack) { Return(stack, at::empty_like(stack[0].toTensor())); }

const absl::flat_hash_map<std::string, Kernel>& Kernels() {
  namespace meta = at::meta;
  static const auto* const kernels = new absl::flat_hash_map<std::string, Kernel>{
      {"aten::add.Tensor", &Scaled<&meta::add>},
      {"aten::add_.Tensor", &ScaledInPlace<&meta::add_>},
      {"aten::sub.Tensor", &Scaled<&meta::sub>},
      {"aten::sub_.Tensor", &ScaledInPlace<&meta::sub_>},
      {"aten::mul.Tensor", &Binary<&meta::mul>},
      {"aten::mul_.Tensor", &BinaryInPlace<&meta::mul_>},
      {"aten::div.Tensor", &Binary<&meta::div>},
      {"aten::div_.Tensor", &BinaryInPlace<&meta::div_>},
      {"aten::_conj_physical", &ConjPhysical},
      {"aten::div.Tensor_mode", &DivRounding},
      {"aten::clamp", &Clamp},
      {"aten::clamp_", &ClampInPlace},
      {"aten::clamp_min", &WithScalar<&meta::clamp_min>},
      {"aten::clamp_min_", &WithScalarInPlace<&meta::clamp_min_>},
      {"aten::clamp_max", &WithScalar<&meta::clamp_max>},
      {"aten::clamp_max_", &WithScalarInPlace<&meta::clamp_max_>},
      {"aten::maximum", &Binary<&meta::maximum>},
      {"aten::minimum", &Binary<&meta::minimum>},
      {"aten::pow.Tensor_Scalar", &WithScalar<&meta::pow>},
      {"aten::amax", &Extremum<&meta::amax>},
      {"aten::amin", &Extremum<&meta::amin>},
      {"aten::mean", &WholeReduction<&meta::mean>},
      {"aten::mean.dim", &Reduction<&meta::mean>},
      {"aten::sum", &WholeReduction<&meta::sum>},
      {"aten::sum.dim_IntList", &Reduction<&meta::sum>},
      {"aten::softmax.int", &Softmax},
      {"aten::round", &Unary<&meta::round>},
      {"aten::sigmoid", &Unary<&meta::sigmoid>},
      {"aten::tanh", &Unary<&meta::tanh>},
      {"aten::exp", &Unary<&meta::exp>},
      {"aten::exp_", &UnaryInPlace<&meta::exp_>},
      {"aten::neg", &Unary<&meta::neg>},
      {"aten::neg_", &UnaryInPlace<&meta::neg_>},
      {"aten::sqrt", &Unary<&meta::sqrt>},
      {"aten::rsqrt", &Unary<&meta::rsqrt>},
      {"aten::reciprocal", &Unary<&meta::reciprocal>},
  };
  return *kernels;
}

}  // namespace

bool RunNativeMeta(const c10::OperatorName& name, Stack& stack) {
  const auto found = Kernels().find(c10::toString(name));
  if (found == Kernels().end()) return false;
  found->second(stack);
  return true;
}

bool SaysThatMetaHasNoValues(std::string_view error) {
  constexpr std::string_view kWords[] = {
      "meta tensor",    "Meta tensor",    "register_meta", "data-dependent",
      "data dependent", "'Meta' backend", "on meta",       "Cannot copy out of meta"};
  return std::ranges::any_of(
      kWords, [&](std::string_view words) { return error.find(words) != std::string_view::npos; });
}

}  // namespace loadplan
