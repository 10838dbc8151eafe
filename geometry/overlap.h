// Which of many writes into one storage share a byte.
#ifndef LOADPLAN_GEOMETRY_OVERLAP_H_
#define LOADPLAN_GEOMETRY_OVERLAP_H_

#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "geometry/compose.h"
#include "geometry/export.h"
#include "geometry/index.h"
#include "geometry/strided_layout.h"

namespace loadplan {

// Whether two layouts of one storage share a byte. Exact. Errors as in Compose.
LOADPLAN_API absl::StatusOr<bool> Overlaps(const StridedLayout& a, const StridedLayout& b,
                                           Index max_pieces = kDefaultMaxPieces);

// The same for callers that must not miss an overlap: true also where Overlaps gives up. Spans that
// do not meet are told apart at once.
LOADPLAN_API bool MayShareBytes(const StridedLayout& a, const StridedLayout& b);

// Two writes that share bytes: indices into the input, first < second.
struct OverlapPair {
  Index first = 0;
  Index second = 0;
  Index nbytes = 0;  // bytes that both touch

  friend bool operator==(const OverlapPair&, const OverlapPair&) = default;
};

// Every pair of `layouts` that shares a byte, each once, sorted.
//
// Layouts are compared as regions, never as byte runs. They are split into
// clusters whose spans do not meet, recursively along each common dimension, so
// that n disjoint regular writes cost O(n log n): contiguous blocks, columns of
// one matrix, experts in halves. Only inside a cluster that no dimension separates
// are pairs compared one by one. Errors: ResourceExhausted as in Compose.
LOADPLAN_API absl::StatusOr<std::vector<OverlapPair>> FindOverlaps(
    std::span<const StridedLayout> layouts, Index max_pieces = kDefaultMaxPieces);

}  // namespace loadplan

#endif  // LOADPLAN_GEOMETRY_OVERLAP_H_
