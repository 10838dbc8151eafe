#include "tests/plan/byte_oracle.h"

#include <algorithm>
#include <set>

namespace loadplan::testing {
namespace {

// Walks all coordinates of `shape`, last dimension fastest.
void ForEachCoordinate(const DimVector& shape, const std::function<void(const DimVector&)>& f) {
  for (const Index extent : shape) {
    if (extent == 0) return;
  }
  DimVector c(shape.size(), 0);
  while (true) {
    f(c);
    size_t d = shape.size();
    while (d > 0 && ++c[d - 1] == shape[d - 1]) c[--d] = 0;
    if (d == 0) return;
  }
}

Index OffsetOf(Index offset, const DimVector& strides, const DimVector& c) {
  for (size_t d = 0; d < c.size(); ++d) offset += c[d] * strides[d];
  return offset;
}

// `to` depends on `from` as well.
void Mix(OracleByte& to, const OracleByte& from) {
  to.names |= from.names;
  to.is_uninitialised &= from.is_uninitialised;
  to.is_garbage |= from.is_garbage;
  to.is_lost |= from.is_lost;
  to.is_computed = true;
  to.live_origin = -1;
}

}  // namespace

void ForEachItem(const StridedMap& map, const std::function<void(Index, Index)>& f) {
  ForEachCoordinate(map.shape(), [&](const DimVector& c) {
    f(OffsetOf(map.to().byte_offset, map.to().byte_strides, c),
      OffsetOf(map.from().byte_offset, map.from().byte_strides, c));
  });
}

std::vector<Index> ItemOffsets(const StridedLayout& layout) {
  std::vector<Index> offsets;
  ForEachCoordinate(layout.shape(), [&](const DimVector& c) {
    offsets.push_back(OffsetOf(layout.byte_offset(), layout.byte_strides(), c));
  });
  return offsets;
}

void CastItem(const DType& from, const DType& to, const std::uint8_t* in, std::uint8_t* out) {
  unsigned sum = 17u * static_cast<unsigned>(from.code) + 5u * static_cast<unsigned>(to.code);
  for (int i = 0; i < from.itemsize; ++i) sum = sum * 31 + in[i];
  for (int i = 0; i < to.itemsize; ++i) {
    sum = sum * 1103515245u + 12345u;
    out[i] = static_cast<std::uint8_t>(sum >> 16);
  }
}

std::vector<std::uint8_t> RunNode(NodeId id, size_t nbytes,
                                  const std::vector<std::vector<std::uint8_t>>& inputs) {
  std::vector<std::uint8_t> out(nbytes, static_cast<std::uint8_t>(0x5a + id));
  for (const std::vector<std::uint8_t>& input : inputs) {
    const size_t n = input.size();
    for (size_t i = 0; i < std::max(nbytes, n) && n > 0 && nbytes > 0; ++i) {
      const auto mixed = static_cast<unsigned>(out[i % nbytes]) * 3u;
      out[i % nbytes] = static_cast<std::uint8_t>(mixed ^ input[i % n]);
    }
  }
  return out;
}

ByteOracle::ByteOracle(const BuildInput& input,
                       const std::vector<std::vector<std::uint8_t>>& initial)
    : input_(input), history_(input.log.storages.size()) {
  for (size_t s = 0; s < input.log.storages.size(); ++s) {
    const StorageRecord& record = input.log.storages[s];
    std::vector<OracleByte>& bytes = storages_.emplace_back(static_cast<size_t>(record.nbytes));
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i].value = initial[s][i];
      if (record.kind == StorageKind::kCheckpoint) bytes[i].names = NameMask{1} << record.ref;
      bytes[i].is_uninitialised = record.kind == StorageKind::kTemporary;
      bytes[i].is_garbage = bytes[i].is_uninitialised;
      if (record.kind == StorageKind::kTarget) {
        bytes[i].live_origin = (static_cast<std::int64_t>(s) << 32) + static_cast<std::int64_t>(i);
      }
    }
    if (record.kind == StorageKind::kTarget) history_[s].resize(bytes.size());
  }
  for (size_t time = 0; time < input.log.copies.size(); ++time) {
    RunNodesAt(static_cast<Index>(time));
    RunCopy(input.log.copies[time]);
  }
  RunNodesAt(static_cast<Index>(input.log.copies.size()));
}

std::vector<OracleByte> ByteOracle::ReadItems(const ReadRecord& read) const {
  std::vector<OracleByte> result;
  for (const Index offset : ItemOffsets(read.layout)) {
    for (Index i = 0; i < read.layout.itemsize(); ++i) {
      result.push_back(
          storages_[static_cast<size_t>(read.storage)][static_cast<size_t>(offset + i)]);
    }
  }
  return result;
}

