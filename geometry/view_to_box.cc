#include "geometry/view_to_box.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "geometry/grid.h"
#include "geometry/unique_grids.h"

namespace loadplan {
namespace {

using geometry_internal::FoldDims;
using geometry_internal::Grid;
using geometry_internal::GridDim;
using geometry_internal::GridOf;

// Boxes that a map may be cut into before it counts as irregular.
constexpr size_t kMaxBoxRegions = 64;
// Boxes that BoundingBoxOf looks at one by one.
constexpr Index kMaxHullBoxes = Index{1} << 20;

// The dimensions of a dense tensor that have a second element, innermost first: each
// with its step in elements. Dimensions of one element are never walked along.
class Axes {
 public:
  explicit Axes(const DimVector& shape) : rank_(shape.size()) {
    Index weight = 1;
    for (size_t d = shape.size(); d-- > 0;) {
      if (shape[d] > 1) axes_.push_back({d, shape[d], weight});
      weight *= std::max<Index>(shape[d], 1);
    }
  }

  size_t size() const { return axes_.size(); }
  Index extent(size_t axis) const { return axes_[axis].extent; }
  Index weight(size_t axis) const { return axes_[axis].weight; }
  Index Coordinate(size_t axis, Index element) const {
    return element / axes_[axis].weight % axes_[axis].extent;
  }
  // The axis whose step is `stride`; size() where there is none.
  size_t Find(Index stride) const {
    size_t axis = 0;
    while (axis < size() && axes_[axis].weight != stride) ++axis;
    return axis;
  }
  // The outermost axis whose step divides `stride`; there always is one (weight 1)
  // unless the tensor has a single element.
  size_t FindDividing(Index stride) const {
    size_t axis = size();
    while (axis-- > 1) {
      if (stride % axes_[axis].weight == 0) return axis;
    }
    return 0;
  }
  // The box with these intervals on the axes and [0, 1) elsewhere.
  Box ToBox(const absl::InlinedVector<Interval, 4>& on_axes) const {
    absl::InlinedVector<Interval, 4> intervals(rank_, Interval{0, 1});
    for (size_t axis = 0; axis < size(); ++axis) intervals[axes_[axis].dim] = on_axes[axis];
    return Box(std::move(intervals));
  }
  // The box of one element.
  absl::InlinedVector<Interval, 4> PointAt(Index element) const {
    absl::InlinedVector<Interval, 4> point;
    for (size_t axis = 0; axis < size(); ++axis) {
      const Index c = Coordinate(axis, element);
      point.push_back({c, c + 1});
    }
    return point;
  }

 private:
  struct Axis {
    size_t dim;
    Index extent;
    Index weight;
  };
  size_t rank_;
  absl::InlinedVector<Axis, 4> axes_;
};

// What happens to `count` elements, `stride` apart, that start at the corner of `box`.
struct Placement {
  enum Kind {
    kPlaced,  // they fill the intervals of `box` from one axis on
    kCut,     // the first `cut` of them end at a boundary of an axis
    kUnfit,   // the stride is no step of a free axis
  };
  Kind kind = kPlaced;
  Index cut = 0;
};

// Extends `box` along the axes by `count` elements of step `stride`; `*free_axis` is
// the first axis that no inner dimension has used.
Placement Place(const Axes& axes, Index count, Index stride, size_t* free_axis,
                absl::InlinedVector<Interval, 4>* box) {
  size_t axis = axes.Find(stride);
  if (axis >= axes.size() || axis < *free_axis) return {Placement::kUnfit, 0};
  Index rows = count;
  Index unit = 1;  // elements in one of `rows`
  while (true) {
    Interval& interval = (*box)[axis];
    const Index extent = axes.extent(axis);
    const Index start = interval.start;
    if (rows <= extent - start) {
      interval.stop = start + rows;
      *free_axis = axis + 1;
      return {};
    }
    if (start > 0) return {Placement::kCut, (extent - start) * unit};
    if (rows % extent != 0) return {Placement::kCut, rows / extent * extent * unit};
    interval.stop = extent;
    rows /= extent;
    unit *= extent;
    if (++axis == axes.size()) return {Placement::kUnfit, 0};
  }
}

// Takes a map of whole elements apart into boxes with their regions. The grid is in
// elements on the dense side; `other` is in bytes of the region's storage.
class RegionCutter {
 public:
  RegionCutter(const Axes& axes, Index itemsize) : axes_(axes), itemsize_(itemsize) {}

