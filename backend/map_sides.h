// Tensors as sides of a strided map, in bytes of their storages.
#ifndef LOADPLAN_BACKEND_MAP_SIDES_H_
#define LOADPLAN_BACKEND_MAP_SIDES_H_

#include <ATen/core/Tensor.h>

#include "backend/convert.h"
#include "geometry/strided_map.h"

namespace loadplan {

// The items of `from` repeated to `shape`, as `Tensor.expand` repeats them.
inline MapSide BroadcastSide(const at::Tensor& from, const DimVector& shape) {
  const auto itemsize = static_cast<Index>(from.element_size());
  MapSide side{from.storage_offset() * itemsize, DimVector(shape.size(), 0), itemsize};
  const auto sizes = from.sizes();
  const auto strides = from.strides();
  const std::size_t skip = shape.size() - sizes.size();
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == shape[skip + d]) side.byte_strides[skip + d] = strides[d] * itemsize;
  }
  return side;
}

// The items of `tensor`.
inline MapSide SideOf(const at::Tensor& tensor) {
  const auto itemsize = static_cast<Index>(tensor.element_size());
  MapSide side{tensor.storage_offset() * itemsize, ToDimVector(tensor.strides()), itemsize};
  for (Index& stride : side.byte_strides) stride *= itemsize;
  return side;
}

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_MAP_SIDES_H_
