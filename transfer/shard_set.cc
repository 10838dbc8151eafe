#include "transfer/shard_set.h"

#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "backend/cast_bits.h"
#include "backend/convert.h"
#include "geometry/checked_product.h"
#include "lifecycle/arrival.h"
#include "lifecycle/written_bytes.h"

namespace loadplan {
namespace {

// `box`, in coordinates of the whole tensor, inside of a shard that holds `outer`.
StridedLayout LayoutInShard(const at::Tensor& shard, const Box& outer, const Box& box) {
  const auto itemsize = static_cast<Index>(shard.element_size());
  Index offset = 0;
  DimVector strides;
  for (int d = 0; d < box.rank(); ++d) {
    const Index stride = shard.stride(d) * itemsize;
    offset += (box[d].start - outer[d].start) * stride;
    strides.push_back(stride);
  }
  return StridedLayout::Unchecked(offset, box.shape(), std::move(strides), itemsize);
}

// The items of `box` as numbers, in a shard that holds `outer`.
at::Tensor BitsIn(const at::Tensor& shard, const Box& outer, const Box& box) {
  at::Tensor part = shard.detach();
  // Two halves of a complex number are two items.
  if (shard.element_size() > 8) part = at::view_as_real(part);
  part = part.view(BitsOf(part.scalar_type()));
  for (int d = 0; d < box.rank(); ++d) {
    part = part.narrow(d, box[d].start - outer[d].start, box[d].extent());
  }
  return part;
}

Index AddressOf(const at::Tensor& tensor) {
  return static_cast<Index>(reinterpret_cast<std::intptr_t>(tensor.storage().data()));
}

// Where the elements of a tensor lie; nothing where it has none.
ByteRange MemoryOf(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  const auto itemsize = static_cast<Index>(tensor.element_size());
  const Index start = AddressOf(tensor) + tensor.storage_offset() * itemsize;
  Index last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {start, start + (last + 1) * itemsize};
}

bool HasMemory(const at::Tensor& tensor) {
  const Index start = AddressOf(tensor);
  const auto nbytes = static_cast<Index>(tensor.storage().nbytes());
  return tensor.numel() == 0 || (start != 0 && MemoryOf(tensor).stop <= start + nbytes);
}

// Memory of storages, to find what shares it.
class MemoryRanges {
 public:
  explicit MemoryRanges(std::span<const at::Tensor> storages) {
    for (const at::Tensor& tensor : storages) {
      if (tensor.is_meta()) continue;
      const Index start = AddressOf(tensor);
      const auto nbytes = static_cast<Index>(tensor.storage().nbytes());
      ranges_.push_back({start, start + nbytes});
    }
    ranges_ = MergedRanges(std::move(ranges_), storages.size());
  }

  bool Meet(const at::Tensor& tensor) const {
    const ByteRange range = MemoryOf(tensor);
    const auto next = std::ranges::upper_bound(ranges_, range.start, {}, &ByteRange::stop);
    return !range.empty() && next != ranges_.end() && next->start < range.stop;
  }

 private:
  std::vector<ByteRange> ranges_;  // sorted, disjoint: two storages may lie over one memory
};

absl::Status IsNotHere(const std::string& name, std::int32_t rank, const Box& box) {
  return absl::InvalidArgumentError(
      absl::StrCat("the shard ", ToString(box), " of `", name, "` on rank ", rank,
                   " came without its tensor; this process needs it"));
}

}  // namespace

StridedLayout LayoutOfBox(const Box& box, const DimVector& shape, Index itemsize) {
  DimVector strides(shape.size());
  Index stride = itemsize;
  Index offset = 0;
  for (std::size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    offset += box.intervals()[d].start * stride;
    stride *= shape[d];
  }
  return StridedLayout::Unchecked(offset, box.shape(), std::move(strides), itemsize);
}

absl::Status ShardSet::CheckShard(const std::string& name, const TensorGeometry& geometry,
                                  const LocalShard& shard) {
  const ShardPiece& piece = geometry.pieces[static_cast<std::size_t>(shard.piece)];
  // As if it were declared with the shape of its box.
  const SourceTensor declared{name, piece.box.shape(), geometry.dtype};
  absl::Status status = CheckDeclared(declared, shard.tensor, /*needs_memory=*/true);
  if (status.ok() && !HasMemory(shard.tensor)) {
    status = absl::InvalidArgumentError(
        absl::StrCat("`", name, "` has lost its memory: its storage was made smaller"));
  }
  if (status.ok()) return status;
  return absl::InvalidArgumentError(absl::StrCat("the shard ", ToString(piece.box), " of rank ",
                                                 piece.rank, ": ", std::string(status.message())));
}

absl::Status ShardSet::Add(const std::string& name, std::int32_t geometry,
                           std::vector<LocalShard> shards) {
  if (table_ != nullptr) return absl::InternalError("shards were added to a set that is in use");
  const TensorGeometry& of = builder_.geometries()[static_cast<std::size_t>(geometry)];
  if (!CheckedProduct(of.dtype.itemsize, of.shape).has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("`", name, "` has a shape whose bytes cannot be counted: [",
                     absl::StrJoin(of.shape, ", "), "]; give the shape that it has"));
  }
  for (const LocalShard& shard : shards) {
    if (absl::Status status = CheckShard(name, of, shard); !status.ok()) return status;
  }
  builder_.Add(name, geometry);
  entries_.insert_or_assign(name, Entry{geometry, std::move(shards)});
  return absl::OkStatus();
}

