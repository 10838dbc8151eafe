#include "plan/resolve.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "geometry/compose.h"

namespace loadplan {
namespace {

// Work that one read, and all of them together, may cost before the names behind
// it go through the loader instead. A read of a K2 layer needs at most 1,152.
constexpr Index kMaxPiecesPerRead = Index{1} << 16;
constexpr Index kMaxPieces = Index{1} << 22;

// Nested strides: each dimension steps over all that is below it.
bool IsNested(const StridedMap& map) {
  Index below = map.to().itemsize;
  for (size_t d = map.shape().size(); d-- > 0;) {
    if (map.shape()[d] == 1) continue;
    if (map.to().byte_strides[d] < below) return false;
    below = map.to().byte_strides[d] * map.shape()[d];
  }
  return true;
}

absl::StatusOr<std::vector<CastStep>> JoinCasts(const CopyRecord& inner,
                                                const std::vector<CastStep>& outer) {
  if (!inner.map.is_cast()) return outer;
  if (outer.empty()) return inner.casts();
  if (outer.front().dtype != inner.to_dtype) {
    return absl::FailedPreconditionError(
        absl::StrCat("items cast to ", std::string(inner.to_dtype.name), " are read as ",
                     std::string(outer.front().dtype.name), " by the next cast"));
  }
  std::vector<CastStep> joined = inner.casts();
  joined.insert(joined.end(), outer.begin() + 1, outer.end());
  return joined;
}

// Pieces of one origin that continue one another become one.
std::vector<Piece> Merge(std::vector<Piece> pieces) {
  if (pieces.size() < 2) return pieces;
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.storage < b.storage; });
  std::vector<Piece> merged;
  merged.reserve(pieces.size());
  for (size_t begin = 0; begin < pieces.size();) {
    size_t end = begin + 1;
    while (end < pieces.size() && pieces[end].storage == pieces[begin].storage &&
           pieces[end].casts == pieces[begin].casts) {
      ++end;
    }
    std::vector<StridedMap> maps;
    maps.reserve(end - begin);
    for (size_t i = begin; i < end; ++i) maps.push_back(std::move(pieces[i].map));
    if (maps.size() > 1) maps = MergePieces(std::move(maps));
    for (StridedMap& map : maps) {
      merged.push_back({pieces[begin].storage, std::move(map), pieces[begin].casts});
    }
    begin = end;
  }
  return merged;
}

}  // namespace

struct SymbolicMemory::Reading {
  StorageId storage = -1;
  StridedMap map;
  std::vector<CastStep> casts;
  Index time = 0;
};

SymbolicMemory::SymbolicMemory(const RecordLog& log)
    : log_(log),
      first_write_(log.storages.size() + 1),
      indices_(log.storages.size()),
      writes_once_(log.copies.size(), -1),
      work_left_(kMaxPieces) {
  // Of copies that write something, by time: records are large and read once here.
  std::vector<StorageId> written(log.copies.size(), -1);
  for (size_t time = 0; time < log.copies.size(); ++time) {
    const CopyRecord& copy = log.copies[time];
    if (copy.map.empty()) continue;
    written[time] = copy.to;
    ++first_write_[static_cast<size_t>(copy.to) + 1];
  }
  for (size_t s = 1; s < first_write_.size(); ++s) first_write_[s] += first_write_[s - 1];
  writes_.resize(static_cast<size_t>(first_write_.back()));
  std::vector<std::int32_t> next(first_write_.begin(), first_write_.end() - 1);
  for (size_t time = 0; time < log.copies.size(); ++time) {
    if (written[time] < 0) continue;
    std::int32_t& slot = next[static_cast<size_t>(written[time])];
    writes_[static_cast<size_t>(slot++)] = static_cast<std::int32_t>(time);
  }
}

std::span<const std::int32_t> SymbolicMemory::WritesInto(StorageId storage) const {
  const auto begin = static_cast<size_t>(first_write_[static_cast<size_t>(storage)]);
  const auto end = static_cast<size_t>(first_write_[static_cast<size_t>(storage) + 1]);
  return std::span(writes_).subspan(begin, end - begin);
}

bool SymbolicMemory::WasWritten(StorageId storage, Index time) const {
  const std::span<const std::int32_t> writes = WritesInto(storage);
  return !writes.empty() && writes.front() < time;
}

bool SymbolicMemory::WritesOnce(Index time) const {
  std::int8_t& known = writes_once_[static_cast<size_t>(time)];
  if (known < 0) {
    const StridedMap& map = log_.copies[static_cast<size_t>(time)].map;
    known = IsNested(map) || IsUnique(map.ToLayout()) ? 1 : 0;
  }
  return known == 1;
}

const WriteIndex& SymbolicMemory::IndexOf(StorageId storage) const {
  std::unique_ptr<WriteIndex>& index = indices_[static_cast<size_t>(storage)];
  if (!index) {
    std::vector<TimedSpan> spans;
    spans.reserve(WritesInto(storage).size());
    for (const std::int32_t time : WritesInto(storage)) {
      spans.push_back({time, log_.copies[static_cast<size_t>(time)].map.ToSpan()});
    }
    index = std::make_unique<WriteIndex>(std::move(spans));
  }
  return *index;
}

