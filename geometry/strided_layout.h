// StridedLayout: which bytes of a storage a view touches, and in what order.
//
// A layout is written `offset + (shape):(byte strides) x itemsize`. It maps the
// coordinate `c` to the `itemsize` bytes that start at
//
//   offset + sum over d of c[d] * byte_strides[d],   0 <= c[d] < shape[d].
//
// Example: rows 2 and 3 of a contiguous 4x3 float tensor, transposed, is
// `24 + (3, 2):(4, 12) x 4`.
//
// See Note [Byte units] in geometry/index.h.
#ifndef LOADPLAN_GEOMETRY_STRIDED_LAYOUT_H_
#define LOADPLAN_GEOMETRY_STRIDED_LAYOUT_H_

#include <iosfwd>
#include <string>

#include "absl/status/statusor.h"
#include "geometry/export.h"
#include "geometry/index.h"

namespace loadplan {

// A value type: cheap to copy, compared by fields, valid once Create returned it.
class LOADPLAN_API StridedLayout {
 public:
  // No dimensions, one item of one byte at offset 0.
  StridedLayout() = default;

  // Returns the layout, or InvalidArgument if the ranks differ, the itemsize is
  // not positive, an extent, stride or the offset is negative, or the end of the
  // last item or the number of bytes does not fit in an Index.
  static absl::StatusOr<StridedLayout> Create(Index byte_offset, DimVector shape,
                                              DimVector byte_strides, Index itemsize);

  // Row-major, without gaps. Same errors as Create.
  static absl::StatusOr<StridedLayout> Contiguous(Index byte_offset, DimVector shape,
                                                  Index itemsize);

  // For callers that hold a valid layout already (a tensor's own sizes and
  // strides): no checks.
  static StridedLayout Unchecked(Index byte_offset, DimVector shape, DimVector byte_strides,
                                 Index itemsize);

  Index byte_offset() const { return byte_offset_; }
  const DimVector& shape() const { return shape_; }
  const DimVector& byte_strides() const { return byte_strides_; }
  Index itemsize() const { return itemsize_; }

  // Product of the extents (1 without dimensions).
  Index num_elements() const;
  // num_elements() * itemsize(): bytes that a copy of it moves.
  Index nbytes() const { return num_elements() * itemsize_; }
  bool empty() const { return num_elements() == 0; }

  // The smallest range that holds every byte of the layout; empty for an empty one.
  ByteRange Span() const;

  friend bool operator==(const StridedLayout&, const StridedLayout&) = default;

 private:
  Index byte_offset_ = 0;
  DimVector shape_;
  DimVector byte_strides_;
  Index itemsize_ = 1;
};

// The same bytes in the same order with as few dimensions as possible; a
// contiguous innermost dimension becomes part of the itemsize.
//
// Postconditions, checked for every case in tests/geometry/strided_layout_test.cc:
//  - the bytes of Coalesce(l), in order, are the bytes of l, in order;
//  - no extent is 1, and no two neighbours can be merged;
//  - an empty layout becomes `0 + (0):(1) x 1`.
LOADPLAN_API StridedLayout Coalesce(const StridedLayout& layout);

// Whether no byte is touched twice. Exact: nested strides are decided by
// arithmetic, anything else (unfold, as_strided with overlap) by counting.
LOADPLAN_API bool IsUnique(const StridedLayout& layout);

// Whether the bytes, in order, are one contiguous range.
LOADPLAN_API bool IsContiguous(const StridedLayout& layout);

LOADPLAN_API std::string ToString(const StridedLayout& layout);
LOADPLAN_API std::ostream& operator<<(std::ostream& stream, const StridedLayout& layout);

}  // namespace loadplan

#endif  // LOADPLAN_GEOMETRY_STRIDED_LAYOUT_H_
