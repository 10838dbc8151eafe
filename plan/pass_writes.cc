#include "plan/pass_writes.h"

#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "plan/target_state.h"

namespace loadplan {
namespace {

enum Seed : std::uint64_t { kCopy = 1, kMap, kUnfollowed, kNode, kInput };

void AddStrides(ContentHash& hash, const DimVector& strides, Index itemsize) {
  for (const Index stride : strides) hash.Add(static_cast<std::uint64_t>(stride));
  hash.Add(static_cast<std::uint64_t>(itemsize));
}

void AddSide(ContentHash& hash, const MapSide& side) {
  hash.Add(static_cast<std::uint64_t>(side.byte_offset));
  AddStrides(hash, side.byte_strides, side.itemsize);
}

void AddDType(ContentHash& hash, const DType& dtype) {
  hash.Add(static_cast<std::uint64_t>(dtype.code));
}

class Digester {
 public:
  Digester(const RecordLog& log, const SymbolicMemory& memory, NodeTable& nodes,
           const ContentDigests& digests)
      : log_(log), memory_(memory), nodes_(nodes), digests_(digests), of_node_(log.nodes.size()) {}

  PassWrite Write(Index time) {
    const CopyRecord& copy = log_.copies[static_cast<size_t>(time)];
    const std::vector<CastStep> casts = copy.casts();
    PassWrite write;
    write.time = time;
    const StorageRecord& from = storage(copy.from);
    if (from.kind == StorageKind::kCheckpoint && !memory_.WasWritten(copy.from, time)) {
      write.names = {from.ref};
      write.content = Of(copy.to, OfPiece(copy.from, copy.map, casts, write.is_exact));
      return write;
    }
    absl::StatusOr<std::vector<Piece>> pieces = memory_.Resolve(copy.from, copy.map, casts, time);
    if (pieces.ok()) {
      write.names = nodes_.NamesOf(*pieces);
      write.content = Of(copy.to, OfPieces(*pieces, write.is_exact));
      return write;
    }
    write.is_exact = false;
    write.names = memory_.NamesBehind(copy.from, copy.map.FromSpan(), time);
    ContentHash hash(kUnfollowed);
    AddMap(hash, copy.map, /*with_from=*/true);
    for (const std::int32_t name : write.names) hash.Add(static_cast<std::uint64_t>(name));
    write.content = Of(copy.to, hash.value());
    return write;
  }

 private:
  const StorageRecord& storage(StorageId id) const {
    return log_.storages[static_cast<size_t>(id)];
  }

  static std::uint64_t Of(StorageId target, std::uint64_t bytes) {
    return ContentHash(kCopy).Add(static_cast<std::uint64_t>(target)).Add(bytes).value();
  }

  static void AddMap(ContentHash& hash, const StridedMap& map, bool with_from) {
    const StridedMap plain = Coalesce(map);
    for (const Index extent : plain.shape()) hash.Add(static_cast<std::uint64_t>(extent));
    AddSide(hash, plain.to());
    if (with_from) AddSide(hash, plain.from());
  }

  // Whichever way a read was cut: the order of pieces says nothing.
  std::uint64_t OfPieces(const std::vector<Piece>& pieces, bool& is_exact) {
    std::uint64_t sum = 0;
    for (const Piece& piece : pieces)
      sum += OfPiece(piece.storage, piece.map, piece.casts, is_exact);
    return sum;
  }

  std::uint64_t OfPiece(StorageId id, const StridedMap& map, const std::vector<CastStep>& casts,
                        bool& is_exact) {
    const StorageRecord& origin = storage(id);
    ContentHash hash(kMap);
    hash.Add(static_cast<std::uint64_t>(origin.kind));
    bool with_from = true;  // bytes that nobody knows are alike wherever they lie
    switch (origin.kind) {
      case StorageKind::kCheckpoint:
        hash.Add(static_cast<std::uint64_t>(origin.ref));
        break;
      case StorageKind::kTarget:
        hash.Add(static_cast<std::uint64_t>(id));
        break;
      case StorageKind::kTemporary:
        with_from = false;
        break;
      case StorageKind::kScratch:
      case StorageKind::kConstant:
        with_from = !digests_.constant;
        hash.Add(digests_.constant ? digests_.constant(id, map)
                                   : static_cast<std::uint64_t>(origin.ref));
        for (const Index stride : map.from().byte_strides) hash.Add(stride == 0 ? 1 : 0);
        break;
      case StorageKind::kValue:
        hash.Add(OfNode(origin.ref, is_exact)).Add(static_cast<std::uint64_t>(origin.output));
        break;
    }
    AddMap(hash, map, with_from);
    for (const CastStep& step : casts) {
      AddDType(hash, step.dtype);
      hash.Add(step.scattered ? 1 : 0);
    }
    return hash.value();
  }

  // Nodes read outputs of earlier nodes only, and Get resolves those first.
  std::uint64_t OfNode(NodeId node, bool& is_exact) {
    nodes_.Get(node);
    std::vector<NodeId> pending{node};
    while (!pending.empty()) {
      const NodeId next = pending.back();
      if (of_node_[static_cast<size_t>(next)]) {
        pending.pop_back();
        continue;
      }
      const size_t before = pending.size();
      for (const NodeId need : nodes_.Get(next).needs) {
        if (!of_node_[static_cast<size_t>(need)]) pending.push_back(need);
      }
      if (pending.size() > before) continue;
      of_node_[static_cast<size_t>(next)] = OfNodeAlone(next);
      pending.pop_back();
    }
    const NodeDigest& digest = *of_node_[static_cast<size_t>(node)];
    is_exact = is_exact && digest.is_exact;
    return digest.content;
  }

