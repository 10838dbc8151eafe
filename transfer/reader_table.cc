#include "transfer/reader_table.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "geometry/view_to_box.h"
#include "transfer/name_class.h"
#include "transfer/shard_set.h"
#include "transfer/table_folding.h"

namespace loadplan {
namespace {

// Below this, what several ranks need is read by one of them.
constexpr Index kMinStripeNbytes = Index{256} << 10;
constexpr Index kMaxBoxes = 1 << 14;

// A box to be read, and who may do it.
struct ReadBox {
  Box box;
  std::vector<std::int32_t> readers;
};

bool IsContiguousIn(const Box& box, const TensorGeometry& of) {
  return IsContiguous(LayoutOfBox(box, of.shape, of.dtype.itemsize));
}

std::vector<ReadBox> BoxesToRead(const std::string& name, const TensorGeometry& of,
                                 const std::vector<ShardPiece>& needed) {
  std::vector<ReadBox> boxes;
  const auto distinct = DistinctBoxes(name, of.shape, needed, /*must_cover=*/false);
  if (distinct.ok() && std::ranges::all_of(*distinct, [&](const OwnedBox& owned) {
        return IsContiguousIn(owned.box, of);
      })) {
    for (const OwnedBox& owned : *distinct) boxes.push_back({owned.box, owned.ranks});
    return boxes;
  }
  std::vector<Box> all;
  std::vector<std::int32_t> readers;
  for (const ShardPiece& piece : needed) {
    all.push_back(piece.box);
    readers.push_back(piece.rank);
  }
  std::ranges::sort(readers);
  readers.erase(std::unique(readers.begin(), readers.end()), readers.end());
  std::optional<std::vector<Box>> joined = UnionOf(std::move(all), kMaxBoxes);
  if (!joined.has_value()) joined = std::vector<Box>{Box::Whole(of.shape)};
  for (Box& box : *joined) boxes.push_back({std::move(box), readers});
  return boxes;
}

// The geometries that the names of a class take turns in.
std::vector<std::int32_t> Variants(const TensorGeometry& of, const std::vector<ReadBox>& boxes,
                                   GeometryTableBuilder& builder) {
  std::size_t num_variants = 1;
  const auto is_cut = [&](const ReadBox& read) {
    const auto readers = static_cast<Index>(read.readers.size());
    return read.box.num_elements() * of.dtype.itemsize >= readers * kMinStripeNbytes;
  };
  for (const ReadBox& read : boxes) {
    if (!is_cut(read)) num_variants = std::max(num_variants, read.readers.size());
  }
  std::vector<std::int32_t> variants;
  for (std::size_t k = 0; k < num_variants; ++k) {
    TensorGeometry geometry{of.shape, of.dtype, {}};
    for (std::size_t b = 0; b < boxes.size(); ++b) {
      const std::vector<std::int32_t>& readers = boxes[b].readers;
      if (!is_cut(boxes[b])) {
        geometry.pieces.push_back({readers[(k + b) % readers.size()], boxes[b].box});
        continue;
      }
      std::vector<Box> stripes = Stripes(boxes[b].box, static_cast<Index>(readers.size()));
      for (std::size_t i = 0; i < stripes.size(); ++i) {
        geometry.pieces.push_back({readers[(i + k) % readers.size()], std::move(stripes[i])});
      }
    }
    variants.push_back(builder.AddGeometry(std::move(geometry)));
  }
  return variants;
}

}  // namespace

absl::StatusOr<GeometryTable> ReaderTable(std::span<const RankTables> ranks) {
  const TableFolding folding(ranks);
  struct Class {
    std::vector<std::int32_t> variants;  // empty: not made yet, or nobody needs it
    std::size_t count = 0;
    bool is_made = false;
  };
  std::vector<Class> classes(folding.num_states());
  GeometryTableBuilder builder;
  for (std::size_t i = 0; i < folding.names()->size(); ++i) {
    Class& of = classes[static_cast<std::size_t>(folding.state_of()[i])];
    const std::string& name = (*folding.names())[i];
    if (!of.is_made) {
      of.is_made = true;
      std::vector<ShardPiece> needed;
      const std::vector<TableStatement> statements = folding.StatementsOf(folding.state_of()[i]);
      for (const TableStatement& statement : statements) {
        if (statement.is_held) continue;
        for (const ShardPiece& piece : statement.geometry->pieces) {
          if (std::ranges::binary_search(*statement.ranks, piece.rank)) needed.push_back(piece);
        }
      }
      std::erase_if(needed, [](const ShardPiece& p) { return p.box.num_elements() == 0; });
      if (!needed.empty()) {
        const TensorGeometry& geometry = *statements.front().geometry;
        of.variants = Variants(geometry, BoxesToRead(name, geometry, needed), builder);
      }
    }
    if (!of.variants.empty()) builder.Add(name, of.variants[of.count++ % of.variants.size()]);
  }
  return std::move(builder).Build();
}

}  // namespace loadplan
