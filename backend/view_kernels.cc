#include "backend/view_kernels.h"

#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/select_native.h>
#include <ATen/ops/slice_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/util/Exception.h>

#include "backend/trace_session.h"
#include "backend/trace_tensor.h"

namespace loadplan::kernels {
namespace {

TraceSession& CurrentSession() {
  TraceSession* const session = TraceSession::Current();
  TORCH_CHECK(session != nullptr,
              "the trace device has no memory of its own: tensors can be made on it only while a pass runs");
  return *session;
}

}  // namespace

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> storage_offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, storage_offset);
}

const at::Tensor& as_strided_(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                              std::optional<int64_t> storage_offset) {
  const at::Tensor view = as_strided(self, size, stride, storage_offset);  // checks the bounds
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, view.storage_offset());
  return self;
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) {
  return at::native::view(self, size);
}

at::Tensor view_as_complex(const at::Tensor& self) { return at::native::view_as_complex(self); }

at::Tensor view_as_real(const at::Tensor& self) { return at::native::view_as_real(self); }

at::Tensor _reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

at::Tensor slice(const at::Tensor& self, int64_t dim, std::optional<int64_t> start,
                 std::optional<int64_t> end, int64_t step) {
  return at::native::slice(self, dim, start, end, step);
}

at::Tensor select(const at::Tensor& self, int64_t dim, int64_t index) {
  return at::native::select_symint(self, dim, index);
}

at::Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout> /*layout*/,
                               std::optional<at::Device> /*device*/,
                               std::optional<bool> /*pin_memory*/,
                               std::optional<at::MemoryFormat> memory_format) {
  const at::ScalarType type = dtype.value_or(at::get_default_dtype_as_scalartype());
  at::Tensor result = CurrentSession().NewTemporary(size, {}, type);
  if (memory_format.has_value() && *memory_format != at::MemoryFormat::Contiguous) {
    result.unsafeGetTensorImpl()->empty_tensor_restride(*memory_format);
  }
  return result;
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                         std::optional<at::Device> /*device*/, std::optional<bool> /*pin_memory*/) {
  return CurrentSession().NewTemporary(size, stride,
                                       dtype.value_or(at::get_default_dtype_as_scalartype()));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto itemsize = static_cast<int64_t>(self.element_size());
  const auto length = static_cast<int64_t>(source.nbytes()) / itemsize;
  return set_storage_offset(self, std::move(source), 0, {length}, {});
}

at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, int64_t storage_offset,
                               at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(ContextOf(source.unsafeGetStorageImpl()) != nullptr,
              "`aten::set_`: a trace tensor cannot be moved over real memory");
  c10::TensorImpl* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.size() == size.size() && !size.empty()) {
    impl->set_sizes_and_strides(size, stride, storage_offset);
  } else {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(storage_offset);
  }
  return self;
}

}  // namespace loadplan::kernels
