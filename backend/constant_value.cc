#include "backend/constant_value.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "backend/convert.h"
#include "plan/resolve.h"

namespace loadplan {
namespace {

// A view of the bytes of `base` as one side of a map describes them.
at::Tensor ViewOf(const at::Tensor& base, const DimVector& shape, const MapSide& side,
                  at::ScalarType dtype) {
  DimVector strides = side.byte_strides;
  for (Index& stride : strides) stride /= side.itemsize;
  return at::empty({0}, at::TensorOptions().dtype(dtype))
      .set_(base.storage(), side.byte_offset / side.itemsize,
            at::IntArrayRef(shape.data(), shape.size()),
            at::IntArrayRef(strides.data(), strides.size()));
}

void CopyPiece(const Piece& piece, const at::Tensor& buffer, const at::Tensor& value) {
  if (piece.casts.empty()) {
    auto* const to = static_cast<char*>(buffer.mutable_data_ptr());
    const auto* const from = static_cast<const char*>(value.const_data_ptr());
    ForEachRun(piece.map, [&](Index to_offset, Index from_offset, Index nbytes) {
      std::memcpy(to + to_offset, from + from_offset, static_cast<std::size_t>(nbytes));
    });
    return;
  }
  at::Tensor step =
      ViewOf(value, piece.map.shape(), piece.map.from(), ToScalarType(piece.casts.front()));
  for (std::size_t i = 1; i + 1 < piece.casts.size(); ++i)
    step = step.to(ToScalarType(piece.casts[i]));
  ViewOf(buffer, piece.map.shape(), piece.map.to(), ToScalarType(piece.casts.back())).copy_(step);
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
