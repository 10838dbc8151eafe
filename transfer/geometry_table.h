// GeometryTable: what ranks hold or need of many tensors, small enough to be exchanged.
//
// A model of 70,000 tensors has a few dozen different geometries; names that have the same one
// share its description. In the compact form a name is the parts between its dots that the name
// before it does not begin with, as numbers of a dictionary: 5 bytes and not 50.
#ifndef LOADPLAN_TRANSFER_GEOMETRY_TABLE_H_
#define LOADPLAN_TRANSFER_GEOMETRY_TABLE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "geometry/export.h"
#include "geometry/index.h"
#include "plan/dtype.h"
#include "plan/load_plan.h"
#include "transfer/shards.h"

namespace loadplan {

// A tensor as a whole and the pieces of it. Pieces may be of several ranks.
struct TensorGeometry {
  DimVector shape;
  DType dtype;
  std::vector<ShardPiece> pieces;

  Index nbytes() const;
  friend bool operator==(const TensorGeometry&, const TensorGeometry&) = default;
};

// Immutable.
class LOADPLAN_API GeometryTable {
 public:
  using Names = std::vector<std::string>;

  // Sorted, each once. Tables that were decoded beside one another share equal lists.
  const std::shared_ptr<const Names>& names() const { return names_; }
  // Parallel to names(): an index into geometries().
  const std::vector<std::int32_t>& geometry_of() const { return geometry_of_; }
  const std::vector<TensorGeometry>& geometries() const { return geometries_; }

  // The two sections of the compact form, which travel apart: the names of all ranks of a model
  // are the same.
  static std::string EncodeNames(const Names& names);
  std::string EncodeGeometries() const;
  // InvalidArgument where the bytes are no such section.
  static absl::StatusOr<std::shared_ptr<const Names>> DecodeNames(std::string_view bytes);
  static absl::StatusOr<GeometryTable> Decode(std::shared_ptr<const Names> names,
                                              std::string_view geometries);

 private:
  friend class GeometryTableBuilder;

  std::shared_ptr<const Names> names_ = std::make_shared<const Names>();
  std::vector<std::int32_t> geometry_of_;
  std::vector<TensorGeometry> geometries_;
};

class LOADPLAN_API GeometryTableBuilder {
 public:
  // The index of `geometry`: the same for equal ones.
  std::int32_t AddGeometry(TensorGeometry geometry);
  void Add(std::string name, std::int32_t geometry) {
    items_.emplace_back(std::move(name), geometry);
  }
  void Add(std::string name, TensorGeometry geometry) {
    Add(std::move(name), AddGeometry(std::move(geometry)));
  }
  const std::vector<TensorGeometry>& geometries() const { return geometries_; }
  // InvalidArgument where a name was added twice.
  absl::StatusOr<GeometryTable> Build() &&;

 private:
  std::vector<std::pair<std::string, std::int32_t>> items_;
  std::vector<TensorGeometry> geometries_;
  absl::flat_hash_map<std::string, std::int32_t> by_encoding_;
};

// InvalidArgument, as DistinctBoxes says it, where the pieces of some name are no exact cover of
// it.
LOADPLAN_API absl::Status CheckCovers(const GeometryTable& table);

// What `rank` needs so that `plan` can be carried out: of each declared name the boxes that it
// reads, of a fallback the whole tensor. Names of which it needs nothing are in it, without pieces.
LOADPLAN_API absl::StatusOr<GeometryTable> NeededTable(const LoadPlan& plan, std::int32_t rank);

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_GEOMETRY_TABLE_H_