absl::Status ShardSet::Replace(const std::string& name, const std::vector<at::Tensor>& tensors) {
  const auto found = entries_.find(name);
  if (found == entries_.end() || found->second.shards.size() != tensors.size()) {
    return absl::InternalError(absl::StrCat("`", name, "` has other shards"));
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    found->second.shards[i].tensor = tensors[i];
  }
  return absl::OkStatus();
}

absl::Status ShardSet::BeginRead(std::span<const at::Tensor> live) {
  EndRead();
  const MemoryRanges written(live);
  for (auto& [name, entry] : entries_) {
    for (LocalShard& shard : entry.shards) {
      if (absl::Status status = CheckShard(name, GeometryOf(entry), shard); !status.ok()) {
        return status;
      }
      const bool is_lazy = shard.tensor.is_conj() || shard.tensor.is_neg();
      const bool is_live = written.Meet(shard.tensor);
      if (!is_lazy && !is_live) continue;
      copied_.push_back(&shard);  // first: what is in no list is read for ever
      const at::Tensor now = shard.tensor.detach();
      shard.copy = is_lazy ? now.resolve_conj().resolve_neg() : now.clone();
    }
  }
  return absl::OkStatus();
}

void ShardSet::EndRead() {
  for (LocalShard* shard : copied_) shard->copy = at::Tensor();
  copied_.clear();
}

absl::StatusOr<std::shared_ptr<const GeometryTable>> ShardSet::Table() {
  if (table_ != nullptr) return table_;
  absl::StatusOr<GeometryTable> table = GeometryTableBuilder(builder_).Build();
  if (!table.ok()) return table.status();
  table_ = std::make_shared<const GeometryTable>(*std::move(table));
  return table_;
}

const TensorGeometry& ShardSet::GeometryOf(const Entry& entry) const {
  return builder_.geometries()[static_cast<std::size_t>(entry.geometry)];
}

absl::StatusOr<LocalBytes> ShardSet::Find(std::string_view name, std::int32_t rank,
                                          const Box& box) {
  if (const auto found = entries_.find(std::string(name)); found != entries_.end()) {
    const Entry& entry = found->second;
    for (const LocalShard& shard : entry.shards) {
      const ShardPiece& piece = GeometryOf(entry).pieces[static_cast<std::size_t>(shard.piece)];
      if (piece.rank != rank || Intersect(piece.box, box) != box) continue;
      return LocalBytes{LayoutInShard(shard.readable(), piece.box, box),
                        ByteSide::OfElements(shard.readable())};
    }
  }
  return IsNotHere(std::string(name), rank, box);
}

absl::Status ShardSet::CheckPresent(std::optional<std::int32_t> rank) {
  const auto is_wanted = [&](const ShardPiece& piece) {
    return piece.rank == rank.value_or(piece.rank) && piece.box.num_elements() > 0;
  };
  std::vector<std::int64_t> wanted;
  for (const TensorGeometry& geometry : builder_.geometries()) {
    wanted.push_back(std::ranges::count_if(geometry.pieces, is_wanted));
  }
  for (const auto& [name, entry] : entries_) {
    const std::vector<ShardPiece>& pieces = GeometryOf(entry).pieces;
    const auto present = std::ranges::count_if(entry.shards, [&](const LocalShard& shard) {
      return is_wanted(pieces[static_cast<std::size_t>(shard.piece)]);
    });
    if (present >= wanted[static_cast<std::size_t>(entry.geometry)]) continue;
    for (const ShardPiece& piece : pieces) {
      if (!is_wanted(piece)) continue;
      if (absl::Status status = Find(name, piece.rank, piece.box).status(); !status.ok())
        return status;
    }
  }
  return absl::OkStatus();
}

const std::vector<PieceBox>& ShardSet::SharedBoxesOf(std::int32_t geometry) {
  const auto [found, is_new] = shared_boxes_.try_emplace(geometry);
  if (!is_new) return found->second;
  const TensorGeometry& of = builder_.geometries()[static_cast<std::size_t>(geometry)];
  // What cannot be cut is refused where covers are checked.
  if (auto boxes = DisjointBoxes("", of.shape, of.pieces); boxes.ok()) {
    std::erase_if(*boxes, [](const PieceBox& held) { return held.pieces.size() < 2; });
    found->second = *std::move(boxes);
  }
  return found->second;
}

absl::Status ShardSet::CheckAgreement(const std::string& name, const Entry& entry,
                                      const PieceBox& shared) {
  const std::vector<ShardPiece>& pieces = GeometryOf(entry).pieces;
  const LocalShard* first = nullptr;
  at::Tensor expected;
  for (const LocalShard& shard : entry.shards) {
    if (std::ranges::find(shared.pieces, shard.piece) == shared.pieces.end()) continue;
    const ShardPiece& piece = pieces[static_cast<std::size_t>(shard.piece)];
    const at::Tensor bits = BitsIn(shard.readable(), piece.box, shared.box);
    if (first == nullptr) {
      first = &shard;
      expected = bits;
      continue;
    }
    const bool is_same_memory =
        bits.const_data_ptr() == expected.const_data_ptr() && bits.strides() == expected.strides();
    if (is_same_memory || bits.to(expected.device()).equal(expected)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("`", name, "`: ranks ", pieces[static_cast<std::size_t>(first->piece)].rank,
                     " and ", piece.rank, " both hold ", ToString(shared.box),
                     ", with different bytes; nobody knows which are right"));
  }
  return absl::OkStatus();
}

absl::Status ShardSet::CheckAgreement() {
  for (const auto& [name, entry] : entries_) {
    if (entry.shards.size() < 2) continue;
    for (const PieceBox& shared : SharedBoxesOf(entry.geometry)) {
      if (absl::Status status = CheckAgreement(name, entry, shared); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace loadplan