  struct NodeDigest {
    std::uint64_t content = 0;
    bool is_exact = true;
  };

  // Of a node whose `needs` are known.
  NodeDigest OfNodeAlone(NodeId node) {
    const NodeRecord& record = log_.nodes[static_cast<size_t>(node)];
    const ResolvedNode& resolved = nodes_.Get(node);
    NodeDigest digest;
    digest.is_exact = resolved.obstacle.empty();
    ContentHash hash(kNode);
    hash.AddBytes(record.op.data(), record.op.size());
    if (!digests_.operators.empty()) hash.Add(digests_.operators[static_cast<size_t>(node)]);
    for (size_t i = 0; i < record.inputs.size(); ++i) {
      const ReadRecord& input = record.inputs[i];
      hash.Add(kInput);
      for (const Index extent : input.layout.shape()) hash.Add(static_cast<std::uint64_t>(extent));
      AddStrides(hash, input.layout.byte_strides(), input.layout.itemsize());
      AddDType(hash, input.dtype);
      std::uint64_t sum = 0;
      for (const Piece& piece : resolved.inputs[i]) {
        const StorageRecord& origin = storage(piece.storage);
        const bool is_later = origin.kind == StorageKind::kValue && origin.ref >= node;
        if (is_later) {
          digest.is_exact = false;
          continue;
        }
        sum += OfPiece(piece.storage, piece.map, piece.casts, digest.is_exact);
      }
      hash.Add(sum);
    }
    digest.content = hash.value();
    return digest;
  }

  const RecordLog& log_;
  const SymbolicMemory& memory_;
  NodeTable& nodes_;
  const ContentDigests& digests_;
  std::vector<std::optional<NodeDigest>> of_node_;
};

// Fills in `later` of the writes at `times`, all into one storage.
void NoteLaterWrites(const RecordLog& log, std::span<const std::int32_t> times,
                     const std::vector<std::int32_t>& position, std::vector<PassWrite>& writes) {
  if (times.size() < 2) return;
  const auto at = [&](std::int32_t i) {
    return position[static_cast<size_t>(times[static_cast<size_t>(i)])];
  };
  const auto pairs = MeetingCopies(log, times);
  if (!pairs.ok()) {
    for (size_t i = 0; i < times.size(); ++i)
      writes[static_cast<size_t>(at(static_cast<std::int32_t>(i)))].is_order_known = false;
    return;
  }
  for (const auto& [earlier, later] : *pairs)
    writes[static_cast<size_t>(at(earlier))].later.push_back(at(later));
}

}  // namespace

ContentHash& ContentHash::AddBytes(const void* data, std::size_t nbytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  Add(nbytes);
  for (; nbytes >= 8; nbytes -= 8, bytes += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes, 8);
    Add(word);
  }
  std::uint64_t rest = 0;
  if (nbytes > 0) std::memcpy(&rest, bytes, nbytes);  // of nothing `bytes` may be null
  return Add(rest);
}

std::vector<PassWrite> WritesOfPass(const RecordLog& log, const SymbolicMemory& memory,
                                    NodeTable& nodes, const ContentDigests& digests) {
  Digester digester(log, memory, nodes, digests);
  std::vector<PassWrite> writes;
  std::vector<std::int32_t> position(log.copies.size(), -1);
  for (size_t time = 0; time < log.copies.size(); ++time) {
    const CopyRecord& copy = log.copies[time];
    if (log.storages[static_cast<size_t>(copy.to)].kind != StorageKind::kTarget) continue;
    if (copy.map.empty()) continue;
    position[time] = static_cast<std::int32_t>(writes.size());
    writes.push_back(digester.Write(static_cast<Index>(time)));
  }
  for (size_t s = 0; s < log.storages.size(); ++s) {
    if (log.storages[s].kind == StorageKind::kTarget)
      NoteLaterWrites(log, memory.WritesInto(static_cast<StorageId>(s)), position, writes);
  }
  return writes;
}

std::vector<std::pair<std::int32_t, std::int32_t>> OtherwiseOrdered(
    const std::vector<PassWrite>& writes, const LastWrites& other) {
  std::vector<std::pair<std::int32_t, std::int32_t>> pairs;
  const LastWrites last(writes);
  for (size_t i = 0; i < writes.size(); ++i) {
    const PassWrite& write = writes[i];
    if (write.later.empty() && write.is_order_known) continue;
    const auto position = static_cast<std::int32_t>(i);
    const std::int32_t there = other.Of(write);
    if (there < 0 || last.Of(write) != position) continue;
    if (!write.is_order_known) pairs.emplace_back(position, position);
    for (const std::int32_t later : write.later) {
      if (other.Of(writes[static_cast<size_t>(later)]) < there) pairs.emplace_back(position, later);
    }
  }
  return pairs;
}

std::vector<PassWrite> WritesOfPass(const RecordLog& log, const ContentDigests& digests) {
  const SymbolicMemory memory(log);
  NodeTable nodes(log, memory);
  return WritesOfPass(log, memory, nodes, digests);
}

}  // namespace loadplan
