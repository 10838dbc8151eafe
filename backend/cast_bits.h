// Which bits a cast leaves for NaN, and how to leave those that the eager call left.
//
// Note [NaN bits of a cast]
//
//   p.copy_(w.to(torch.bfloat16).t())     w float32, with a NaN in it
//
// torch converts items that lie in a row with vector instructions and others one by one. Numbers
// that fit come out equal, NaN does not: 0xffff from the first, 0x7fc0 from the second (x86,
// float32 -> bfloat16). A plan moves an item by another way than the loader (here: straight from
// rows of w into columns of p), so a cast remembers how the eager call converted
// (CastStep::scattered). For some pairs the last items of a row, which fill no vector, differ as
// well (half -> float32 with AVX512); where there are such, the cast is an operator program, which
// runs on the tensor that the eager call had.
//
// Which pairs these are is asked of torch, once for each pair, by converting NaN.
#ifndef LOADPLAN_BACKEND_CAST_BITS_H_
#define LOADPLAN_BACKEND_CAST_BITS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "geometry/export.h"
#include "plan/dtype.h"

namespace loadplan {

enum class CastBits : std::uint8_t {
  kEqual,       // the same bits wherever an item lies
  kByRow,       // one kind of bits in a row, another for scattered items
  kLastOfRow,   // as kEqual, but for the last items of a row
  kByPosition,  // one kind in a row, another for its last items or for scattered ones
};

// A dtype of whole numbers to compare items by: equal bits are equal, NaN or not. Of the size of
// `dtype`, and of 8 bytes for larger ones.
LOADPLAN_API at::ScalarType BitsOf(at::ScalarType dtype);

// On the CPU; other devices convert each item alike. Safe from any thread, in a pass or not.
LOADPLAN_API CastBits CastBitsOf(at::ScalarType from, at::ScalarType to);

// Whether `to.copy_(from)` converts item by item and not in rows. Reads sizes and strides only;
// `from` may have to be broadcast.
LOADPLAN_API bool ConvertsScattered(const at::Tensor& to, const at::Tensor& from);

// How a record of `to.copy_(from)` can say what bits NaN has: by `*scattered`. False: it cannot, as
// last items of rows differ.
LOADPLAN_API bool CastIsMovable(const at::Tensor& to, const at::Tensor& from, bool* scattered);

// `to.copy_(from)` with the NaN bits of `step`. Of equal sizes.
LOADPLAN_API void CopyConverting(const at::Tensor& to, const at::Tensor& from,
                                 const CastStep& step);

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_CAST_BITS_H_
