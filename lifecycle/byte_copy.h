// Copies between storages as a StridedMap pairs their bytes: the one place where a
// plan touches memory.
#ifndef LOADPLAN_LIFECYCLE_BYTE_COPY_H_
#define LOADPLAN_LIFECYCLE_BYTE_COPY_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>

#include "absl/status/status.h"
#include "geometry/strided_layout.h"
#include "geometry/strided_map.h"
#include "plan/dtype.h"

namespace loadplan {

// One side of a copy: byte 0 of a map lies `byte_offset` bytes into the storage of
// `tensor`. Keeps the storage alive.
struct ByteSide {
  at::Tensor tensor;
  Index byte_offset = 0;

  // Byte 0 is the first byte of the storage (targets, buffers of our own).
  static ByteSide OfStorage(at::Tensor tensor) { return {std::move(tensor), 0}; }
  // Byte 0 is the first element (an arriving tensor may start anywhere in its storage).
  static ByteSide OfElements(at::Tensor tensor);

  // From byte 0 to the end of the storage.
  Index nbytes() const;
};

// Writes every `to` byte of `map` from its `from` byte. With `casts` (two or more dtypes) each
// item is converted from the first to the last as `Tensor.copy_` would, one step at a time, NaN to
// the bits that the eager call left (backend/cast_bits.h).
//
// Bytes between CPU storages are copied by loops over memory whatever their alignment; other
// devices, casts and large copies (which torch runs in parallel) go through views and `copy_`.
//
// Errors: Internal where the map reaches outside a storage or torch refuses the copy. The
// first is found before any byte is written.
absl::Status CopyMapped(const StridedMap& map, std::span<const CastStep> casts, const ByteSide& to,
                        const ByteSide& from);

// The same between two places in memory of the host, in loops; `map` is coalesced and no cast.
void CopyInLoops(const StridedMap& map, std::byte* to, const std::byte* from);

// Internal where `map` reaches outside either storage.
absl::Status CheckReach(const StridedMap& map, const ByteSide& to, const ByteSide& from);

// Internal where it writes outside the storage of `to`.
absl::Status CheckWrites(const StridedMap& map, const ByteSide& to);

// Where byte 0 of `side` lies; a storage that shares its memory copy-on-write gets its own.
std::byte* MutableAddress(const ByteSide& side);

// The same `from` bytes, packed: `to` becomes a row-major buffer of `from` items.
StridedMap PackedTo(const StridedMap& map);
// The same `to` bytes out of such a buffer.
StridedMap PackedFrom(const StridedMap& map);

// How bytes are kept until they are written: the map into the buffer and the map out of it.
// Packed; but items of a cast with the gaps that they had, because torch converts a row of
// items otherwise than scattered ones where they are NaN.
struct KeptMaps {
  StridedMap in;
  StridedMap out;
};
KeptMaps KeptMapsOf(const StridedMap& map, bool is_cast);

// A tensor over the bytes of `side` that `layout` shows, as `dtype`. Offset and strides must be
// multiples of the dtype's size.
at::Tensor ViewOf(const ByteSide& side, const StridedLayout& layout, at::ScalarType dtype);

// Every byte of `storage`.
at::Tensor BytesOf(c10::Storage storage);

// An uninitialised buffer of bytes.
at::Tensor NewBytes(Index nbytes, at::Device device);

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_BYTE_COPY_H_
