// What the trace device needs for tensors to exist on it and to be viewed: ATen's
// stock kernels, which touch no data, and factories over symbolic memory.
#ifndef LOADPLAN_BACKEND_VIEW_KERNELS_H_
#define LOADPLAN_BACKEND_VIEW_KERNELS_H_

#include <ATen/core/Tensor.h>

#include <optional>

namespace loadplan::kernels {

// Signatures are ATen's. Views share the storage; sizes, strides and offset are what
// a real tensor's would be (tests/backend/view_parity_test.cc).
at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> storage_offset);
const at::Tensor& as_strided_(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                              std::optional<int64_t> storage_offset);
at::Tensor view(const at::Tensor& self, at::IntArrayRef size);
at::Tensor view_as_complex(const at::Tensor& self);
at::Tensor view_as_real(const at::Tensor& self);
at::Tensor _reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride);
at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step);
at::Tensor slice(const at::Tensor& self, int64_t dim, std::optional<int64_t> start,
                 std::optional<int64_t> end, int64_t step);
at::Tensor select(const at::Tensor& self, int64_t dim, int64_t index);

// New symbolic memory of the current pass. Raises outside a pass.
at::Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout> layout, std::optional<at::Device> device,
                               std::optional<bool> pin_memory,
                               std::optional<at::MemoryFormat> memory_format);
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                         std::optional<at::Device> device, std::optional<bool> pin_memory);

// `deepcopy` puts a tensor together from a storage; only between trace tensors.
at::Tensor& set_storage(at::Tensor& self, at::Storage source);
at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, int64_t storage_offset,
                               at::IntArrayRef size, at::IntArrayRef stride);

}  // namespace loadplan::kernels

#endif  // LOADPLAN_BACKEND_VIEW_KERNELS_H_
