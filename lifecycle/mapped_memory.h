// IsMapped: whether memory is behind an address.
#ifndef LOADPLAN_LIFECYCLE_MAPPED_MEMORY_H_
#define LOADPLAN_LIFECYCLE_MAPPED_MEMORY_H_

#include <ATen/core/Tensor.h>

#include "geometry/export.h"

namespace loadplan {

// A sleeping engine gives memory back and keeps its addresses: to touch them ends the process.
//
// False where some page of the storage of `tensor` on the CPU, or its first or last byte on a GPU,
// is known to have nothing behind it. Storages without bytes, and devices that cannot be asked,
// count as mapped.
LOADPLAN_API bool IsMapped(const at::Tensor& tensor);

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_MAPPED_MEMORY_H_
