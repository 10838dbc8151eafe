#include "backend/factory_kernels.h"

#include <ATen/ops/empty_ops.h>
#include <ATen/ops/empty_strided_ops.h>
#include <ATen/ops/lift_fresh_ops.h>

#include <utility>

#include "backend/mode.h"
#include "backend/trace_session.h"

namespace loadplan::kernels {
namespace {

at::Tensor Noted(at::Tensor made) {
  TraceSession* const session = TraceSession::Current();
  if (session != nullptr && made.layout() == at::kStrided) session->NoteBirth(made);
  return made;
}

}  // namespace

at::Tensor noted_empty(c10::DispatchKeySet keys, c10::SymIntArrayRef size,
                       std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                       std::optional<at::Device> device, std::optional<bool> pin_memory,
                       std::optional<at::MemoryFormat> memory_format) {
  return Noted(at::_ops::empty_memory_format::redispatch(keys & kBelowMode, size, dtype, layout,
                                                         device, pin_memory, memory_format));
}

at::Tensor noted_lift_fresh(c10::DispatchKeySet keys, const at::Tensor& self) {
  // `asarray` lifts what it was given, too.
  const bool is_new = self.has_storage() && self.storage().use_count() == 1;
  at::Tensor lifted = at::_ops::lift_fresh::redispatch(keys & kBelowMode, self);
  return is_new ? Noted(std::move(lifted)) : lifted;
}

at::Tensor noted_empty_strided(c10::DispatchKeySet keys, c10::SymIntArrayRef size,
                               c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout> layout, std::optional<at::Device> device,
                               std::optional<bool> pin_memory) {
  return Noted(at::_ops::empty_strided::redispatch(keys & kBelowMode, size, stride, dtype, layout,
                                                   device, pin_memory));
}

}  // namespace loadplan::kernels
