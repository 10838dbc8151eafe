// UnionOf of geometry/view_to_box.h.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "geometry/view_to_box.h"

namespace loadplan {
namespace {

using Intervals = absl::InlinedVector<Interval, 4>;

bool Precedes(const Interval& a, const Interval& b) {
  return std::pair(a.start, a.stop) < std::pair(b.start, b.stop);
}

// Row-major order of origins.
bool OriginPrecedes(const Box& a, const Box& b) {
  return std::lexicographical_compare(a.intervals().begin(), a.intervals().end(),
                                      b.intervals().begin(), b.intervals().end(), Precedes);
}

// Boxes that differ in dimension `dim` only stand side by side after sorting.
bool PrecedesAlong(const Box& a, const Box& b, int dim) {
  for (int d = 0; d < a.rank(); ++d) {
    if (d != dim && a[d] != b[d]) return Precedes(a[d], b[d]);
  }
  return dim < a.rank() && Precedes(a[dim], b[dim]);
}

bool DifferOnlyIn(const Box& a, const Box& b, int dim) {
  for (int d = 0; d < a.rank(); ++d) {
    if (d != dim && a[d] != b[d]) return false;
  }
  return true;
}

Box WithInterval(const Box& box, int dim, Interval interval) {
  Intervals intervals = box.intervals();
  intervals[static_cast<size_t>(dim)] = interval;
  return Box(std::move(intervals));
}

// Joins boxes that touch or overlap along one dimension and are equal in the others.
void JoinNeighbours(std::vector<Box>* boxes) {
  const int rank = boxes->front().rank();
  for (bool changed = true; changed && boxes->size() > 1;) {
    changed = false;
    // Last dimension first, so that rows become whole before they are stacked.
    for (int dim = rank - 1; dim >= 0; --dim) {
      std::sort(boxes->begin(), boxes->end(),
                [dim](const Box& a, const Box& b) { return PrecedesAlong(a, b, dim); });
      std::vector<Box> joined;
      for (Box& box : *boxes) {
        if (!joined.empty() && DifferOnlyIn(joined.back(), box, dim) &&
            box[dim].start <= joined.back()[dim].stop) {
          const Interval last = joined.back()[dim];
          joined.back() = WithInterval(box, dim, {last.start, std::max(last.stop, box[dim].stop)});
          changed = true;
        } else {
          joined.push_back(std::move(box));
        }
      }
      *boxes = std::move(joined);
    }
  }
}

// Appends the parts of `box` outside `common`, which lies in it.
void AppendDifference(const Box& box, const Box& common, std::vector<Box>* parts) {
  Box left = box;
  for (int d = 0; d < box.rank(); ++d) {
    if (left[d].start < common[d].start) {
      parts->push_back(WithInterval(left, d, {left[d].start, common[d].start}));
    }
    if (common[d].stop < left[d].stop) {
      parts->push_back(WithInterval(left, d, {common[d].stop, left[d].stop}));
    }
    left = WithInterval(left, d, common[d]);
  }
}

// The dimension in which the boxes start at most different places: sweeping along
// it, the fewest boxes are met at a time.
int SweepDim(const std::vector<Box>& boxes) {
  int best = 0;
  size_t most = 0;
  for (int d = 0; d < boxes.front().rank(); ++d) {
    absl::flat_hash_set<Index> starts;
    for (const Box& box : boxes) starts.insert(box[d].start);
    if (starts.size() > most) {
      most = starts.size();
      best = d;
    }
  }
  return best;
}

// Takes from each box what earlier ones hold.
std::vector<Box> MakeDisjoint(std::vector<Box> boxes) {
  const int dim = SweepDim(boxes);
  std::sort(boxes.begin(), boxes.end(),
            [dim](const Box& a, const Box& b) { return a[dim].start < b[dim].start; });
  std::vector<Box> disjoint;
  std::vector<Box> active;  // may meet what is still to come
  for (const Box& box : boxes) {
    std::erase_if(active, [&](const Box& b) { return b[dim].stop <= box[dim].start; });
    std::vector<Box> parts{box};
    for (const Box& earlier : active) {
      std::vector<Box> next;
      for (Box& part : parts) {
        if (const std::optional<Box> common = Intersect(part, earlier)) {
          AppendDifference(part, *common, &next);
        } else {
          next.push_back(std::move(part));
        }
      }
      parts = std::move(next);
    }
    disjoint.insert(disjoint.end(), parts.begin(), parts.end());
    active.push_back(box);
  }
  return disjoint;
}

}  // namespace

std::optional<std::vector<Box>> UnionOf(std::vector<Box> boxes, Index max_boxes) {
  std::erase_if(boxes, [](const Box& box) { return box.num_elements() == 0; });
  if (boxes.empty()) return boxes;
  if (boxes.front().rank() == 0) {
    boxes.resize(1);  // a scalar has one element
  } else if (boxes.size() > 1) {
    JoinNeighbours(&boxes);
    boxes = MakeDisjoint(std::move(boxes));
    JoinNeighbours(&boxes);
    std::sort(boxes.begin(), boxes.end(), OriginPrecedes);
  }
  if (static_cast<Index>(boxes.size()) > max_boxes) return std::nullopt;
  return boxes;
}

}  // namespace loadplan
