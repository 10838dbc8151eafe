#include "backend/captured_value.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty_strided.h>

#include "backend/lazy_bits.h"

namespace loadplan {

at::Tensor CapturedValue(const at::Tensor& tensor) {
  at::Tensor copy;
  if (tensor.layout() == at::kStrided && !tensor.is_quantized() && !IsLazy(tensor) &&
      at::has_internal_overlap(tensor) == at::MemOverlap::No) {
    copy = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options())
               .copy_(tensor.detach());
  } else {
    copy = tensor.detach().clone();
  }
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

}  // namespace loadplan
