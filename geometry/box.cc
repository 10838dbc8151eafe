#include "geometry/box.h"

#include <algorithm>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace loadplan {

Box Box::Whole(const DimVector& shape) {
  absl::InlinedVector<Interval, 4> intervals;
  intervals.reserve(shape.size());
  for (const Index extent : shape) intervals.push_back({0, extent});
  return Box(std::move(intervals));
}

Index Box::num_elements() const {
  // An empty interval first: the product of the others may not fit.
  for (const Interval& interval : intervals_) {
    if (interval.stop <= interval.start) return 0;
  }
  Index count = 1;
  for (const Interval& interval : intervals_) count *= interval.extent();
  return count;
}

DimVector Box::shape() const {
  DimVector shape;
  shape.reserve(intervals_.size());
  for (const Interval& interval : intervals_) shape.push_back(interval.extent());
  return shape;
}

bool Box::IsWithin(const DimVector& shape) const {
  if (shape.size() != intervals_.size()) return false;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (intervals_[d].start < 0 || intervals_[d].stop > shape[d]) return false;
  }
  return true;
}

std::optional<Box> Intersect(const Box& a, const Box& b) {
  absl::InlinedVector<Interval, 4> intervals;
  intervals.reserve(a.intervals().size());
  for (int d = 0; d < a.rank(); ++d) {
    const Interval common{std::max(a[d].start, b[d].start), std::min(a[d].stop, b[d].stop)};
    if (common.stop <= common.start) return std::nullopt;
    intervals.push_back(common);
  }
  return Box(std::move(intervals));
}

std::string ToString(const Box& box) {
  return absl::StrCat("[",
                      absl::StrJoin(box.intervals(), ", ",
                                    [](std::string* out, const Interval& interval) {
                                      absl::StrAppend(out, interval.start, ":", interval.stop);
                                    }),
                      "]");
}

std::ostream& operator<<(std::ostream& stream, const Box& box) { return stream << ToString(box); }

}  // namespace loadplan
