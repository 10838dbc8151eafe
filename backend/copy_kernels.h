// Kernels on the mode key for operators that only move bytes: they are recorded as
// copies, above autograd and without a version counter.
#ifndef LOADPLAN_BACKEND_COPY_KERNELS_H_
#define LOADPLAN_BACKEND_COPY_KERNELS_H_

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>

#include <optional>

namespace loadplan::kernels {

// Signatures are ATen's, with the dispatch keys in front for redispatching.
at::Tensor& copy_(c10::DispatchKeySet keys, at::Tensor& self, const at::Tensor& src,
                  bool non_blocking);
at::Tensor& fill_scalar(c10::DispatchKeySet keys, at::Tensor& self, const at::Scalar& value);
at::Tensor& fill_tensor(c10::DispatchKeySet keys, at::Tensor& self, const at::Tensor& value);
at::Tensor& zero_(c10::DispatchKeySet keys, at::Tensor& self);
at::Tensor _to_copy(c10::DispatchKeySet keys, const at::Tensor& self,
                    std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                    std::optional<at::Device> device, std::optional<bool> pin_memory,
                    bool non_blocking, std::optional<at::MemoryFormat> memory_format);
at::Tensor to_device(c10::DispatchKeySet keys, const at::Tensor& self, at::Device device,
                     at::ScalarType dtype, bool non_blocking, bool copy,
                     std::optional<at::MemoryFormat> memory_format);
at::Tensor to_dtype_layout(c10::DispatchKeySet keys, const at::Tensor& self,
                           std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                           std::optional<at::Device> device, std::optional<bool> pin_memory,
                           bool non_blocking, bool copy,
                           std::optional<at::MemoryFormat> memory_format);
at::Tensor to_other(c10::DispatchKeySet keys, const at::Tensor& self, const at::Tensor& other,
                    bool non_blocking, bool copy, std::optional<at::MemoryFormat> memory_format);
at::Tensor clone(c10::DispatchKeySet keys, const at::Tensor& self,
                 std::optional<at::MemoryFormat> memory_format);
at::Tensor cat(c10::DispatchKeySet keys, const at::ITensorListRef& tensors, int64_t dim);
at::Tensor stack(c10::DispatchKeySet keys, at::TensorList tensors, int64_t dim);
at::Tensor _pin_memory(c10::DispatchKeySet keys, const at::Tensor& self,
                       std::optional<at::Device> device);

}  // namespace loadplan::kernels

#endif  // LOADPLAN_BACKEND_COPY_KERNELS_H_