  // False where the map is stepped, diagonal or cut too often.
  bool Add(const Grid& grid) {
    absl::InlinedVector<Interval, 4> box = axes_.PointAt(grid.offset);
    size_t free_axis = 0;
    for (size_t first = 0; first < grid.dims.size();) {
      // Dimensions that follow on without a gap are one run of elements.
      const Index stride = grid.dims[first].stride;
      Index count = grid.dims[first].extent;
      size_t last = first + 1;
      while (last < grid.dims.size() && grid.dims[last].stride == count * stride) {
        count *= grid.dims[last++].extent;
      }
      const Placement placement = Place(axes_, count, stride, &free_axis, &box);
      if (placement.kind == Placement::kUnfit) return false;
      if (placement.kind == Placement::kCut) {
        return AddCut(grid, last - 1, placement.cut, count / grid.dims[last - 1].extent);
      }
      first = last;
    }
    if (regions_.size() == kMaxBoxRegions) return false;
    regions_.push_back({axes_.ToBox(box), RegionOf(grid)});
    return true;
  }

  std::vector<BoxRegion> TakeRegions() {
    std::sort(regions_.begin(), regions_.end(), [](const BoxRegion& a, const BoxRegion& b) {
      return std::lexicographical_compare(
          a.box.intervals().begin(), a.box.intervals().end(), b.box.intervals().begin(),
          b.box.intervals().end(),
          [](const Interval& x, const Interval& y) { return x.start < y.start; });
    });
    return std::move(regions_);
  }

 private:
  // Cuts a run behind its first `cut` elements. `dim` is the run's outermost
  // dimension, `inner` the number of elements in one index of it.
  bool AddCut(const Grid& grid, size_t dim, Index cut, Index inner) {
    const Index index = cut / inner;
    const Index next = cut % inner == 0 ? index : index + 1;
    return AddPart(grid, dim, 0, index) && AddPart(grid, dim, index, next) &&
           AddPart(grid, dim, next, grid.dims[dim].extent);
  }

  bool AddPart(const Grid& grid, size_t dim, Index start, Index stop) {
    if (start == stop) return true;
    Grid part = Select(grid, dim, start);
    if (stop - start > 1) {
      GridDim kept = grid.dims[dim];
      kept.extent = stop - start;
      part.dims.insert(part.dims.begin() + static_cast<std::ptrdiff_t>(dim), kept);
    }
    return Add(part);
  }

  StridedLayout RegionOf(const Grid& grid) const {
    DimVector shape;
    DimVector byte_strides;
    for (size_t d = grid.dims.size(); d-- > 0;) {
      shape.push_back(grid.dims[d].extent);
      byte_strides.push_back(grid.dims[d].other);
    }
    return StridedLayout::Unchecked(grid.other_offset, std::move(shape), std::move(byte_strides),
                                    itemsize_);
  }

  const Axes& axes_;
  const Index itemsize_;
  std::vector<BoxRegion> regions_;
};

// Takes a set of elements apart into boxes.
class BoxCutter {
 public:
  // With `fill_steps`, a stepped dimension becomes the interval it lies in.
  BoxCutter(const Axes& axes, bool fill_steps, Index max_boxes)
      : axes_(axes), fill_steps_(fill_steps), max_boxes_(max_boxes) {}

