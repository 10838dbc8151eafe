#include "plan/node_table.h"

#include <algorithm>
#include <cstddef>
#include <queue>
#include <utility>

#include "absl/strings/str_cat.h"
#include "plan/fallback.h"

namespace loadplan {
namespace {

template <typename T>
void SortUnique(std::vector<T>& values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
}

}  // namespace

const ResolvedNode& NodeTable::Get(NodeId node) {
  std::optional<ResolvedNode>& wanted = nodes_[static_cast<size_t>(node)];
  if (wanted) return *wanted;
  // A node reads outputs of earlier nodes only, so that the greatest number comes
  // first when dependencies are collected and last when they are summed up.
  std::priority_queue<NodeId> pending;
  std::vector<NodeId> resolved;
  pending.push(node);
  while (!pending.empty()) {
    const NodeId next = pending.top();
    pending.pop();
    std::optional<ResolvedNode>& slot = nodes_[static_cast<size_t>(next)];
    if (slot) continue;
    slot = ResolveInputs(next);
    resolved.push_back(next);
    for (const NodeId need : slot->needs) pending.push(need);
  }
  std::sort(resolved.begin(), resolved.end());
  for (const NodeId next : resolved) Summarise(next);
  return *wanted;
}

// What the node itself shows; names and obstacles of those it reads come later.
ResolvedNode NodeTable::ResolveInputs(NodeId node) const {
  const NodeRecord& record = log_.nodes[static_cast<size_t>(node)];
  ResolvedNode result;
  const auto stop = [&](const std::string& why) {
    if (result.obstacle.empty()) result.obstacle = NotReplayableReason(record.op, why);
  };
  if (!record.not_replayable.empty()) stop(record.not_replayable);
  const auto resolve = [&](const ReadRecord& input) -> absl::StatusOr<std::vector<Piece>> {
    absl::StatusOr<std::vector<StridedMap>> maps = BufferMaps(input.layout);
    if (!maps.ok()) return maps.status();
    std::vector<Piece> pieces;
    for (const StridedMap& map : *maps) {
      absl::StatusOr<std::vector<Piece>> more =
          memory_.Resolve(input.storage, map, /*casts=*/{}, record.time);
      if (!more.ok()) return more.status();
      std::move(more->begin(), more->end(), std::back_inserter(pieces));
    }
    return pieces;
  };
  for (const ReadRecord& input : record.inputs) {
    absl::StatusOr<std::vector<Piece>> pieces = resolve(input);
    if (!pieces.ok()) {
      stop(std::string(pieces.status().message().data(), pieces.status().message().size()));
      for (const std::int32_t name :
           memory_.NamesBehind(input.storage, input.layout.Span(), record.time)) {
        result.names.push_back(name);
      }
      result.inputs.emplace_back();
      continue;
    }
    for (const Piece& piece : *pieces) {
      const StorageRecord& origin = log_.storages[static_cast<size_t>(piece.storage)];
      switch (origin.kind) {
        case StorageKind::kCheckpoint:
          result.names.push_back(origin.ref);
          break;
        case StorageKind::kTarget:
          result.reads_live = true;
          break;
        case StorageKind::kTemporary:
          stop("it reads uninitialised memory");
          break;
        case StorageKind::kValue:
          if (origin.ref < node)
            result.needs.push_back(origin.ref);
          else
            stop("it reads the output of a later operator");
          break;
        case StorageKind::kScratch:
        case StorageKind::kConstant:
          break;
      }
    }
    result.inputs.push_back(*std::move(pieces));
  }
  SortUnique(result.needs);
  return result;
}

// A sum is rounded in the order of its strides. Where those are unsure, so are the bits.
void NodeTable::Summarise(NodeId node) {
  const NodeRecord& record = log_.nodes[static_cast<size_t>(node)];
  ResolvedNode& result = *nodes_[static_cast<size_t>(node)];
  result.layout_is_unsure = record.layout_is_unsure;
  for (const NodeId need : result.needs) {
    const ResolvedNode& other = *nodes_[static_cast<size_t>(need)];
    result.layout_is_unsure |= other.layout_is_unsure;
    if (other.layout_is_unsure && !record.is_elementwise && result.obstacle.empty()) {
      result.obstacle = NotReplayableReason(
          record.op, absl::StrCat("it reads what `", log_.nodes[static_cast<size_t>(need)].op,
                                  "` computed, in a layout that only a real call tells"));
    }
    result.names.insert(result.names.end(), other.names.begin(), other.names.end());
    result.reads_live |= other.reads_live;
    if (result.obstacle.empty()) result.obstacle = other.obstacle;
  }
  SortUnique(result.names);
}

std::span<const std::int32_t> NodeTable::NamesOf(const Piece& piece) {
  const StorageRecord& origin = log_.storages[static_cast<size_t>(piece.storage)];
  if (origin.kind == StorageKind::kCheckpoint) return {&origin.ref, 1};
  if (origin.kind == StorageKind::kValue) return Get(origin.ref).names;
  return {};
}

std::vector<std::int32_t> NodeTable::NamesOf(std::span<const Piece> pieces) {
  std::vector<std::int32_t> names;
  for (const Piece& piece : pieces) {
    const std::span<const std::int32_t> more = NamesOf(piece);
    names.insert(names.end(), more.begin(), more.end());
  }
  SortUnique(names);
  return names;
}

bool NodeTable::ReadsLive(const Piece& piece) {
  const StorageRecord& origin = log_.storages[static_cast<size_t>(piece.storage)];
  if (origin.kind == StorageKind::kTarget) return true;
  return origin.kind == StorageKind::kValue && Get(origin.ref).reads_live;
}

}  // namespace loadplan
