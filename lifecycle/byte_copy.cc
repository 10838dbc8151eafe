#include "lifecycle/byte_copy.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/flip.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "backend/cast_bits.h"
#include "backend/convert.h"
#include "lifecycle/attempt.h"

namespace loadplan {
namespace {

// From here on torch's parallel copy is faster than a loop in this thread.
constexpr Index kParallelNbytes = Index{1} << 20;

template <std::size_t kItemsize>
void CopyItems(std::byte* to, const std::byte* from, Index count, Index to_stride,
               Index from_stride) {
  for (Index i = 0; i < count; ++i) {
    std::memcpy(to + i * to_stride, from + i * from_stride, kItemsize);
  }
}

void CopyRow(std::byte* to, const std::byte* from, Index count, Index to_stride, Index from_stride,
             Index itemsize) {
  switch (itemsize) {
    case 1:
      return CopyItems<1>(to, from, count, to_stride, from_stride);
    case 2:
      return CopyItems<2>(to, from, count, to_stride, from_stride);
    case 4:
      return CopyItems<4>(to, from, count, to_stride, from_stride);
    case 8:
      return CopyItems<8>(to, from, count, to_stride, from_stride);
    default:
      break;
  }
  for (Index i = 0; i < count; ++i) {
    std::memcpy(to + i * to_stride, from + i * from_stride, static_cast<std::size_t>(itemsize));
  }
}

// Dimensions `dim` and after it, at one position of those before.
void CopyDims(const StridedMap& map, std::size_t dim, std::byte* to, const std::byte* from) {
  const std::size_t rank = map.shape().size();
  if (rank == 0) {
    std::memcpy(to, from, static_cast<std::size_t>(map.to().itemsize));
    return;
  }
  const Index count = map.shape()[dim];
  const Index to_stride = map.to().byte_strides[dim];
  const Index from_stride = map.from().byte_strides[dim];
  if (dim + 1 == rank) return CopyRow(to, from, count, to_stride, from_stride, map.to().itemsize);
  for (Index i = 0; i < count; ++i) {
    CopyDims(map, dim + 1, to + i * to_stride, from + i * from_stride);
  }
}

const std::byte* Address(const ByteSide& side) {
  return static_cast<const std::byte*>(side.tensor.storage().data()) + side.byte_offset;
}

// The largest item in whose units every offset and stride of `side` can be told.
Index CommonUnit(const MapSide& side, const ByteSide& bytes, Index unit) {
  unit = std::gcd(unit, side.itemsize);
  unit = std::gcd(unit, bytes.byte_offset + side.byte_offset);
  for (const Index stride : side.byte_strides) unit = std::gcd(unit, stride);
  if (bytes.tensor.is_cpu()) {
    const auto base = reinterpret_cast<std::uintptr_t>(bytes.tensor.storage().data());
    unit = std::gcd(unit, static_cast<Index>(base & 7U));
  }
  return unit;
}

at::ScalarType IntegerOf(Index itemsize) {
  switch (itemsize) {
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    case 8:
      return at::kLong;
    default:
      return at::kByte;
  }
}

// `map_side` as a tensor. Torch has no negative strides: those dimensions are read from their
// low end and flipped, which makes a copy, so only a source may have them.
at::Tensor ViewOfSide(const ByteSide& bytes, const DimVector& shape, const MapSide& map_side,
                      at::ScalarType dtype) {
  Index byte_offset = map_side.byte_offset;
  DimVector byte_strides = map_side.byte_strides;
  std::vector<int64_t> flipped;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (byte_strides[d] >= 0) continue;
    byte_offset += byte_strides[d] * (shape[d] - 1);
    byte_strides[d] = -byte_strides[d];
    flipped.push_back(static_cast<int64_t>(d));
  }
  const StridedLayout layout =
      StridedLayout::Unchecked(byte_offset, shape, byte_strides, map_side.itemsize);
  if (flipped.empty()) return ViewOf(bytes, layout, dtype);
  // Torch flips no float8: it is told that these are integers.
  const at::ScalarType flippable = map_side.itemsize > 8 ? dtype : IntegerOf(map_side.itemsize);
  return at::flip(ViewOf(bytes, layout, flippable), flipped).view(dtype);
}

// `side` with its items seen as `count` units each, in a last dimension of their own.
MapSide InUnits(MapSide side, Index unit) {
  side.byte_strides.push_back(unit);
  side.itemsize = unit;
  return side;
}

void CopyBytesByViews(const StridedMap& map, const ByteSide& to, const ByteSide& from) {
  const Index unit = CommonUnit(map.to(), to, CommonUnit(map.from(), from, 8));
  DimVector shape = map.shape();
  shape.push_back(map.to().itemsize / unit);
  const at::ScalarType dtype = IntegerOf(unit);
  const at::Tensor source = ViewOfSide(from, shape, InUnits(map.from(), unit), dtype);
  ViewOfSide(to, shape, InUnits(map.to(), unit), dtype).copy_(source);
}

void CopyBytes(const StridedMap& map, const ByteSide& to, const ByteSide& from) {
  const StridedMap loops = Coalesce(map);
  if (!to.tensor.is_cpu() || !from.tensor.is_cpu() || loops.nbytes() >= kParallelNbytes) {
    return CopyBytesByViews(loops, to, from);
  }
  CopyInLoops(loops, MutableAddress(to), Address(from));
}

DimVector PackedStrides(const DimVector& shape, Index itemsize) {
  DimVector strides(shape.size());
  Index stride = itemsize;
  for (std::size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= shape[d];
  }
  return strides;
}

// Whether a view with elements of the item's size can show `side`.
bool IsAligned(const MapSide& side, const ByteSide& bytes) {
  if ((bytes.byte_offset + side.byte_offset) % side.itemsize != 0) return false;
  return std::ranges::all_of(side.byte_strides,
                             [&](Index stride) { return stride % side.itemsize == 0; });
}

void CopyCasting(const StridedMap& map, std::span<const CastStep> casts, const ByteSide& to,
                 const ByteSide& from) {
  ByteSide source = from;
  StridedMap pairs = map;
  if (!IsAligned(map.from(), from)) {
    source = ByteSide::OfStorage(
        NewBytes(map.num_elements() * map.from().itemsize, from.tensor.device()));
    CopyBytes(PackedTo(map), source, from);
    pairs = PackedFrom(map);
  }
  at::Tensor value =
      ViewOfSide(source, pairs.shape(), pairs.from(), ToScalarType(casts.front().dtype));
  const auto converted = [&value](const CastStep& step) {
    at::Tensor next = at::empty(value.sizes(), value.options().dtype(ToScalarType(step.dtype)));
    CopyConverting(next, value, step);
    return next;
  };
  for (const CastStep& step : casts.subspan(1, casts.size() - 2)) value = converted(step);
  if (IsAligned(map.to(), to)) {
    const at::ScalarType last = ToScalarType(casts.back().dtype);
    CopyConverting(ViewOfSide(to, pairs.shape(), pairs.to(), last), value, casts.back());
    return;
  }
  const at::Tensor items = converted(casts.back());
  MapSide packed{0, PackedStrides(map.shape(), map.to().itemsize), map.to().itemsize};
  CopyBytes(StridedMap::Unchecked(map.shape(), map.to(), std::move(packed), /*is_cast=*/false), to,
            ByteSide::OfStorage(items));
}

absl::Status CheckReachOf(const char* side, const ByteRange& span, const ByteSide& bytes) {
  if (span.start >= 0 && span.stop <= bytes.nbytes()) return absl::OkStatus();
  return absl::InternalError(
      absl::StrFormat("a planned copy %s bytes [%d, %d) of a storage of %d bytes; plan again", side,
                      span.start, span.stop, bytes.nbytes()));
}

}  // namespace

