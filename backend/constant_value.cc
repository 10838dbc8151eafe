#include "backend/constant_value.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cstring>

#include "backend/cast_bits.h"
#include "backend/convert.h"
#include "plan/resolve.h"

namespace loadplan {
namespace {

MapSide PackedSide(const DimVector& shape, Index itemsize) {
  MapSide side{0, DimVector(shape.size()), itemsize};
  Index stride = itemsize;
  for (std::size_t d = shape.size(); d-- > 0;) {
    side.byte_strides[d] = stride;
    stride *= shape[d];
  }
  return side;
}

void CopyBytes(const StridedMap& map, const at::Tensor& to_tensor, const at::Tensor& from_tensor) {
  auto* const to = static_cast<char*>(to_tensor.mutable_data_ptr());
  const auto* const from = static_cast<const char*>(from_tensor.const_data_ptr());
  ForEachRun(map, [&](Index to_offset, Index from_offset, Index nbytes) {
    std::memcpy(to + to_offset, from + from_offset, static_cast<std::size_t>(nbytes));
  });
}

// Items of a cast may lie anywhere, backwards too: they are converted in a row.
void CopyPiece(const Piece& piece, const at::Tensor& buffer, const at::Tensor& value) {
  const StridedMap& map = piece.map;
  if (piece.casts.empty()) return CopyBytes(map, buffer, value);
  at::Tensor items = at::empty({map.num_elements()}, ToScalarType(piece.casts.front().dtype));
  CopyBytes(StridedMap::Unchecked(map.shape(), PackedSide(map.shape(), map.from().itemsize),
                                  map.from(), /*is_cast=*/false),
            items, value);
  for (const CastStep& step : piece.casts) {
    const at::Tensor next = at::empty({map.num_elements()}, ToScalarType(step.dtype));
    CopyConverting(next, items, step);
    items = next;
  }
  CopyBytes(StridedMap::Unchecked(map.shape(), map.to(), PackedSide(map.shape(), map.to().itemsize),
                                  /*is_cast=*/false),
            buffer, items);
}

}  // namespace

std::optional<at::Tensor> GatherConstant(const RecordLog& log,
                                         const std::vector<at::Tensor>& captured, StorageId storage,
                                         const at::Tensor& tensor, bool allow_uninitialised) {
  const StridedLayout layout = LayoutOf(tensor);
  const SymbolicMemory memory(log);
  const auto pieces = memory.Resolve(storage, StridedMap::Identity(layout), {},
                                     static_cast<Index>(log.copies.size()));
  if (!pieces.ok()) return std::nullopt;
  for (const Piece& piece : *pieces) {
    const StorageKind kind = log.storages[static_cast<std::size_t>(piece.storage)].kind;
    const bool known = kind == StorageKind::kConstant || kind == StorageKind::kScratch;
    if (!known && !(kind == StorageKind::kTemporary && allow_uninitialised)) return std::nullopt;
  }
  const at::Tensor buffer = at::zeros({layout.Span().stop}, at::TensorOptions().dtype(at::kByte));
  for (const Piece& piece : *pieces) {
    const StorageRecord& record = log.storages[static_cast<std::size_t>(piece.storage)];
    if (record.kind == StorageKind::kTemporary) continue;
    CopyPiece(piece, buffer, captured[static_cast<std::size_t>(record.ref)].cpu());
  }
  return at::empty({0}, at::TensorOptions().dtype(tensor.scalar_type()))
      .set_(buffer.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

}  // namespace loadplan
