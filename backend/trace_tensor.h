// Trace tensors: ordinary TensorImpls on the PrivateUse1 device over a storage
// that holds no data.
//
// The storage's DataPtr is null; its context says which storage of which pass it
// is. Stock view kernels work on such tensors as they are, and sizes, strides,
// offset and dtype are the symbolic geometry. People read "trace"; the device
// itself keeps the name `privateuseone` (a rename would make it the process's
// accelerator).
#ifndef LOADPLAN_BACKEND_TRACE_TENSOR_H_
#define LOADPLAN_BACKEND_TRACE_TENSOR_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <atomic>
#include <memory>
#include <string>

#include "plan/records.h"

namespace loadplan {

class TraceSession;

// What the DataPtr of a trace storage points to.
struct TraceContext {
  std::shared_ptr<TraceSession> session;
  // Where an eager call would have the tensor: see Note [Claimed devices].
  c10::Device claimed;
  // Another one after a write into an operator's output, which itself never changes.
  std::atomic<StorageId> storage = -1;
};

// Note [Claimed devices]
//
//   w.cpu().zero_()               zeroes `w` itself where `w` is on the CPU
//   if w.is_cuda: ...             a loader may ask
//
// A trace tensor lies on PrivateUse1, but an eager call gets checkpoint tensors on the device
// that `ParamMeta` names, or on that of the first target. So each storage carries the device
// that it stands for: `to` returns its argument where it is there already, and the package
// answers with it while a pass runs. Results are on the device of their first argument.
c10::Device ClaimedDevice(const at::Tensor& tensor);  // of any other tensor: its own device
void ClaimDevice(const at::Tensor& trace_tensor, c10::Device device);

inline bool IsTraceTensor(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has_backend(c10::BackendComponent::PrivateUse1Bit);
}

// The context of a trace storage; nullptr for any other storage, also for one of
// another backend that owns PrivateUse1.
TraceContext* ContextOf(const c10::StorageImpl* storage);

// A null pointer whose context names `storage`.
c10::DataPtr MakeTraceDataPtr(std::shared_ptr<TraceSession> session, StorageId storage);

// A new trace tensor with a storage of its own; `what` completes the sentence
// "... holds no data while it is traced".
at::Tensor MakeTraceTensor(std::shared_ptr<TraceSession> session, StorageId storage, Index nbytes,
                           const std::string& what, at::IntArrayRef sizes, at::IntArrayRef strides,
                           at::ScalarType dtype);

// A meta tensor with the sizes, strides and dtype of `tensor`.
at::Tensor MetaLike(const at::Tensor& tensor);

// Registers allocator and device guard of the device unless another backend owns
// it. Called once when the library loads.
void RegisterTraceDevice();
// "" or why the device cannot be used.
const std::string& TraceDeviceError();

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_TRACE_TENSOR_H_
