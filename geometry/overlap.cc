#include "geometry/overlap.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "geometry/divide.h"
#include "geometry/grid.h"
#include "geometry/unique_grids.h"

namespace loadplan {
namespace {

using geometry_internal::CommonPart;
using geometry_internal::Divide;
using geometry_internal::Grid;
using geometry_internal::GridDim;
using geometry_internal::GridOf;

// Bytes that both touch. Both must touch no byte twice.
absl::StatusOr<Index> CommonNbytes(const Grid& a, const Grid& b, Index max_pieces) {
  Index nbytes = 0;
  Index pieces_left = max_pieces;
  const auto on_common = [&](const CommonPart& part) {
    nbytes += part.nbytes();
    return absl::OkStatus();
  };
  if (absl::Status s = Divide(a, b, &pieces_left, on_common, /*rest=*/nullptr); !s.ok()) return s;
  return nbytes;
}

// One input; several grids where a layout repeats bytes, each byte in one of them.
struct Member {
  Index index = 0;
  ByteRange span;
  std::vector<Grid> grids;
};

absl::StatusOr<Index> CommonNbytes(const Member& a, const Member& b, Index max_pieces) {
  Index nbytes = 0;
  for (const Grid& x : a.grids) {
    for (const Grid& y : b.grids) {
      const absl::StatusOr<Index> common = CommonNbytes(x, y, max_pieces);
      if (!common.ok()) return common;
      nbytes += *common;
    }
  }
  return nbytes;
}

// A member on the number line of one projection.
struct Shadow {
  Index start = 0;
  Index stop = 0;
  const Member* member = nullptr;
};
using Shadows = std::vector<Shadow>;

// Where a member lies within a row of `stride` bytes (rows counted from `base`, which
// no byte is before): a range that holds every byte modulo `stride`. The whole row
// where that cannot be said in one range.
ByteRange RangeInRow(const Member& member, Index base, Index stride) {
  const ByteRange row{0, stride};
  ByteRange range{stride, 0};
  for (const Grid& grid : member.grids) {
    Index extent = 1;
    for (const GridDim& dim : grid.dims) {
      if (dim.stride % stride != 0) extent += (dim.extent - 1) * dim.stride;
    }
    const Index start = (grid.offset - base) % stride;
    if (extent > stride - start) return row;
    range = {std::min(range.start, start), std::max(range.stop, start + extent)};
  }
  return range;
}

bool StartsBefore(const Shadow& a, const Shadow& b) { return a.start < b.start; }

// Pairs of shadows that meet; they are sorted by start.
Index CountMeetings(const Shadows& shadows, Index limit) {
  std::vector<Index> starts;
  starts.reserve(shadows.size());
  for (const Shadow& s : shadows) starts.push_back(s.start);
  Index count = 0;
  for (size_t i = 0; i < shadows.size() && count < limit; ++i) {
    const auto end = std::lower_bound(starts.begin(), starts.end(), shadows[i].stop);
    count += end - starts.begin() - static_cast<Index>(i) - 1;
  }
  return count;
}

// Distinct strides of the grids, largest first; the candidates to project along.
std::vector<Index> StridesOf(const Shadows& shadows) {
  std::vector<Index> strides;
  for (const Shadow& shadow : shadows) {
    for (const Grid& grid : shadow.member->grids) {
      for (const GridDim& dim : grid.dims) {
        if (dim.stride > 1) strides.push_back(dim.stride);
      }
    }
    // A few thousand members mostly have a handful of strides between them.
    if (strides.size() > 4096) {
      std::sort(strides.begin(), strides.end(), std::greater<>());
      strides.erase(std::unique(strides.begin(), strides.end()), strides.end());
    }
  }
  std::sort(strides.begin(), strides.end(), std::greater<>());
  strides.erase(std::unique(strides.begin(), strides.end()), strides.end());
  return strides;
}

class OverlapFinder {
 public:
  explicit OverlapFinder(Index max_pieces) : max_pieces_(max_pieces) {}

  // `shadows` are sorted by start.
  absl::Status Find(const Shadows& shadows) {
    for (size_t first = 0; first < shadows.size();) {
      Index stop = shadows[first].stop;
      size_t last = first + 1;
      while (last < shadows.size() && shadows[last].start < stop) {
        stop = std::max(stop, shadows[last++].stop);
      }
      if (last - first > 1) {
        const auto begin = shadows.begin();
        const Shadows cluster(begin + static_cast<std::ptrdiff_t>(first),
                              begin + static_cast<std::ptrdiff_t>(last));
        if (absl::Status s = FindInCluster(cluster); !s.ok()) return s;
      }
      first = last;
    }
    return absl::OkStatus();
  }

  std::vector<OverlapPair> TakePairs() {
    const auto key = [](const OverlapPair& p) { return std::pair(p.first, p.second); };
    std::sort(pairs_.begin(), pairs_.end(),
              [&](const OverlapPair& a, const OverlapPair& b) { return key(a) < key(b); });
    return std::move(pairs_);
  }