ByteSide ByteSide::OfElements(at::Tensor tensor) {
  const Index offset = tensor.storage_offset() * static_cast<Index>(tensor.element_size());
  return {std::move(tensor), offset};
}

Index ByteSide::nbytes() const {
  return static_cast<Index>(tensor.storage().nbytes()) - byte_offset;
}

void CopyInLoops(const StridedMap& map, std::byte* to, const std::byte* from) {
  if (map.empty()) return;
  CopyDims(map, 0, to + map.to().byte_offset, from + map.from().byte_offset);
}

std::byte* MutableAddress(const ByteSide& side) {
  // Not data_ptr(): only this call separates a storage that shares its memory copy-on-write.
  return static_cast<std::byte*>(side.tensor.storage().mutable_data()) + side.byte_offset;
}

absl::Status CheckWrites(const StridedMap& map, const ByteSide& to) {
  return CheckReachOf("writes", map.ToSpan(), to);
}

absl::Status CheckReach(const StridedMap& map, const ByteSide& to, const ByteSide& from) {
  absl::Status status = CheckWrites(map, to);
  return status.ok() ? CheckReachOf("reads", map.FromSpan(), from) : status;
}

absl::Status CopyMapped(const StridedMap& map, std::span<const CastStep> casts, const ByteSide& to,
                        const ByteSide& from) {
  if (map.empty()) return absl::OkStatus();
  if (absl::Status status = CheckReach(map, to, from); !status.ok()) return status;
  return Attempt([&] {
    if (casts.size() < 2) {
      CopyBytes(map, to, from);
    } else {
      CopyCasting(map, casts, to, from);
    }
  });
}

