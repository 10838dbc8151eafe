#include "geometry/digits.h"

#include <algorithm>
#include <limits>

namespace loadplan::geometry_internal {
namespace {

Index FloorDivide(Index a, Index b) {
  const Index quotient = a / b;
  return quotient * b > a ? quotient - 1 : quotient;
}

// Inserts into an ascending vector unless it is there.
void InsertWeight(Index weight, DigitSystem* system) {
  auto& weights = system->weights;
  const auto at = std::lower_bound(weights.begin(), weights.end(), weight);
  if (at == weights.end() || *at != weight) weights.insert(at, weight);
}

size_t FirstDim(const Grid& grid) { return grid.HasAtomDim() ? 1 : 0; }

// A dimension whose items start inside one another's atoms: only unrolled does
// each of them lie on one base.
std::optional<size_t> FindUnalignedDim(const Grid& grid) {
  for (size_t d = FirstDim(grid); d < grid.dims.size(); ++d) {
    if (grid.atom > 1 && grid.dims[d].stride % grid.atom != 0) return d;
  }
  return std::nullopt;
}

// Keeps the dimension of least extent among those of stride `weight`.
void OfferDims(const Grid& grid, bool is_first, Index weight, Index* least,
               std::optional<Offender>* offender) {
  for (size_t d = FirstDim(grid); d < grid.dims.size(); ++d) {
    if (grid.dims[d].stride != weight || grid.dims[d].extent >= *least) continue;
    *least = grid.dims[d].extent;
    *offender = Offender{is_first, d};
  }
}

// What a grid shows of itself at one level while the base is chosen.
struct LevelView {
  const Grid& grid;
  Index spill = 1;  // extent that lower levels carry into this one

  Index Start(const DigitSystem& system, size_t level) const {
    const Index radix = system.radix(level);
    const Index digit = FloorDivide(grid.offset - system.base, system.weights[level]);
    return digit - FloorDivide(digit, radix) * radix;
  }
  Index Extent(Index weight) const {
    Index extent = spill;
    for (const GridDim& dim : grid.dims) {
      if (dim.stride == weight) extent = std::max(extent, dim.extent);
    }
    return extent;
  }
};

// Boxes that a digit of `extent` values from `start` on is split into.
Index SegmentCount(Index start, Index extent, Index radix) {
  if (extent <= radix - start) return 1;
  const Index after_head = start == 0 ? extent : extent - (radix - start);
  return (start == 0 ? 0 : 1) + (after_head >= radix ? 1 : 0) + (after_head % radix != 0 ? 1 : 0);
}

class Splitter {
 public:
  Splitter(const Grid& grid, const DigitSystem& system, Index max_boxes, DigitBoxes* boxes)
      : grid_(grid), system_(system), max_boxes_(max_boxes), boxes_(*boxes) {
    box_.digits.resize(system.size());
  }

  bool Run() { return Level(0, grid_.offset - system_.base, grid_.other_offset, {}); }

 private:
  // `start` counts weights of this level; `carried` is what a body of the level
  // below adds to the dimensions here.
  bool Level(size_t level, Index start, Index other, GridDim carried) {
    absl::InlinedVector<GridDim, 3> dims;
    if (carried.extent > 1) dims.push_back(carried);
    for (const GridDim& dim : grid_.dims) {
      if (dim.stride == system_.weights[level]) dims.push_back(dim);
    }
    if (dims.size() < 2) return OneDim(level, start, other, dims.empty() ? GridDim{} : dims[0]);
    std::sort(dims.begin(), dims.end(),
              [](const GridDim& a, const GridDim& b) { return a.extent > b.extent; });
    return Unroll(level, start, other, dims);
  }

  // Dimensions of one stride overlap: all but the longest are taken index by index.
  bool Unroll(size_t level, Index start, Index other, absl::InlinedVector<GridDim, 3> dims) {
    if (dims.size() == 1) return OneDim(level, start, other, dims[0]);
    const GridDim shortest = dims.back();
    dims.pop_back();
    for (Index i = 0; i < shortest.extent; ++i) {
      if (!Unroll(level, start + i, other + i * shortest.other, dims)) return false;
    }
    return true;
  }

  bool OneDim(size_t level, Index start, Index other, GridDim dim) {
    if (level + 1 == system_.size()) return Emit({start, start + dim.extent, dim.other}, other);
    const Index radix = system_.radix(level);
    Index row = FloorDivide(start, radix);
    const Index digit = start - row * radix;
    const auto next = [&](Digit taken, Index done, GridDim carried) {
      box_.digits[level] = taken;
      return Level(level + 1, row, other + done * dim.other, carried);
    };
    if (dim.extent <= radix - digit) return next({digit, digit + dim.extent, dim.other}, 0, {});
    Index done = 0;
    if (digit > 0) {
      if (!next({digit, radix, dim.other}, 0, {})) return false;
      done = radix - digit;
      ++row;
    }
    const Index rows = (dim.extent - done) / radix;
    if (rows > 0) {
      GridDim body{rows, 0, 0};
      if (rows > 1) body.other = radix * dim.other;
      if (!next({0, radix, dim.other}, done, body)) return false;
      done += rows * radix;
      row += rows;
    }
    return done == dim.extent || next({0, dim.extent - done, dim.other}, done, {});
  }