void ByteOracle::RunNodesAt(Index time) {
  const RecordLog& log = input_.log;
  for (; next_node_ < log.nodes.size() && log.nodes[next_node_].time == time; ++next_node_) {
    const NodeRecord& node = log.nodes[next_node_];
    OracleByte all;
    std::vector<std::vector<std::uint8_t>> inputs;
    for (const ReadRecord& read : node.inputs) {
      std::vector<std::uint8_t>& values = inputs.emplace_back();
      for (const OracleByte& byte : ReadItems(read)) {
        values.push_back(byte.value);
        Mix(all, byte);
      }
    }
    all.is_computed = true;
    all.is_uninitialised = false;
    // A result that depends on garbage cannot be had again.
    all.is_lost |= !node.not_replayable.empty() || all.is_garbage;
    for (const StorageId output : node.outputs) {
      std::vector<OracleByte>& bytes = storages_[static_cast<size_t>(output)];
      const std::vector<std::uint8_t> values =
          RunNode(static_cast<NodeId>(next_node_), bytes.size(), inputs);
      for (size_t i = 0; i < bytes.size(); ++i) {
        bytes[i] = all;
        bytes[i].value = values[i];
      }
    }
  }
  for (; next_refusal_ < log.refusals.size() && log.refusals[next_refusal_].time == time;
       ++next_refusal_) {
    NameMask names = 0;
    for (const ReadRecord& read : log.refusals[next_refusal_].inputs) {
      for (const OracleByte& byte : ReadItems(read)) names |= byte.names;
    }
    refused_ |= names;
    has_nameless_refusal_ |= names == 0;
  }
}

void ByteOracle::RunCopy(const CopyRecord& copy) {
  std::vector<std::pair<Index, OracleByte>> stores;
  const std::vector<OracleByte>& from = storages_[static_cast<size_t>(copy.from)];
  ForEachItem(copy.map, [&](Index to_offset, Index from_offset) {
    const Index itemsize = copy.map.to().itemsize;
    if (!copy.map.is_cast()) {
      for (Index i = 0; i < itemsize; ++i) {
        stores.emplace_back(to_offset + i, from[static_cast<size_t>(from_offset + i)]);
      }
      return;
    }
    OracleByte all = from[static_cast<size_t>(from_offset)];
    std::vector<std::uint8_t> in;
    for (Index i = 0; i < copy.map.from().itemsize; ++i) {
      const OracleByte& byte = from[static_cast<size_t>(from_offset + i)];
      in.push_back(byte.value);
      Mix(all, byte);
    }
    std::vector<std::uint8_t> out(static_cast<size_t>(itemsize));
    CastItem(copy.from_dtype, copy.to_dtype, in.data(), out.data());
    for (Index i = 0; i < itemsize; ++i) {
      all.value = out[static_cast<size_t>(i)];
      stores.emplace_back(to_offset + i, all);
    }
  });
  std::set<Index> distinct;
  OracleByte any;
  for (const auto& [offset, byte] : stores) {
    distinct.insert(offset);
    Mix(any, byte);
  }
  const bool is_repeated = distinct.size() != stores.size();
  has_repeated_write_ |= is_repeated;
  for (auto& [offset, byte] : stores) {
    if (is_repeated) {
      byte = any;
      byte.is_garbage = true;
      byte.is_uninitialised = false;
    }
    byte.is_written = true;
    byte.copy_names = any.names;
    Store(copy, offset, byte);
  }
}

void ByteOracle::Store(const CopyRecord& copy, Index offset, const OracleByte& byte) {
  const auto i = static_cast<size_t>(offset);
  std::vector<std::vector<NameMask>>& history = history_[static_cast<size_t>(copy.to)];
  if (!history.empty()) {
    for (const NameMask earlier : history[i]) {
      const NameMask lost = byte.names == 0 ? 0 : earlier & ~byte.names;
      for (int a = 0; a < 64; ++a) {
        for (int b = 0; b < 64 && (lost >> a & 1) != 0; ++b) {
          if ((byte.names >> b & 1) == 0) continue;
          overlaps_[{std::min(a, b), std::max(a, b), copy.to}] += 1;
        }
      }
    }
    history[i].push_back(byte.names);
  }
  OracleByte& stored = storages_[static_cast<size_t>(copy.to)][i];
  const NameMask ever_copied = stored.ever_copied | byte.copy_names;
  stored = byte;
  stored.ever_copied = ever_copied;
}

}  // namespace loadplan::testing
