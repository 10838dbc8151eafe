#include "plan/target_state.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <utility>

#include "absl/status/statusor.h"
#include "geometry/compose.h"
#include "geometry/overlap.h"
#include "plan/write_index.h"

namespace loadplan {
namespace {

using Pairs = std::vector<std::pair<std::int32_t, std::int32_t>>;

// Pairs that one storage may have before its names go through the loader instead.
constexpr size_t kMaxPairs = size_t{1} << 22;

bool Meets(const ByteRange& a, const ByteRange& b) { return a.start < b.stop && b.start < a.stop; }

absl::Status TooManyPairs() {
  return absl::ResourceExhaustedError("too many of its writes meet one another");
}

// Where a copy writes.
struct Footprint {
  std::int32_t position = 0;
  ByteRange span;
};

class Resolver {
 public:
  Resolver(const RecordLog& log, const SymbolicMemory& memory, NodeTable& nodes, StorageId target)
      : log_(log), memory_(memory), nodes_(nodes), times_(memory.WritesInto(target)) {}

  TargetState Run();

 private:
  const CopyRecord& copy(size_t position) const {
    return log_.copies[static_cast<size_t>(times_[position])];
  }
  bool IsPlainSource(size_t position) const;
  void ResolveWrite(size_t position);
  void FindMeetings();
  void MeetNames(const TargetWrite& earlier, const TargetWrite& later);
  void MeetPieces(const TargetWrite& earlier, const Piece& a, const TargetWrite& later,
                  const Piece& b);
  void Clip(size_t position);