StridedMap PackedTo(const StridedMap& map) {
  const Index itemsize = map.from().itemsize;
  MapSide packed{0, PackedStrides(map.shape(), itemsize), itemsize};
  return StridedMap::Unchecked(map.shape(), std::move(packed), map.from(), /*is_cast=*/false);
}

StridedMap PackedFrom(const StridedMap& map) {
  const Index itemsize = map.from().itemsize;
  MapSide packed{0, PackedStrides(map.shape(), itemsize), itemsize};
  return StridedMap::Unchecked(map.shape(), map.to(), std::move(packed), map.is_cast());
}

KeptMaps KeptMapsOf(const StridedMap& map, bool is_cast) {
  if (!is_cast) return {PackedTo(map), PackedFrom(map)};
  const ByteRange span = map.FromSpan();
  MapSide side = map.from();
  side.byte_offset -= span.start;
  const MapSide bytes{0, {1}, 1};
  return {StridedMap::Unchecked({span.nbytes()}, bytes, {span.start, {1}, 1}, /*is_cast=*/false),
          StridedMap::Unchecked(map.shape(), map.to(), std::move(side), /*is_cast=*/true)};
}

at::Tensor ViewOf(const ByteSide& side, const StridedLayout& layout, at::ScalarType dtype) {
  const auto itemsize = static_cast<Index>(c10::elementSize(dtype));
  const auto key = c10::computeDispatchKey(dtype, at::kStrided, side.tensor.device());
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(side.tensor.storage()),
                                                             c10::DispatchKeySet(key),
                                                             c10::scalarTypeToTypeMeta(dtype));
  std::vector<int64_t> strides(layout.byte_strides().begin(), layout.byte_strides().end());
  for (int64_t& stride : strides) stride /= itemsize;
  const at::IntArrayRef sizes(layout.shape().data(), layout.shape().size());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      sizes, strides, (side.byte_offset + layout.byte_offset()) / itemsize);
  return view;
}

at::Tensor BytesOf(c10::Storage storage) {
  const auto nbytes = static_cast<int64_t>(storage.nbytes());
  const auto key = c10::computeDispatchKey(at::kByte, at::kStrided, storage.device());
  at::Tensor bytes = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(at::kByte));
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous({nbytes});
  return bytes;
}

at::Tensor NewBytes(Index nbytes, at::Device device) {
  return at::empty({nbytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

}  // namespace loadplan