  // False when there would be more than `max_boxes`.
  bool Add(const Grid& grid) {
    absl::InlinedVector<Interval, 4> box = axes_.PointAt(grid.offset);
    size_t free_axis = 0;
    for (size_t d = 0; d < grid.dims.size(); ++d) {
      const GridDim& dim = grid.dims[d];
      if (fill_steps_ && Fill(dim, &free_axis, &box)) continue;
      const Placement placement = Place(axes_, dim.extent, dim.stride, &free_axis, &box);
      if (placement.kind == Placement::kPlaced) continue;
      if (placement.kind == Placement::kUnfit) return AddEach(grid, d);
      return AddPart(grid, d, 0, placement.cut) && AddPart(grid, d, placement.cut, dim.extent);
    }
    if (static_cast<Index>(boxes_.size()) >= max_boxes_) return false;
    boxes_.push_back(axes_.ToBox(box));
    return true;
  }

  std::vector<Box> TakeBoxes() { return std::move(boxes_); }

 private:
  bool Fill(const GridDim& dim, size_t* free_axis, absl::InlinedVector<Interval, 4>* box) const {
    const size_t axis = axes_.FindDividing(dim.stride);
    if (axis < *free_axis || axis >= axes_.size()) return false;
    const Index reach = dim.stride / axes_.weight(axis) * (dim.extent - 1);
    Interval& interval = (*box)[axis];
    if (interval.start + reach >= axes_.extent(axis)) return false;
    interval.stop = interval.start + reach + 1;
    *free_axis = axis + 1;
    return true;
  }

  bool AddEach(const Grid& grid, size_t dim) {
    const Index extent = grid.dims[dim].extent;
    if (extent > max_boxes_ - static_cast<Index>(boxes_.size())) return false;
    for (Index i = 0; i < extent; ++i) {
      if (!Add(Select(grid, dim, i))) return false;
    }
    return true;
  }

  bool AddPart(const Grid& grid, size_t dim, Index start, Index stop) {
    Grid part = grid;
    part.offset += start * grid.dims[dim].stride;
    part.dims[dim].extent = stop - start;
    if (stop - start == 1) part.dims.erase(part.dims.begin() + static_cast<std::ptrdiff_t>(dim));
    return Add(part);
  }

