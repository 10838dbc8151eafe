// The parts of PlanExecutor that land a checkpoint tensor piecewise; see Note [Parts].
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "geometry/compose.h"
#include "lifecycle/execute.h"

namespace loadplan {
namespace {

// Any item of any dtype that lies at its place in the tensor is aligned behind this.
constexpr Index kAlignment = 16;

bool Meet(const ByteRange& a, const ByteRange& b) { return a.start < b.stop && b.start < a.stop; }
bool Holds(const ByteRange& outer, const ByteRange& inner) {
  return outer.start <= inner.start && inner.stop <= outer.stop;
}

StridedMap RangeMap(ByteRange bytes, Index to_offset) {
  return StridedMap::Unchecked({}, {to_offset, {}, bytes.nbytes()},
                               {bytes.start, {}, bytes.nbytes()}, /*is_cast=*/false);
}

// Bytes that `map` reads and `held` has, byte by byte.
absl::StatusOr<Index> CountHeld(const StridedMap& map, const StridedMap& held) {
  absl::StatusOr<Composition> parts = Compose(PackedTo(map), held);
  if (!parts.ok()) return parts.status();
  Index nbytes = 0;
  for (const StridedMap& part : parts->matched) nbytes += part.nbytes();
  return nbytes;
}

}  // namespace

absl::Status PlanExecutor::ForEachReader(
    std::int32_t entry,
    absl::FunctionRef<absl::Status(const WriteItem& item, const PieceRef* piece)> f) const {
  for (const WriteItem& item : plan_.writes_of(entry)) {
    if (item.map.empty()) continue;
    if (absl::Status status = f(item, nullptr); !status.ok()) return status;
  }
  const auto pieces = pieces_of_source_.find(entry);
  if (pieces == pieces_of_source_.end()) return absl::OkStatus();
  for (const PieceRef& ref : pieces->second) {
    if (PieceOf(ref).map.empty()) continue;
    if (absl::Status status = f(PieceOf(ref), &ref); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status PlanExecutor::Place(const WriteItem& item, const PieceRef* piece,
                                 const StridedMap& map, const ByteSide& from) {
  if (piece == nullptr) return Write(item, map, from);
  return CopyMapped(map, item.casts, InputSide(*piece), from);
}

EntryParts& PlanExecutor::PartsOf(std::int32_t entry) {
  const auto [found, is_new] = parts_.try_emplace(entry);
  EntryParts& parts = found->second;
  if (!is_new) return parts;
  ByteRange& kept = parts.kept_range;
  (void)ForEachReader(entry, [&](const WriteItem& item, const PieceRef*) {
    parts.needed += item.map.num_elements() * item.map.from().itemsize;
    if (item.casts.empty()) return absl::OkStatus();
    parts.cast_itemsize = std::max(parts.cast_itemsize, item.map.from().itemsize);
    const ByteRange span = item.map.FromSpan();
    if (kept.empty()) kept = span;
    kept = {std::min(kept.start, span.start), std::max(kept.stop, span.stop)};
    return absl::OkStatus();
  });
  kept.start -= kept.start % kAlignment;
  return parts;
}

absl::Status PlanExecutor::DeliverPart(std::int32_t entry, const StridedMap& held,
                                       const ByteSide& from) {
  if (held.nbytes() == 0) return absl::OkStatus();
  EntryParts& parts = PartsOf(entry);
  const SourceTensor& source = plan_.sources()[static_cast<std::size_t>(entry)];
  absl::Status status = parts.held.Add(held.ToLayout(), source.nbytes());
  // What is gathered or kept is read at once.
  if (status.ok()) status = BeforeRead(from);
  if (!status.ok()) return status;
  const ByteRange range = held.ToSpan();
  const std::optional<Index> shift = ShiftOf(held);
  status = ForEachReader(entry, [&](const WriteItem& item, const PieceRef* piece) -> absl::Status {
    const ByteRange reads = item.map.FromSpan();
    if (!item.casts.empty() || !Meet(reads, range)) return absl::OkStatus();
    if (shift.has_value() && Holds(range, reads)) {
      parts.landed += item.map.nbytes();
      return Place(item, piece, Shifted(item.map, *shift), from);
    }
    absl::StatusOr<Composition> now = Compose(item.map, held);
    if (!now.ok()) return now.status();
    for (const StridedMap& map : now->matched) {
      parts.landed += map.nbytes();
      if (absl::Status placed = Place(item, piece, map, from); !placed.ok()) return placed;
    }
    return absl::OkStatus();
  });
  if (!status.ok() || !Meet(parts.kept_range, range)) return status;
  return LandCasts(entry, parts, held, from);
}

// See Note [Parts].
absl::Status PlanExecutor::LandCasts(std::int32_t entry, EntryParts& parts, const StridedMap& held,
                                     const ByteSide& from) {
  const ByteRange range = parts.kept_range;
  absl::Status status = ForEachReader(entry, [&](const WriteItem& item, const PieceRef*) {
    if (item.casts.empty()) return absl::OkStatus();
    absl::StatusOr<Index> nbytes = CountHeld(item.map, held);
    if (nbytes.ok()) parts.landed += *nbytes;
    return nbytes.status();
  });
  if (!status.ok()) return status;
  const std::optional<Index> shift = ShiftOf(held);
  const auto address =
      from.tensor.is_cpu() ? reinterpret_cast<std::intptr_t>(from.tensor.storage().data()) : 0;
  const bool is_aligned = shift.has_value() &&
                          (*shift + from.byte_offset) % parts.cast_itemsize == 0 &&
                          address % parts.cast_itemsize == 0;
  if (is_aligned && Holds(held.ToSpan(), range)) {
    parts.converted = true;
    return Convert(entry, from, *shift);
  }
  absl::StatusOr<Composition> now = Compose(RangeMap(range, 0), held);
  if (!now.ok()) return now.status();
  if (!parts.kept.defined()) parts.kept = NewBytes(range.nbytes(), device_);
  for (const StridedMap& map : now->matched) {
    status = CopyMapped(map, {}, ByteSide::OfStorage(parts.kept), from);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status PlanExecutor::Convert(std::int32_t entry, const ByteSide& from, Index shift) {
  return ForEachReader(entry, [&](const WriteItem& item, const PieceRef* piece) {
    if (item.casts.empty()) return absl::OkStatus();
    return Place(item, piece, Shifted(item.map, shift), from);
  });
}

bool PlanExecutor::HasPlace(const WriteItem& item, const PieceRef* piece) const {
  // A layer counts the bytes that it waits for as they are written.
  return item.casts.empty() && (piece != nullptr || !IsOfLayer(item.target));
}

bool PlanExecutor::HasPlaces(std::int32_t entry) const {
  // What waits for a device is on its stream.
  if (queue_ != nullptr && !queue_->device().is_for_many) return false;
  const absl::Status status = ForEachReader(entry, [&](const WriteItem& item, const PieceRef* ref) {
    return HasPlace(item, ref) ? absl::OkStatus() : absl::CancelledError();
  });
  return status.ok();
}

absl::StatusOr<std::optional<PlacedPart>> PlanExecutor::PlacesOf(std::int32_t entry,
                                                                 const StridedMap& held) {
  if (queue_ != nullptr && !queue_->device().is_for_many) return std::nullopt;  // see HasPlaces
  PlacedPart placed;
  if (held.nbytes() == 0) return placed;
  const ByteRange range = held.ToSpan();
  std::vector<const WriteItem*> writes;
  bool is_plain = true;
  absl::Status status =
      ForEachReader(entry, [&](const WriteItem& item, const PieceRef* piece) -> absl::Status {
        if (!is_plain || !Meet(item.map.FromSpan(), range)) return absl::OkStatus();
        is_plain = HasPlace(item, piece);
        if (!is_plain) return absl::OkStatus();
        const ByteSide to = piece == nullptr ? TargetSide(item.target) : InputSide(*piece);
        is_plain = to.tensor.is_cpu();
        if (!is_plain) return absl::OkStatus();
        absl::StatusOr<Composition> now = Compose(item.map, held);
        is_plain = now.ok();
        if (!is_plain) return absl::OkStatus();
        for (StridedMap& map : now->matched) {
          if (absl::Status in_reach = CheckWrites(map, to); !in_reach.ok()) return in_reach;
          placed.nbytes += map.nbytes();
          if (piece == nullptr) placed.target_nbytes += map.nbytes();
          placed.copies.push_back({std::move(map), MutableAddress(to), to.tensor});
        }
        if (piece == nullptr && !now->matched.empty()) writes.push_back(&item);
        return absl::OkStatus();
      });
  if (!status.ok()) return status;
  if (!is_plain) return std::nullopt;
  for (const WriteItem* item : writes) {
    if (status = BeforeWrite(*item); !status.ok()) return status;
  }
  return placed;
}

absl::Status PlanExecutor::DeliveredPart(std::int32_t entry, const StridedMap& held,
                                         const PlacedPart& placed) {
  EntryParts& parts = PartsOf(entry);
  const SourceTensor& source = plan_.sources()[static_cast<std::size_t>(entry)];
  absl::Status status = parts.held.Add(held.ToLayout(), source.nbytes());
  if (!status.ok()) return status;
  parts.landed += placed.nbytes;
  written_nbytes_ += placed.target_nbytes;
  return absl::OkStatus();
}

absl::StatusOr<std::optional<ByteSide>> PlanExecutor::InPlace(std::int32_t entry, ByteRange bytes) {
  const std::optional<SoleReader> reader = SoleReaderOf(entry, bytes);
  if (!reader.has_value()) return std::nullopt;
  if (reader->piece == nullptr) {
    // A layer counts the bytes that it waits for as they are written.
    if (IsOfLayer(reader->item->target)) return std::nullopt;
    if (absl::Status status = BeforeWrite(*reader->item); !status.ok()) return status;
  }
  ByteSide place =
      reader->piece == nullptr ? TargetSide(reader->item->target) : InputSide(*reader->piece);
  place.byte_offset += reader->byte_offset;
  return place;
}

std::optional<PlanExecutor::SoleReader> PlanExecutor::SoleReaderOf(std::int32_t entry,
                                                                   ByteRange bytes) {
  if (bytes.empty()) return std::nullopt;
  std::optional<SoleReader> found;
  // Not OK ends the search: these bytes need more than one copy.
  const absl::Status status =
      ForEachReader(entry, [&](const WriteItem& item, const PieceRef* piece) -> absl::Status {
        if (!Meet(item.map.FromSpan(), bytes)) return absl::OkStatus();
        if (!item.casts.empty()) return absl::CancelledError();
        const absl::StatusOr<Composition> read = Compose(item.map, RangeMap(bytes, bytes.start));
        if (!read.ok()) return read.status();
        if (read->matched.empty()) return absl::OkStatus();
        const StridedMap& map = read->matched.front();
        if (found.has_value() || read->matched.size() > 1 || !ShiftOf(map).has_value() ||
            map.nbytes() != bytes.nbytes()) {
          return absl::CancelledError();
        }
        found = SoleReader{&item, piece, map.to().byte_offset};
        return absl::OkStatus();
      });
  return status.ok() ? found : std::nullopt;
}

absl::Status PlanExecutor::DeliveredInPlace(std::int32_t entry, ByteRange bytes) {
  const std::optional<SoleReader> reader = SoleReaderOf(entry, bytes);
  if (!reader.has_value()) return absl::InternalError("these bytes have no place of their own");
  EntryParts& parts = PartsOf(entry);
  const SourceTensor& source = plan_.sources()[static_cast<std::size_t>(entry)];
  const StridedMap map = RangeMap(bytes, bytes.start);
  if (absl::Status status = parts.held.Add(map.ToLayout(), source.nbytes()); !status.ok()) {
    return status;
  }
  parts.landed += bytes.nbytes();
  if (reader->piece == nullptr) written_nbytes_ += bytes.nbytes();
  return absl::OkStatus();
}

absl::Status PlanExecutor::Complete(std::int32_t entry) {
  EntryParts parts = std::move(PartsOf(entry));
  parts_.erase(entry);
  if (parts.landed != parts.needed) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "`%s` is not complete: %d of the %d bytes that the plan needs of it came; send every part "
        "of it",
        plan_.sources()[static_cast<std::size_t>(entry)].name, parts.landed, parts.needed));
  }
  if (!parts.kept_range.empty() && !parts.converted) {
    absl::Status status = Convert(entry, ByteSide::OfStorage(parts.kept), -parts.kept_range.start);
    if (!status.ok()) return status;
  }
  return Arrived(entry);
}

}  // namespace loadplan
