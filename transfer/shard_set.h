// ShardSet: the shards of a model, with the tensors that this process has.
#ifndef LOADPLAN_TRANSFER_SHARD_SET_H_
#define LOADPLAN_TRANSFER_SHARD_SET_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "geometry/export.h"
#include "lifecycle/byte_copy.h"
#include "transfer/geometry_table.h"

namespace loadplan {

// Where a box of a checkpoint tensor lies in this process: its items, in order, in `side`.
struct LocalBytes {
  StridedLayout layout;
  ByteSide side;
};

// Where what a rank sends comes from.
class ShardSource {
 public:
  virtual ~ShardSource() = default;
  // Where `rank`'s `box` of a name lies, in this process.
  virtual absl::StatusOr<LocalBytes> Find(std::string_view name, std::int32_t rank,
                                          const Box& box) = 0;
};

// Names are added first; after Table() nothing is. Tensors are read when they are sent, so that
// those that are updated in place stay valid, and those whose memory was exchanged (`p.data = x`)
// as well: each update begins with BeginRead.
class LOADPLAN_API ShardSet : public ShardSource {
 public:
  // ShardPiece `piece` of a geometry, as a tensor of the shape of its box and any strides.
  struct LocalShard {
    std::int32_t piece = 0;
    at::Tensor tensor;
    at::Tensor copy;  // while it is read in place of `tensor`

    const at::Tensor& readable() const { return copy.defined() ? copy : tensor; }
  };

  // The index of `geometry`: the same for equal ones.
  std::int32_t AddGeometry(TensorGeometry geometry) {
    return builder_.AddGeometry(std::move(geometry));
  }
  // `shards`: the pieces that lie in this process. InvalidArgument, naming tensor and box: another
  // shape or dtype than the piece has, or no plain memory.
  absl::Status Add(const std::string& name, std::int32_t geometry, std::vector<LocalShard> shards);

  // InvalidArgument where a name was added twice.
  absl::StatusOr<std::shared_ptr<const GeometryTable>> Table();
  // Other tensors for the pieces that `name` was added with, in the same order.
  absl::Status Replace(const std::string& name, const std::vector<at::Tensor>& tensors);

  // Looks at all tensors again. What lies in the memory of `live`, storages that are about to be
  // written, is copied. InvalidArgument as in Add, and where a tensor has lost its memory.
  absl::Status BeginRead(std::span<const at::Tensor> live);
  void EndRead();  // gives the copies back

  // InvalidArgument where this process does not have it.
  absl::StatusOr<LocalBytes> Find(std::string_view name, std::int32_t rank,
                                  const Box& box) override;
  // InvalidArgument, naming a piece of `rank` (none: of any) whose tensor this process does not
  // have.
  absl::Status CheckPresent(std::optional<std::int32_t> rank);
  // Whether shards that overlap hold the same bytes there, as far as this process has both.
  // InvalidArgument, naming the tensor, the box and two ranks that disagree.
  absl::Status CheckAgreement();

 private:
  struct Entry {
    std::int32_t geometry = 0;
    std::vector<LocalShard> shards;
  };
  const TensorGeometry& GeometryOf(const Entry& entry) const;
  static absl::Status CheckShard(const std::string& name, const TensorGeometry& geometry,
                                 const LocalShard& shard);
  // The boxes of a geometry that several of its pieces hold.
  const std::vector<PieceBox>& SharedBoxesOf(std::int32_t geometry);
  absl::Status CheckAgreement(const std::string& name, const Entry& entry, const PieceBox& shared);

  GeometryTableBuilder builder_;
  absl::flat_hash_map<std::string, Entry> entries_;
  std::vector<LocalShard*> copied_;  // shards that are read from a copy
  std::shared_ptr<const GeometryTable> table_;
  absl::flat_hash_map<std::int32_t, std::vector<PieceBox>> shared_boxes_;  // as they are asked for
};

// A box inside a row-major tensor of `shape`: bytes of the tensor.
StridedLayout LayoutOfBox(const Box& box, const DimVector& shape, Index itemsize);

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_SHARD_SET_H_
