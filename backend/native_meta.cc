#include "backend/native_meta.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/add_meta_dispatch.h>
#include <ATen/ops/div_meta_dispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp_meta_dispatch.h>
#include <ATen/ops/mul_meta_dispatch.h>
#include <ATen/ops/neg_meta_dispatch.h>
#include <ATen/ops/reciprocal_meta_dispatch.h>
#include <ATen/ops/rsqrt_meta_dispatch.h>
#include <ATen/ops/sqrt_meta_dispatch.h>
#include <ATen/ops/sub_meta_dispatch.h>

#include <algorithm>
#include <string>
#include <utility>

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