absl::StatusOr<std::vector<Piece>> SymbolicMemory::Resolve(StorageId storage, const StridedMap& map,
                                                           const std::vector<CastStep>& casts,
                                                           Index time) const {
  std::vector<Piece> pieces;
  if (map.empty()) return pieces;
  if (!WasWritten(storage, time)) {
    pieces.push_back({storage, map, casts});
    return pieces;
  }
  std::vector<Reading> pending;
  pending.push_back({storage, map, casts, time});
  Index work = 0;
  while (!pending.empty()) {
    if (++work > kMaxPiecesPerRead || --work_left_ < 0) {
      return absl::ResourceExhaustedError(
          absl::StrCat("following its bytes backwards takes more than ", work - 1, " steps"));
    }
    Reading reading = std::move(pending.back());
    pending.pop_back();
    if (absl::Status status = Step(std::move(reading), pending, pieces); !status.ok()) {
      return status;
    }
    if (static_cast<Index>(pending.size() + pieces.size()) > kMaxPiecesPerRead) {
      return absl::ResourceExhaustedError("its bytes come from too many pieces");
    }
  }
  return Merge(std::move(pieces));
}

// Takes the newest write that `reading` may see: what it wrote goes on to its
// source at its time, the rest to older writes, or ends as initial bytes.
absl::Status SymbolicMemory::Step(Reading reading, std::vector<Reading>& pending,
                                  std::vector<Piece>& pieces) const {
  Index newest = -1;
  if (WasWritten(reading.storage, reading.time)) {
    newest = IndexOf(reading.storage).NewestMeeting(reading.map.FromSpan(), 0, reading.time);
  }
  if (newest < 0) {
    pieces.push_back({reading.storage, std::move(reading.map), std::move(reading.casts)});
    return absl::OkStatus();
  }
  const CopyRecord& copy = log_.copies[static_cast<size_t>(newest)];
  if (!WritesOnce(newest)) {
    return absl::FailedPreconditionError("a copy on the way writes one byte twice");
  }
  absl::StatusOr<Composition> parts = Compose(reading.map, copy.map, kMaxPiecesPerRead);
  if (!parts.ok()) return parts.status();
  if (!parts->matched.empty()) {
    absl::StatusOr<std::vector<CastStep>> casts = JoinCasts(copy, reading.casts);
    if (!casts.ok()) return casts.status();
    for (StridedMap& map : parts->matched) {
      pending.push_back({copy.from, std::move(map), *casts, newest});
    }
  }
  for (StridedMap& map : parts->rest) {
    pending.push_back({reading.storage, std::move(map), reading.casts, newest});
  }
  return absl::OkStatus();
}

std::vector<std::int32_t> SymbolicMemory::NamesBehind(StorageId storage, ByteRange range,
                                                      Index time) const {
  struct Visit {
    StorageId storage;
    ByteRange range;
    Index time;
  };
  std::vector<std::int32_t> names;
  absl::flat_hash_set<Index> seen_copies;
  absl::flat_hash_set<NodeId> seen_nodes;
  std::vector<Visit> pending = {{storage, range, time}};
  while (!pending.empty()) {
    const Visit visit = pending.back();
    pending.pop_back();
    const StorageRecord& record = log_.storages[static_cast<size_t>(visit.storage)];
    if (record.kind == StorageKind::kCheckpoint) names.push_back(record.ref);
    if (record.kind == StorageKind::kValue && seen_nodes.insert(record.ref).second) {
      const NodeRecord& node = log_.nodes[static_cast<size_t>(record.ref)];
      for (const ReadRecord& input : node.inputs) {
        pending.push_back({input.storage, input.layout.Span(), node.time});
      }
    }
    if (!WasWritten(visit.storage, visit.time)) continue;
    IndexOf(visit.storage).ForEachMeeting(visit.range, visit.time, [&](Index copy_time) {
      if (!seen_copies.insert(copy_time).second) return;
      const CopyRecord& copy = log_.copies[static_cast<size_t>(copy_time)];
      pending.push_back({copy.from, copy.map.FromSpan(), copy_time});
    });
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

absl::StatusOr<std::vector<StridedMap>> BufferMaps(const StridedLayout& layout) {
  const Index first_byte = layout.byte_offset();
  std::vector<StridedMap> maps;
  if (layout.empty()) return maps;
  DimVector shape;
  DimVector strides;
  for (size_t d = 0; d < layout.shape().size(); ++d) {
    if (layout.byte_strides()[d] == 0 || layout.shape()[d] == 1) continue;
    shape.push_back(layout.shape()[d]);
    strides.push_back(layout.byte_strides()[d]);
  }
  // One byte of a broadcast is one byte of the buffer.
  const StridedLayout distinct =
      StridedLayout::Unchecked(first_byte, shape, strides, layout.itemsize());
  const auto add = [&](const StridedLayout& part) {
    maps.push_back(StridedMap::Unchecked(
        part.shape(), {part.byte_offset() - first_byte, part.byte_strides(), part.itemsize()},
        {part.byte_offset(), part.byte_strides(), part.itemsize()}, /*is_cast=*/false));
  };
  if (IsUnique(distinct)) {
    add(distinct);
    return maps;
  }
  const ByteRange span = layout.Span();
  absl::StatusOr<std::vector<StridedLayout>> parts =
      Intersect(distinct, StridedLayout::Unchecked(span.start, {}, {}, span.nbytes()));
  if (!parts.ok()) return parts.status();
  for (const StridedLayout& part : *parts) add(part);
  return maps;
}

}  // namespace loadplan
