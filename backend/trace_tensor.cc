#include "backend/trace_tensor.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <utility>

#include "backend/mode.h"
#include "backend/trace_session.h"

namespace loadplan {
namespace {

void DeleteContext(void* context) { delete static_cast<TraceContext*>(context); }

// Storages that torch makes by itself on our device (`deepcopy` makes one): new
// symbolic memory of the current pass.
class TraceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    TraceSession* const session = TraceSession::Current();
    TORCH_CHECK(session != nullptr,
                "the trace device has no memory of its own: tensors can be made on it only while a pass runs");
    const StorageId storage = session->NewTemporaryStorage(static_cast<Index>(nbytes));
    return MakeTraceDataPtr(session->shared_from_this(), storage);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* /*dest*/, const void* /*src*/, std::size_t /*count*/) const override {
    TORCH_CHECK(false, "a trace tensor holds no data that could be copied");
  }
};

std::string& device_error() {
  static std::string* const error = new std::string;
  return *error;
}

}  // namespace

TraceContext* ContextOf(const c10::StorageImpl* storage) {
  const c10::DataPtr& data = const_cast<c10::StorageImpl*>(storage)->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &DeleteContext ? static_cast<TraceContext*>(data.get_context())
                                              : nullptr;
}

c10::Device ClaimedDevice(const at::Tensor& tensor) {
  const TraceContext* const context = IsTraceTensor(tensor) && tensor.has_storage()
                                          ? ContextOf(tensor.storage().unsafeGetStorageImpl())
                                          : nullptr;
  return context == nullptr ? tensor.device() : context->claimed;
}

void ClaimDevice(const at::Tensor& trace_tensor, c10::Device device) {
  if (device.is_privateuseone() || device.is_meta()) return;
  if (TraceContext* const context = ContextOf(trace_tensor.storage().unsafeGetStorageImpl()))
    context->claimed = device;
}

c10::DataPtr MakeTraceDataPtr(std::shared_ptr<TraceSession> session, StorageId storage) {
  const c10::Device claimed = session->home();
  auto* const context = new TraceContext{std::move(session), claimed, storage};
  return {nullptr, context, &DeleteContext, c10::Device(c10::kPrivateUse1, 0)};
}

at::Tensor MakeTraceTensor(std::shared_ptr<TraceSession> session, StorageId storage, Index nbytes,
                           const std::string& what, at::IntArrayRef sizes, at::IntArrayRef strides,
                           at::ScalarType dtype) {
  auto impl = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<std::size_t>(nbytes),
      MakeTraceDataPtr(std::move(session), storage), /*allocator=*/nullptr, /*resizable=*/false);
  impl->release_data_and_set_meta_custom_data_ptr_error_msg_(
      what + " holds no data while it is traced: its bytes cannot be read through a data pointer");
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(impl)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::scalarTypeToTypeMeta(dtype));
  if (strides.size() == sizes.size() && !sizes.empty()) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  } else {
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  }
  return tensor;
}

at::Tensor MetaLike(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

void RegisterTraceDevice() {
  if (c10::is_privateuse1_backend_registered() || at::isPrivateUse1HooksRegistered() ||
      c10::impl::hasDeviceGuardImpl(c10::kPrivateUse1)) {
    device_error() =
        "another backend owns torch's PrivateUse1 device in this process; the trace device of "
        "loadplan needs it: "
        "trace in a process that does not load the other backend";
    return;
  }
  static TraceAllocator allocator;
  c10::SetAllocator(c10::kPrivateUse1, &allocator);
  static const c10::impl::DeviceGuardImplRegistrar guard(
      c10::kPrivateUse1, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1>());
}

const std::string& TraceDeviceError() { return device_error(); }

}  // namespace loadplan
