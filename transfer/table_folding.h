// TableFolding: which names have the same geometry on every rank.
#ifndef LOADPLAN_TRANSFER_TABLE_FOLDING_H_
#define LOADPLAN_TRANSFER_TABLE_FOLDING_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "transfer/geometry_table.h"
#include "transfer/name_class.h"

namespace loadplan {

// What one rank has to say; null where it holds or needs nothing.
struct RankTables {
  std::shared_ptr<const GeometryTable> held;
  std::shared_ptr<const GeometryTable> needed;
};

// What the tables say of each name, folded table by table: names of which all tables said the same
// are in the same state. 64 tables of 70,000 names are 4.5 million steps of one look-up each.
class TableFolding {
 public:
  // The tables have to outlive it.
  explicit TableFolding(std::span<const RankTables> ranks);

  // All names of the tables, sorted.
  const std::shared_ptr<const GeometryTable::Names>& names() const { return names_; }
  // Per name: its state. 0: nothing was said.
  const std::vector<std::int32_t>& state_of() const { return state_of_; }
  std::size_t num_states() const { return states_.size(); }
  // What was said of the names in `state`, valid as long as this is.
  std::vector<TableStatement> StatementsOf(std::int32_t state) const;

 private:
  // A table and all ranks that have exactly it.
  struct DistinctTable {
    const GeometryTable* table = nullptr;
    bool is_held = false;
    std::vector<std::int32_t> ranks;
  };
  struct State {
    std::int32_t previous = 0;
    std::int32_t table = -1;
    std::int32_t geometry = -1;
  };

  void FindDistinctTables(std::span<const RankTables> ranks);
  void UniteNames();
  void Add(std::int32_t table_index);

  std::vector<DistinctTable> tables_;
  std::shared_ptr<const GeometryTable::Names> names_;
  std::vector<State> states_{State{}};
  std::vector<std::int32_t> state_of_;
};

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_TABLE_FOLDING_H_
