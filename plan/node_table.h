// NodeTable: what stands behind the operators of a pass that a plan would run again.
#ifndef LOADPLAN_PLAN_NODE_TABLE_H_
#define LOADPLAN_PLAN_NODE_TABLE_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "plan/records.h"
#include "plan/resolve.h"

namespace loadplan {

struct ResolvedNode {
  // Per input, on a buffer laid out as the input with its first byte at offset 0.
  std::vector<std::vector<Piece>> inputs;
  std::vector<std::int32_t> names;  // sources behind it, transitively; sorted
  std::vector<NodeId> needs;        // nodes whose outputs it reads; sorted
  bool reads_live = false;          // bytes that were live before, transitively
  bool layout_is_unsure = false;    // of its outputs
  std::string obstacle;             // why it cannot run again, operator included; else empty
};

// Nodes are resolved on demand: one whose output reaches nothing costs nothing.
class NodeTable {
 public:
  // Both must outlive the table.
  NodeTable(const RecordLog& log, const SymbolicMemory& memory)
      : log_(log), memory_(memory), nodes_(log.nodes.size()) {}

  const ResolvedNode& Get(NodeId node);

  // Sources behind `piece` (of a resolved read), sorted. Valid as long as the table.
  std::span<const std::int32_t> NamesOf(const Piece& piece);
  // Sources behind all of `pieces`, sorted.
  std::vector<std::int32_t> NamesOf(std::span<const Piece> pieces);
  bool ReadsLive(const Piece& piece);

 private:
  ResolvedNode ResolveInputs(NodeId node) const;
  void Summarise(NodeId node);

  const RecordLog& log_;
  const SymbolicMemory& memory_;
  std::vector<std::optional<ResolvedNode>> nodes_;
};

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_NODE_TABLE_H_
