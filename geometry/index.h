// Index arithmetic that every other file of `geometry/` builds on.
#ifndef LOADPLAN_GEOMETRY_INDEX_H_
#define LOADPLAN_GEOMETRY_INDEX_H_

#include <cstdint>
#include <optional>

#include "absl/container/inlined_vector.h"

namespace loadplan {

// Note [Byte units]
//
//   box:     elements of one checkpoint tensor, half-open, row-major
//   layout:  bytes of one storage; the innermost extent is the itemsize
//
// A box counts elements because an engine slices tensors; a layout counts bytes
// because a storage may be seen through several dtypes (`view.dtype`) and at any
// offset. Names say which: `byte_offset`, `byte_strides`, `nbytes`. The one place
// where elements become bytes and back is `geometry/view_to_box`.

// A signed 64-bit count or offset.
using Index = std::int64_t;

// One value per dimension; four inline because loaders rarely go further.
using DimVector = absl::InlinedVector<Index, 4>;

// `a + b` and `a * b`, or nullopt where the result does not fit in an Index.
inline std::optional<Index> CheckedAdd(Index a, Index b) {
  Index result = 0;
  if (__builtin_add_overflow(a, b, &result)) return std::nullopt;
  return result;
}
inline std::optional<Index> CheckedMultiply(Index a, Index b) {
  Index result = 0;
  if (__builtin_mul_overflow(a, b, &result)) return std::nullopt;
  return result;
}

// A contiguous range of bytes of one storage: [start, stop).
struct ByteRange {
  Index start = 0;
  Index stop = 0;

  Index nbytes() const { return stop - start; }
  bool empty() const { return stop <= start; }
  friend bool operator==(const ByteRange&, const ByteRange&) = default;
};

}  // namespace loadplan

#endif  // LOADPLAN_GEOMETRY_INDEX_H_
