// Interval and Box: which coordinates of a checkpoint tensor are meant.
#ifndef LOADPLAN_GEOMETRY_BOX_H_
#define LOADPLAN_GEOMETRY_BOX_H_

#include <iosfwd>
#include <optional>
#include <string>

#include "absl/container/inlined_vector.h"
#include "geometry/export.h"
#include "geometry/index.h"

namespace loadplan {

// Coordinates `start <= c < stop` in one dimension.
struct Interval {
  Index start = 0;
  Index stop = 0;

  Index extent() const { return stop - start; }
  friend bool operator==(const Interval&, const Interval&) = default;
};

// A hyperrectangle: one half-open interval per dimension, in elements.
// A scalar's box has no intervals and one element; it prints as `[]`.
// Example: rows 2 and 3 of a 4x3 tensor print as `[2:4, 0:3]`.
class LOADPLAN_API Box {
 public:
  Box() = default;
  explicit Box(absl::InlinedVector<Interval, 4> intervals) : intervals_(std::move(intervals)) {}

  // The whole of a tensor of `shape`.
  static Box Whole(const DimVector& shape);

  int rank() const { return static_cast<int>(intervals_.size()); }
  const Interval& operator[](int dim) const { return intervals_[static_cast<size_t>(dim)]; }
  const absl::InlinedVector<Interval, 4>& intervals() const { return intervals_; }

  // Product of the extents; 1 for a scalar, 0 where an interval is empty.
  Index num_elements() const;
  // Extents per dimension.
  DimVector shape() const;
  // Whether every coordinate lies in [0, shape[d]).
  bool IsWithin(const DimVector& shape) const;

  friend bool operator==(const Box&, const Box&) = default;

 private:
  absl::InlinedVector<Interval, 4> intervals_;
};

// The coordinates that lie in both; nullopt where there are none. Ranks must be equal.
LOADPLAN_API std::optional<Box> Intersect(const Box& a, const Box& b);

LOADPLAN_API std::string ToString(const Box& box);
LOADPLAN_API std::ostream& operator<<(std::ostream& stream, const Box& box);

}  // namespace loadplan

#endif  // LOADPLAN_GEOMETRY_BOX_H_