 private:
  // Shadows that form one connected range. Looks for a projection in which fewer
  // of them meet.
  absl::Status FindInCluster(const Shadows& cluster) {
    const auto size = static_cast<Index>(cluster.size());
    const Index at_most = size * (size - 1) / 2;
    Index fewest = CountMeetings(cluster, at_most);
    if (fewest <= 2 * size) return Compare(cluster);
    std::vector<Index> strides = StridesOf(cluster);
    // More kinds of strides than this do not belong to one matrix.
    if (strides.size() > 16) strides.resize(16);
    Shadows best = cluster;
    Index base = cluster.front().member->span.start;
    for (const Shadow& shadow : cluster) base = std::min(base, shadow.member->span.start);
    for (const Index stride : strides) {
      Shadows projected = cluster;
      for (Shadow& shadow : projected) {
        const ByteRange range = RangeInRow(*shadow.member, base, stride);
        shadow.start = range.start;
        shadow.stop = range.stop;
      }
      std::sort(projected.begin(), projected.end(), StartsBefore);
      const Index count = CountMeetings(projected, fewest);
      if (count >= fewest) continue;
      fewest = count;
      best = std::move(projected);
      if (fewest <= 2 * size) return Compare(best);
    }
    return IsOneCluster(best) ? Compare(best) : Find(best);
  }

  static bool IsOneCluster(const Shadows& shadows) {
    Index stop = shadows.front().stop;
    for (const Shadow& shadow : shadows) {
      if (shadow.start >= stop) return false;
      stop = std::max(stop, shadow.stop);
    }
    return true;
  }

  // Each pair whose shadows meet.
  absl::Status Compare(const Shadows& shadows) {
    for (size_t i = 0; i < shadows.size(); ++i) {
      for (size_t k = i + 1; k < shadows.size() && shadows[k].start < shadows[i].stop; ++k) {
        if (absl::Status s = ComparePair(*shadows[i].member, *shadows[k].member); !s.ok()) return s;
      }
    }
    return absl::OkStatus();
  }

  absl::Status ComparePair(const Member& a, const Member& b) {
    if (a.span.start >= b.span.stop || b.span.start >= a.span.stop) return absl::OkStatus();
    const absl::StatusOr<Index> nbytes = CommonNbytes(a, b, max_pieces_);
    if (!nbytes.ok()) return nbytes.status();
    if (*nbytes == 0) return absl::OkStatus();
    pairs_.push_back({std::min(a.index, b.index), std::max(a.index, b.index), *nbytes});
    return absl::OkStatus();
  }

  const Index max_pieces_;
  std::vector<OverlapPair> pairs_;
};

}  // namespace

absl::StatusOr<bool> Overlaps(const StridedLayout& a, const StridedLayout& b, Index max_pieces) {
  if (a.empty() || b.empty()) return false;
  // Repeated bytes are counted more than once, which does not change the answer.
  const absl::StatusOr<Index> nbytes = CommonNbytes(GridOf(a), GridOf(b), max_pieces);
  if (!nbytes.ok()) return nbytes.status();
  return *nbytes > 0;
}

bool MayShareBytes(const StridedLayout& a, const StridedLayout& b) {
  const ByteRange one = a.Span();
  const ByteRange other = b.Span();
  if (one.stop <= other.start || other.stop <= one.start) return false;
  const absl::StatusOr<bool> overlaps = Overlaps(a, b);
  return !overlaps.ok() || *overlaps;
}

absl::StatusOr<std::vector<OverlapPair>> FindOverlaps(std::span<const StridedLayout> layouts,
                                                      Index max_pieces) {
  // Most writes are apart already by where they begin and end: sort those first, and
  // look at strides only where spans meet.
  struct Span {
    Index start;
    Index stop;
    Index index;
  };
  std::vector<Span> spans;
  spans.reserve(layouts.size());
  bool sorted = true;
  for (size_t i = 0; i < layouts.size(); ++i) {
    const ByteRange span = layouts[i].Span();
    if (span.empty()) continue;
    sorted = sorted && (spans.empty() || spans.back().start <= span.start);
    spans.push_back({span.start, span.stop, static_cast<Index>(i)});
  }
  if (!sorted) {
    std::sort(spans.begin(), spans.end(),
              [](const Span& a, const Span& b) { return a.start < b.start; });
  }
  OverlapFinder finder(max_pieces);
  for (size_t first = 0; first < spans.size();) {
    Index stop = spans[first].stop;
    size_t last = first + 1;
    while (last < spans.size() && spans[last].start < stop) {
      stop = std::max(stop, spans[last++].stop);
    }
    if (last - first > 1) {
      std::vector<Member> members(last - first);
      Shadows shadows;
      shadows.reserve(members.size());
      for (size_t i = first; i < last; ++i) {
        Member& member = members[i - first];
        member.index = spans[i].index;
        member.span = {spans[i].start, spans[i].stop};
        absl::StatusOr<std::vector<Grid>> grids =
            geometry_internal::UniqueGrids(layouts[static_cast<size_t>(member.index)], max_pieces);
        if (!grids.ok()) return grids.status();
        member.grids = *std::move(grids);
        shadows.push_back({member.span.start, member.span.stop, &member});
      }
      if (absl::Status s = finder.Find(shadows); !s.ok()) return s;
    }
    first = last;
  }
  return finder.TakePairs();
}

}  // namespace loadplan
