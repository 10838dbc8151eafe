// Kernels on the mode key for the operators that make every strided tensor which torch does not
// make inside a kernel, and for the one that it calls on what it made of other data: a pass
// remembers what it has made. See Note [Mirrors] in backend/mirrors.h.
#ifndef LOADPLAN_BACKEND_FACTORY_KERNELS_H_
#define LOADPLAN_BACKEND_FACTORY_KERNELS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>

namespace loadplan::kernels {

// Signatures are ATen's, with the dispatch keys in front for redispatching.
at::Tensor noted_empty(c10::DispatchKeySet keys, c10::SymIntArrayRef size,
                       std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                       std::optional<at::Device> device, std::optional<bool> pin_memory,
                       std::optional<at::MemoryFormat> memory_format);
at::Tensor noted_empty_strided(c10::DispatchKeySet keys, c10::SymIntArrayRef size,
                               c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout> layout, std::optional<at::Device> device,
                               std::optional<bool> pin_memory);
// `torch.tensor`, `from_numpy`.
at::Tensor noted_lift_fresh(c10::DispatchKeySet keys, const at::Tensor& self);

}  // namespace loadplan::kernels

#endif  // LOADPLAN_BACKEND_FACTORY_KERNELS_H_