  const RecordLog& log_;
  const SymbolicMemory& memory_;
  NodeTable& nodes_;
  std::span<const std::int32_t> times_;
  Pairs pairs_;                                     // sorted
  std::vector<std::optional<TargetWrite>> writes_;  // by position; nullopt: plain
  std::map<std::pair<std::int32_t, std::int32_t>, Index> meetings_;
  Pairs neighbours_;
};

bool Resolver::IsPlainSource(size_t position) const {
  const StorageId from = copy(position).from;
  return log_.storages[static_cast<size_t>(from)].kind == StorageKind::kCheckpoint &&
         !memory_.WasWritten(from, times_[position]) && memory_.WritesOnce(times_[position]);
}

void Resolver::ResolveWrite(size_t position) {
  if (writes_[position]) return;
  TargetWrite& write = writes_[position].emplace();
  const CopyRecord& record = copy(position);
  write.time = times_[position];
  absl::StatusOr<std::vector<Piece>> pieces =
      memory_.WritesOnce(write.time)
          ? memory_.Resolve(record.from, record.map, record.casts(), write.time)
          : absl::FailedPreconditionError("it writes one byte twice");
  if (!pieces.ok()) {
    write.status = pieces.status();
    write.names = memory_.NamesBehind(record.from, record.map.FromSpan(), write.time);
    write.visible.push_back({.storage = -1, .map = record.map, .casts = {}});
    return;
  }
  write.visible = *std::move(pieces);
  write.names = nodes_.NamesOf(write.visible);
  for (const Piece& piece : write.visible) write.reads_live |= nodes_.ReadsLive(piece);
}

TargetState Resolver::Run() {
  TargetState state;
  writes_.resize(times_.size());
  absl::StatusOr<Pairs> pairs = MeetingCopies(log_, times_);
  if (!pairs.ok())
    state.status = pairs.status();
  else
    pairs_ = *std::move(pairs);
  for (size_t p = 0; p < times_.size(); ++p) {
    if (!IsPlainSource(p) || !state.status.ok()) ResolveWrite(p);
  }
  FindMeetings();
  for (size_t begin = 0; begin < pairs_.size();) {
    Clip(begin);
    const std::int32_t earlier = pairs_[begin].first;
    while (begin < pairs_.size() && pairs_[begin].first == earlier) ++begin;
  }
  for (size_t p = 0; p < times_.size(); ++p) {
    if (writes_[p]) {
      state.writes.push_back(*std::move(writes_[p]));
      continue;
    }
    state.plain.push_back({times_[p], log_.storages[static_cast<size_t>(copy(p).from)].ref});
    state.plain_nbytes += copy(p).map.nbytes();
  }
  std::sort(neighbours_.begin(), neighbours_.end());
  neighbours_.erase(std::unique(neighbours_.begin(), neighbours_.end()), neighbours_.end());
  std::erase_if(neighbours_, [](const auto& pair) { return pair.first == pair.second; });
  state.neighbours = std::move(neighbours_);
  state.meetings.reserve(meetings_.size());
  for (const auto& [names, nbytes] : meetings_) {
    state.meetings.push_back({names.first, names.second, nbytes});
  }
  return state;
}

void Resolver::FindMeetings() {
  for (const auto& [first, second] : pairs_) {
    ResolveWrite(static_cast<size_t>(first));
    TargetWrite& earlier = *writes_[static_cast<size_t>(first)];
    // A later copy needs resolving only where names could meet: padding that is
    // zeroed first leaves the copies over it plain.
    if (earlier.names.empty()) continue;
    ResolveWrite(static_cast<size_t>(second));
    const TargetWrite& later = *writes_[static_cast<size_t>(second)];
    if (later.names.empty()) {
      earlier.is_overwritten_by_nothing_named = true;
      continue;
    }
    MeetNames(earlier, later);
    neighbours_.emplace_back(earlier.names.front(), later.names.front());
  }
}

void Resolver::MeetNames(const TargetWrite& earlier, const TargetWrite& later) {
  if (earlier.names.size() == 1 && later.names == earlier.names) return;
  std::vector<ByteRange> later_spans;
  later_spans.reserve(later.visible.size());
  for (const Piece& piece : later.visible) later_spans.push_back(piece.map.ToSpan());
  for (const Piece& a : earlier.visible) {
    const ByteRange span = a.map.ToSpan();
    for (size_t i = 0; i < later.visible.size(); ++i) {
      if (Meets(span, later_spans[i])) MeetPieces(earlier, a, later, later.visible[i]);
    }
  }
}

void Resolver::MeetPieces(const TargetWrite& earlier, const Piece& a, const TargetWrite& later,
                          const Piece& b) {
  const auto names_of = [&](const TargetWrite& write, const Piece& piece) {
    return piece.storage < 0 ? std::span<const std::int32_t>(write.names) : nodes_.NamesOf(piece);
  };
  const std::span<const std::int32_t> before = names_of(earlier, a);
  const std::span<const std::int32_t> after = names_of(later, b);
  if (after.empty() || std::includes(after.begin(), after.end(), before.begin(), before.end())) {
    return;
  }
  const absl::StatusOr<std::vector<StridedLayout>> common =
      Intersect(a.map.ToLayout(), b.map.ToLayout());
  Index nbytes = 0;
  // Where the geometry is too irregular to say, all of them may be shared.
  if (!common.ok())
    nbytes = std::min(a.map.nbytes(), b.map.nbytes());
  else
    for (const StridedLayout& layout : *common) nbytes += layout.nbytes();
  if (nbytes == 0) return;
  for (const std::int32_t lost : before) {
    if (std::binary_search(after.begin(), after.end(), lost)) continue;
    for (const std::int32_t winner : after) meetings_[{lost, winner}] += nbytes;
  }
}

// Takes away from the write at `pairs_[begin].first` what later ones overwrite.
void Resolver::Clip(size_t begin) {
  const std::int32_t position = pairs_[begin].first;
  TargetWrite& write = *writes_[static_cast<size_t>(position)];
  if (!write.status.ok()) return;
  std::vector<Footprint> later;
  for (size_t i = begin; i < pairs_.size() && pairs_[i].first == position; ++i) {
    later.push_back({pairs_[i].second, copy(static_cast<size_t>(pairs_[i].second)).map.ToSpan()});
  }
  // From the end backwards: a contiguous write under many small ones stays one or
  // two pieces all the way.
  std::sort(later.begin(), later.end(),
            [](const Footprint& a, const Footprint& b) { return a.span.start > b.span.start; });
  std::vector<std::pair<ByteRange, Piece>> left;
  for (Piece& piece : write.visible) left.emplace_back(piece.map.ToSpan(), std::move(piece));
  std::vector<std::pair<ByteRange, Piece>> next;
  for (const Footprint& footprint : later) {
    const StridedLayout region = copy(static_cast<size_t>(footprint.position)).map.ToLayout();
    next.clear();
    for (auto& [span, piece] : left) {
      if (!Meets(span, footprint.span)) {
        next.emplace_back(span, std::move(piece));
        continue;
      }
      absl::StatusOr<std::vector<StridedMap>> rest = SubtractTo(piece.map, region);
      if (!rest.ok()) {
        write.status = rest.status();
        write.visible.assign(
            1, {.storage = -1, .map = copy(static_cast<size_t>(position)).map, .casts = {}});
        return;
      }
      for (StridedMap& map : *rest) {
        const ByteRange rest_span = map.ToSpan();
        next.emplace_back(rest_span, Piece{piece.storage, std::move(map), piece.casts});
      }
    }
    left.swap(next);
  }
  write.visible.clear();
  for (auto& [span, piece] : left) write.visible.push_back(std::move(piece));
}

// Pairs among contiguous ranges: each meets those that start before it stops.
absl::Status SweepDense(std::vector<Footprint> dense, Pairs& pairs) {
  std::sort(dense.begin(), dense.end(),
            [](const Footprint& a, const Footprint& b) { return a.span.start < b.span.start; });
  for (size_t i = 0; i < dense.size(); ++i) {
    for (size_t j = i + 1; j < dense.size() && dense[j].span.start < dense[i].span.stop; ++j) {
      pairs.push_back(std::minmax(dense[i].position, dense[j].position));
      if (pairs.size() > kMaxPairs) return TooManyPairs();
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Pairs> MeetingCopies(const RecordLog& log, std::span<const std::int32_t> times) {
  Pairs pairs;
  std::vector<Footprint> all;
  all.reserve(times.size());
  for (size_t p = 0; p < times.size(); ++p) {
    all.push_back(
        {static_cast<std::int32_t>(p), log.copies[static_cast<size_t>(times[p])].map.ToSpan()});
  }
  std::sort(all.begin(), all.end(),
            [](const Footprint& a, const Footprint& b) { return a.span.start < b.span.start; });
  const auto meets_next = [](const Footprint& a, const Footprint& b) {
    return b.span.start < a.span.stop;
  };
  if (std::adjacent_find(all.begin(), all.end(), meets_next) == all.end()) return pairs;

  // One write over everything (`zero_` before the experts arrive) would tie all others
  // into one cluster of FindOverlaps: contiguous ranges, for which spans are exact,
  // are kept apart from strided ones.
  std::vector<Footprint> dense;
  std::vector<TimedSpan> dense_spans;
  std::vector<StridedLayout> strided;
  std::vector<std::int32_t> strided_positions;
  for (const Footprint& footprint : all) {
    const StridedMap& map =
        log.copies[static_cast<size_t>(times[static_cast<size_t>(footprint.position)])].map;
    const StridedLayout layout = map.ToLayout();
    if (layout.nbytes() == footprint.span.nbytes() && IsUnique(layout)) {
      dense.push_back(footprint);
      dense_spans.push_back({footprint.position, footprint.span});
    } else {
      strided.push_back(layout);
      strided_positions.push_back(footprint.position);
    }
  }
  absl::StatusOr<std::vector<OverlapPair>> found = FindOverlaps(strided);
  if (!found.ok()) return found.status();
  for (const OverlapPair& pair : *found) {
    pairs.push_back(std::minmax(strided_positions[static_cast<size_t>(pair.first)],
                                strided_positions[static_cast<size_t>(pair.second)]));
  }
  const WriteIndex index(std::move(dense_spans));
  absl::Status status;
  for (size_t s = 0; s < strided.size() && status.ok(); ++s) {
    index.ForEachMeeting(strided[s].Span(), static_cast<Index>(times.size()), [&](Index position) {
      if (!status.ok()) return;
      const CopyRecord& copy =
          log.copies[static_cast<size_t>(times[static_cast<size_t>(position)])];
      const absl::StatusOr<bool> meets = Overlaps(copy.map.ToLayout(), strided[s]);
      if (!meets.ok())
        status = meets.status();
      else if (*meets) {
        pairs.push_back(std::minmax(static_cast<std::int32_t>(position), strided_positions[s]));
      }
      if (pairs.size() > kMaxPairs) status = TooManyPairs();
    });
  }
  if (status.ok()) status = SweepDense(std::move(dense), pairs);
  if (!status.ok()) return status;
  std::sort(pairs.begin(), pairs.end());
  return pairs;
}

TargetState ResolveTarget(const RecordLog& log, const SymbolicMemory& memory, NodeTable& nodes,
                          StorageId target) {
  return Resolver(log, memory, nodes, target).Run();
}

}  // namespace loadplan
