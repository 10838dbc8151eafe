#include "transfer/table_folding.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include "absl/container/flat_hash_map.h"

namespace loadplan {

using Names = GeometryTable::Names;

TableFolding::TableFolding(std::span<const RankTables> ranks) {
  FindDistinctTables(ranks);
  UniteNames();
  state_of_.assign(names_->size(), 0);
  for (std::size_t i = 0; i < tables_.size(); ++i) Add(static_cast<std::int32_t>(i));
}

void TableFolding::FindDistinctTables(std::span<const RankTables> ranks) {
  absl::flat_hash_map<std::pair<const GeometryTable*, bool>, std::size_t> index;
  const auto add = [&](const GeometryTable* table, bool is_held, std::size_t rank) {
    if (table == nullptr) return;
    const auto [found, is_new] = index.emplace(std::pair(table, is_held), tables_.size());
    if (is_new) tables_.push_back({table, is_held, {}});
    tables_[found->second].ranks.push_back(static_cast<std::int32_t>(rank));
  };
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    add(ranks[rank].held.get(), true, rank);
    add(ranks[rank].needed.get(), false, rank);
  }
}

void TableFolding::UniteNames() {
  std::vector<std::shared_ptr<const Names>> lists;
  for (const DistinctTable& item : tables_) {
    const auto same = [&](const auto& list) {
      return list == item.table->names() || *list == *item.table->names();
    };
    if (std::ranges::none_of(lists, same)) lists.push_back(item.table->names());
  }
  // The longest first: it usually has all of them.
  std::ranges::stable_sort(lists, std::greater<>(), [](const auto& list) { return list->size(); });
  names_ = lists.empty() ? std::make_shared<const Names>() : lists.front();
  for (const auto& list : lists) {
    if (std::ranges::includes(*names_, *list)) continue;
    Names merged;
    std::ranges::set_union(*names_, *list, std::back_inserter(merged));
    names_ = std::make_shared<const Names>(std::move(merged));
  }
}

void TableFolding::Add(std::int32_t table_index) {
  const GeometryTable& table = *tables_[static_cast<std::size_t>(table_index)].table;
  absl::flat_hash_map<std::uint64_t, std::int32_t> next;
  std::uint64_t last_key = ~std::uint64_t{0};
  std::int32_t last_state = 0;
  const bool same_names = table.names() == names_;
  std::size_t at = 0;
  for (std::size_t i = 0; i < table.names()->size(); ++i, ++at) {
    if (!same_names) {
      while ((*names_)[at] != (*table.names())[i]) ++at;
    }
    std::int32_t& state = state_of_[at];
    const std::int32_t geometry = table.geometry_of()[i];
    const std::uint64_t key =
        (static_cast<std::uint64_t>(state) << 32) | static_cast<std::uint64_t>(geometry);
    if (key != last_key) {
      const auto [found, is_new] = next.emplace(key, static_cast<std::int32_t>(states_.size()));
      if (is_new) states_.push_back({state, table_index, geometry});
      last_key = key;
      last_state = found->second;
    }
    state = last_state;
  }
}

std::vector<TableStatement> TableFolding::StatementsOf(std::int32_t state) const {
  std::vector<TableStatement> statements;
  while (state != 0) {
    const State& step = states_[static_cast<std::size_t>(state)];
    const DistinctTable& item = tables_[static_cast<std::size_t>(step.table)];
    const auto geometry = static_cast<std::size_t>(step.geometry);
    statements.push_back({&item.table->geometries()[geometry], &item.ranks, item.is_held});
    state = step.previous;
  }
  std::ranges::reverse(statements);
  return statements;
}

}  // namespace loadplan