  const Axes& axes_;
  const bool fill_steps_;
  const Index max_boxes_;
  std::vector<Box> boxes_;
};

// Elements that a layout touches, as grids in elements (repeats allowed).
// False when more than `max_grids` are needed: strides that are no whole elements.
bool AppendElements(const StridedLayout& layout, Index itemsize, Index max_grids,
                    std::vector<Grid>* elements) {
  Grid bytes = GridOf(layout);
  // Steps that skip no whole element make one run: every element in it is touched.
  Index run = 1;
  size_t folded = 0;
  for (const GridDim& dim : bytes.dims) {
    if (dim.stride - run >= itemsize) break;
    run += (dim.extent - 1) * dim.stride;
    ++folded;
  }
  bytes.dims.erase(bytes.dims.begin(), bytes.dims.begin() + static_cast<std::ptrdiff_t>(folded));
  std::vector<Grid> aligned{bytes};
  for (size_t d = bytes.dims.size(); d-- > 0;) {
    if (bytes.dims[d].stride % itemsize == 0) continue;
    if (bytes.dims[d].extent > max_grids / static_cast<Index>(aligned.size())) return false;
    std::vector<Grid> parts;
    for (const Grid& grid : aligned) {
      for (Index i = 0; i < bytes.dims[d].extent; ++i) parts.push_back(Select(grid, d, i));
    }
    aligned = std::move(parts);
  }
  for (const Grid& grid : aligned) {
    Grid& set = elements->emplace_back();
    set.offset = grid.offset / itemsize;
    const Index count = (grid.offset + run - 1) / itemsize - set.offset + 1;
    if (count > 1) set.dims.push_back({count, 1, 0});
    for (const GridDim& dim : grid.dims) set.dims.push_back({dim.extent, dim.stride / itemsize, 0});
    FoldDims(&set.dims);
  }
  return true;
}

std::optional<std::vector<Box>> CutBoxes(const StridedLayout& layout, const DenseTensor& base,
                                         bool fill_steps, Index max_boxes) {
  std::vector<Grid> elements;
  if (!AppendElements(layout, base.itemsize, max_boxes, &elements)) return std::nullopt;
  const Axes axes(base.shape);
  BoxCutter cutter(axes, fill_steps, max_boxes);
  for (const Grid& grid : elements) {
    if (!cutter.Add(grid)) return std::nullopt;
  }
  return cutter.TakeBoxes();
}

// The smallest box that holds the elements first..last of the flat tensor.
Box HullOfRange(Index first, Index last, const Axes& axes) {
  absl::InlinedVector<Interval, 4> hull = axes.PointAt(first);
  const absl::InlinedVector<Interval, 4> end = axes.PointAt(last);
  bool whole = false;  // an outer coordinate changes: inner ones take every value
  for (size_t axis = axes.size(); axis-- > 0;) {
    if (whole) hull[axis] = {0, axes.extent(axis)};
    whole = whole || hull[axis].start != end[axis].start;
    hull[axis].stop = std::max(hull[axis].stop, end[axis].stop);
  }
  return axes.ToBox(hull);
}

}  // namespace

std::optional<std::vector<BoxRegion>> BoxRegionsOf(const StridedMap& map, const DenseTensor& base) {
  const StridedMap pieces = Coalesce(map);
  if (pieces.empty()) return std::vector<BoxRegion>{};
  if (map.is_cast()) return std::nullopt;
  Grid elements;
  elements.offset = pieces.from().byte_offset / base.itemsize;
  elements.other_offset = pieces.to().byte_offset;
  const Index run = pieces.from().itemsize / base.itemsize;
  if (pieces.from().byte_offset % base.itemsize != 0) return std::nullopt;
  if (run * base.itemsize != pieces.from().itemsize) return std::nullopt;
  if (run > 1) elements.dims.push_back({run, 1, base.itemsize});
  for (size_t d = pieces.shape().size(); d-- > 0;) {
    const Index stride = pieces.from().byte_strides[d];
    if (stride <= 0 || stride % base.itemsize != 0) return std::nullopt;
    elements.dims.push_back(
        {pieces.shape()[d], stride / base.itemsize, pieces.to().byte_strides[d]});
  }
  std::stable_sort(elements.dims.begin(), elements.dims.end(),
                   [](const GridDim& a, const GridDim& b) { return a.stride < b.stride; });
  const Axes axes(base.shape);
  RegionCutter cutter(axes, base.itemsize);
  if (!cutter.Add(elements)) return std::nullopt;
  return cutter.TakeRegions();
}

std::optional<std::vector<Box>> BoxesOf(const StridedLayout& layout, const DenseTensor& base,
                                        Index max_boxes) {
  if (layout.empty()) return std::vector<Box>{};
  // Boxes may be joined in the end: some more may exist on the way.
  const Index on_the_way = max_boxes > kMaxHullBoxes ? max_boxes : 4 * max_boxes + 64;
  std::optional<std::vector<Box>> boxes = CutBoxes(layout, base, /*fill_steps=*/false, on_the_way);
  if (!boxes) return std::nullopt;
  return UnionOf(*std::move(boxes), max_boxes);
}

std::optional<Box> BoundingBoxOf(const StridedLayout& layout, const DenseTensor& base) {
  if (layout.empty()) return std::nullopt;
  const std::optional<std::vector<Box>> boxes =
      CutBoxes(layout, base, /*fill_steps=*/true, kMaxHullBoxes);
  if (!boxes) {
    const ByteRange span = layout.Span();
    return HullOfRange(span.start / base.itemsize, (span.stop - 1) / base.itemsize,
                       Axes(base.shape));
  }
  absl::InlinedVector<Interval, 4> hull = boxes->front().intervals();
  for (const Box& box : *boxes) {
    for (size_t d = 0; d < hull.size(); ++d) {
      hull[d].start = std::min(hull[d].start, box.intervals()[d].start);
      hull[d].stop = std::max(hull[d].stop, box.intervals()[d].stop);
    }
  }
  return Box(std::move(hull));
}

}  // namespace loadplan
