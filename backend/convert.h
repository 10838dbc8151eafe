// Between torch's types and the torch-free ones of geometry/ and plan/.
#ifndef LOADPLAN_BACKEND_CONVERT_H_
#define LOADPLAN_BACKEND_CONVERT_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

#include "geometry/strided_layout.h"
#include "plan/dtype.h"

namespace loadplan {

inline DType ToDType(at::ScalarType type) {
  return DType{static_cast<std::int8_t>(type), static_cast<std::int8_t>(c10::elementSize(type)),
               c10::getDtypeNames(type).first};
}
inline at::ScalarType ToScalarType(const DType& dtype) {
  return static_cast<at::ScalarType>(dtype.code);
}

// The bytes of its storage that `tensor` shows, in its order.
inline StridedLayout LayoutOf(const at::Tensor& tensor) {
  const auto itemsize = static_cast<Index>(tensor.element_size());
  const at::IntArrayRef sizes = tensor.sizes();
  const at::IntArrayRef strides = tensor.strides();
  DimVector shape(sizes.begin(), sizes.end());
  DimVector byte_strides(strides.begin(), strides.end());
  for (Index& stride : byte_strides) stride *= itemsize;
  return StridedLayout::Unchecked(tensor.storage_offset() * itemsize, std::move(shape),
                                  std::move(byte_strides), itemsize);
}

inline DimVector ToDimVector(at::IntArrayRef values) {
  return DimVector(values.begin(), values.end());
}

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_CONVERT_H_