  bool Emit(Digit last, Index other) {
    if (static_cast<Index>(boxes_.size()) >= max_boxes_) return false;
    box_.digits.back() = last;
    box_.other_offset = other;
    boxes_.push_back(box_);
    return true;
  }

  const Grid& grid_;
  const DigitSystem& system_;
  const Index max_boxes_;
  DigitBoxes& boxes_;
  DigitBox box_;
};

}  // namespace

bool FindWeights(const Grid& a, const Grid& b, DigitSystem* system,
                 std::optional<Offender>* offender) {
  offender->reset();
  if (const std::optional<size_t> dim = FindUnalignedDim(a)) {
    *offender = Offender{/*in_first=*/true, *dim};
    return false;
  }
  if (const std::optional<size_t> dim = FindUnalignedDim(b)) {
    *offender = Offender{/*in_first=*/false, *dim};
    return false;
  }
  system->weights = {1};
  for (const Grid* grid : {&a, &b}) {
    if (grid->atom > 1) InsertWeight(grid->atom, system);
    for (const GridDim& dim : grid->dims) InsertWeight(dim.stride, system);
  }
  for (size_t level = 0; level + 1 < system->size(); ++level) {
    if (system->weights[level + 1] % system->weights[level] == 0) continue;
    Index least = std::numeric_limits<Index>::max();
    for (const Index weight : {system->weights[level], system->weights[level + 1]}) {
      // The weight of an atom stays whatever is unrolled.
      if (weight == a.atom || weight == b.atom) continue;
      OfferDims(a, /*is_first=*/true, weight, &least, offender);
      OfferDims(b, /*is_first=*/false, weight, &least, offender);
    }
    return false;
  }
  return true;
}

void ChooseBase(const Grid& a, const Grid& b, DigitSystem* system) {
  system->base = 0;
  LevelView views[] = {{a}, {b}};
  const size_t preferred = a.offset <= b.offset ? 0 : 1;
  for (size_t level = 0; level + 1 < system->size(); ++level) {
    const Index weight = system->weights[level];
    const Index radix = system->radix(level);
    const Index starts[] = {views[0].Start(*system, level), views[1].Start(*system, level)};
    const Index extents[] = {views[0].Extent(weight), views[1].Extent(weight)};
    // Pieces when the base puts the start of grid `zero` at digit 0.
    const auto cost = [&](size_t zero) {
      const Index other_start = starts[1 - zero] - starts[zero];
      return SegmentCount(0, extents[zero], radix) *
             SegmentCount(other_start < 0 ? other_start + radix : other_start, extents[1 - zero],
                          radix);
    };
    size_t zero = cost(1 - preferred) < cost(preferred) ? 1 - preferred : preferred;
    if (weight < b.atom) zero = 1;
    if (weight < a.atom) zero = 0;
    system->base += starts[zero] * weight;
    for (LevelView& view : views) view.spill = std::max<Index>(1, view.Extent(weight) / radix);
  }
}

bool Split(const Grid& grid, const DigitSystem& system, Index max_boxes, DigitBoxes* boxes) {
  return Splitter(grid, system, max_boxes, boxes).Run();
}

bool Intersect(const DigitBox& a, const DigitBox& b, absl::InlinedVector<Digit, 5>* common) {
  common->resize(a.digits.size());
  for (size_t j = 0; j < a.digits.size(); ++j) {
    Digit& digit = (*common)[j];
    digit.start = std::max(a.digits[j].start, b.digits[j].start);
    digit.stop = std::min(a.digits[j].stop, b.digits[j].stop);
    if (digit.start >= digit.stop) return false;
  }
  return true;
}

void AppendDifference(const DigitBox& box, const absl::InlinedVector<Digit, 5>& common,
                      DigitBoxes* boxes) {
  DigitBox left = box;  // digits above `j` are those of `common` already
  const auto append = [&](size_t j, Index start, Index stop) {
    if (start >= stop) return;
    DigitBox& part = boxes->emplace_back(left);
    part.digits[j].start = start;
    part.digits[j].stop = stop;
    part.other_offset += (start - left.digits[j].start) * left.digits[j].other;
  };
  for (size_t j = box.digits.size(); j-- > 0;) {
    append(j, box.digits[j].start, common[j].start);
    append(j, common[j].stop, box.digits[j].stop);
    left.other_offset += (common[j].start - box.digits[j].start) * box.digits[j].other;
    left.digits[j].start = common[j].start;
    left.digits[j].stop = common[j].stop;
  }
}

Grid GridOf(const DigitBox& box, const DigitSystem& system, Index atom, Index other_atom) {
  Grid grid;
  grid.offset = system.base;
  grid.other_offset = box.other_offset;
  grid.atom = atom;
  grid.other_atom = other_atom;
  if (atom > 1) grid.dims.push_back({atom, 1, 0});
  for (size_t j = 0; j < box.digits.size(); ++j) {
    const Digit& digit = box.digits[j];
    grid.offset += digit.start * system.weights[j];
    if (digit.extent() == 1 || system.weights[j] < atom) continue;
    const GridDim dim{digit.extent(), system.weights[j], digit.other};
    if (grid.dims.size() > (atom > 1 ? 1u : 0u)) {
      GridDim& inner = grid.dims.back();
      if (inner.extent * inner.stride == dim.stride && inner.extent * inner.other == dim.other) {
        inner.extent *= dim.extent;
        continue;
      }
    }
    grid.dims.push_back(dim);
  }
  return grid;
}

}  // namespace loadplan::geometry_internal
