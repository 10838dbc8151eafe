// Random layouts and maps for property tests: views as loaders make them (narrow, step,
// permute, select, diagonal, unfold, expand, view.dtype) of dense tensors, and
// as_strided that no tensor operator would make.
#ifndef LOADPLAN_TESTS_TESTING_RANDOM_GEOMETRY_H_
#define LOADPLAN_TESTS_TESTING_RANDOM_GEOMETRY_H_

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "tests/testing/oracle.h"

namespace loadplan::testing {

inline Index Uniform(std::mt19937& gen, Index first, Index last) {
  return std::uniform_int_distribution<Index>(first, last)(gen);
}

template <typename T>
T Pick(std::mt19937& gen, const std::vector<T>& values) {
  return values[static_cast<size_t>(Uniform(gen, 0, static_cast<Index>(values.size()) - 1))];
}

inline bool HasRepeats(const StridedLayout& layout) {
  return ByteSet(layout).size() != Bytes(layout).size();
}

// Factors of `count` in random order: a shape of that many elements, rank 1 to 4.
inline DimVector RandomShapeOf(std::mt19937& gen, Index count) {
  DimVector shape;
  while (count > 1 && shape.size() < 3 && Uniform(gen, 0, 3) != 0) {
    std::vector<Index> divisors;
    for (Index d = 1; d <= count; ++d) {
      if (count % d == 0) divisors.push_back(d);
    }
    shape.push_back(Pick(gen, divisors));
    count /= shape.back();
  }
  shape.push_back(count);
  std::shuffle(shape.begin(), shape.end(), gen);
  return shape;
}

// A dense tensor of up to `nbytes` bytes at a random place in them.
inline StridedLayout RandomDense(std::mt19937& gen, Index nbytes) {
  const Index itemsize = Pick<Index>(gen, {1, 2, 4});
  const Index count = nbytes / itemsize;
  const Index used = Uniform(gen, 0, 3) == 0 ? Uniform(gen, 1, count) : count;
  const Index offset = itemsize * Uniform(gen, 0, count - used);
  return *StridedLayout::Contiguous(offset, RandomShapeOf(gen, used), itemsize);
}

// One random view of `layout`.
inline StridedLayout RandomViewOf(std::mt19937& gen, const StridedLayout& layout) {
  Index offset = layout.byte_offset();
  DimVector shape = layout.shape();
  DimVector strides = layout.byte_strides();
  Index itemsize = layout.itemsize();
  const auto append = [&](Index extent, Index stride) {
    shape.push_back(extent);
    strides.push_back(stride);
  };
  if (shape.empty()) append(1, itemsize);
  const auto d = static_cast<size_t>(Uniform(gen, 0, static_cast<Index>(shape.size()) - 1));
  const Index extent = shape[d];
  switch (Uniform(gen, 0, 8)) {
    case 0:
    case 1:
    case 2: {  // narrow, sometimes to nothing
      const Index start = Uniform(gen, 0, extent);
      shape[d] =
          start == extent ? 0 : Uniform(gen, Uniform(gen, 0, 9) == 0 ? 0 : 1, extent - start);
      offset += start * strides[d];
      break;
    }
    case 3: {  // step
      const Index step = Uniform(gen, 1, 3);
      shape[d] = (extent + step - 1) / step;
      strides[d] *= step;
      break;
    }
    case 4: {  // transpose
      const auto e = static_cast<size_t>(Uniform(gen, 0, static_cast<Index>(shape.size()) - 1));
      std::swap(shape[d], shape[e]);
      std::swap(strides[d], strides[e]);
      break;
    }
    case 5: {  // diagonal, or a select where there is one dimension
      if (extent == 0) break;
      if (shape.size() == 1) {
        offset += Uniform(gen, 0, extent - 1) * strides[d];
        shape[d] = 1;
      } else {
        const size_t e = (d + 1) % shape.size();
        shape[e] = std::min(extent, shape[e]);
        strides[e] += strides[d];
        shape.erase(shape.begin() + static_cast<std::ptrdiff_t>(d));
        strides.erase(strides.begin() + static_cast<std::ptrdiff_t>(d));
      }
      break;
    }
    case 6: {  // unfold
      if (extent == 0) break;
      const Index size = Uniform(gen, 1, std::min<Index>(extent, 4));
      const Index step = Uniform(gen, 1, 3);
      append(size, strides[d]);
      shape[d] = (extent - size) / step + 1;
      strides[d] *= step;
      break;
    }
    case 7:  // expand
      if (shape.size() < 4) append(Uniform(gen, 1, 3), 0);
      break;
    case 8:  // view.dtype
      append(itemsize, 1);
      itemsize = 1;
      break;
  }
  return Layout(offset, shape, strides, itemsize);
}

// Any strides, kept inside `nbytes`.
inline StridedLayout RandomAsStrided(std::mt19937& gen, Index nbytes) {
  const Index itemsize = Pick<Index>(gen, {1, 2, 4});
  Index room = nbytes - itemsize;
  DimVector shape;
  DimVector strides;
  for (Index rank = Uniform(gen, 0, 3); rank > 0; --rank) {
    const Index stride = Uniform(gen, 0, 24);
    const Index most = stride == 0 ? 3 : std::min<Index>(room / stride + 1, 5);
    shape.push_back(Uniform(gen, 1, most));
    strides.push_back(stride);
    room -= (shape.back() - 1) * stride;
  }
  return Layout(Uniform(gen, 0, room), shape, strides, itemsize);
}

// A layout inside `nbytes` bytes, of at most a few hundred bytes.
inline StridedLayout RandomLayout(std::mt19937& gen, Index nbytes) {
  if (Uniform(gen, 0, 4) == 0) return RandomAsStrided(gen, nbytes);
  StridedLayout layout = RandomDense(gen, nbytes);
  for (Index views = Uniform(gen, 0, 4); views > 0; --views) {
    StridedLayout next = RandomViewOf(gen, layout);
    if (next.nbytes() > 3 * nbytes) break;
    layout = std::move(next);
  }
  return layout;
}

// A layout that touches no byte twice.
inline StridedLayout RandomUniqueLayout(std::mt19937& gen, Index nbytes) {
  while (true) {
    StridedLayout layout = RandomLayout(gen, nbytes);
    if (!HasRepeats(layout)) return layout;
  }
}

// The far side of a map over items of `shape`: dense in a random order of dimensions,
// with gaps now and then.
inline MapSide RandomDenseSide(std::mt19937& gen, const DimVector& shape, Index itemsize) {
  std::vector<size_t> order(shape.size());
  for (size_t d = 0; d < order.size(); ++d) order[d] = d;
  if (Uniform(gen, 0, 1) == 0) std::shuffle(order.begin(), order.end(), gen);
  MapSide side{Uniform(gen, 0, 9) * itemsize, DimVector(shape.size(), 0), itemsize};
  Index stride = itemsize;
  for (size_t i = order.size(); i-- > 0;) {
    side.byte_strides[order[i]] = stride;
    stride *= std::max<Index>(shape[order[i]], 1);
    if (Uniform(gen, 0, 3) == 0) stride += Uniform(gen, 0, 3) * itemsize;
  }
  return side;
}

// A `from` side that may flip, repeat and skip.
inline MapSide RandomFromSide(std::mt19937& gen, const DimVector& shape, Index itemsize) {
  MapSide side = RandomDenseSide(gen, shape, itemsize);
  for (size_t d = 0; d < shape.size(); ++d) {
    switch (Uniform(gen, 0, 7)) {
      case 0:
        side.byte_offset += std::max<Index>(shape[d] - 1, 0) * side.byte_strides[d];
        side.byte_strides[d] = -side.byte_strides[d];
        break;
      case 1:
        side.byte_strides[d] = 0;
        break;
      case 2:
        side.byte_strides[d] = Uniform(gen, 0, 9);
        break;
      default:
        break;
    }
  }
  return side;
}

inline MapSide SideOf(const StridedLayout& layout) {
  return {layout.byte_offset(), layout.byte_strides(), layout.itemsize()};
}

// Whether items start at multiples of the itemsize, as those of tensors do.
inline bool IsAligned(const StridedLayout& layout) {
  bool aligned = layout.byte_offset() % layout.itemsize() == 0;
  for (const Index stride : layout.byte_strides()) {
    aligned = aligned && stride % layout.itemsize() == 0;
  }
  return aligned;
}

// A map whose `from` lies anyhow in `nbytes` bytes and whose `to` is unique.
inline StridedMap RandomOuter(std::mt19937& gen, Index nbytes, bool is_cast) {
  StridedLayout from = RandomLayout(gen, nbytes);
  while (is_cast && !IsAligned(from)) from = RandomLayout(gen, nbytes);
  const Index itemsize = is_cast ? Pick<Index>(gen, {1, 2, 4}) : from.itemsize();
  return Map(from.shape(), RandomDenseSide(gen, from.shape(), itemsize), SideOf(from), is_cast);
}

// A map whose `to` lies in `nbytes` bytes, each at most once.
inline StridedMap RandomInner(std::mt19937& gen, Index nbytes, bool is_cast) {
  StridedLayout to = RandomUniqueLayout(gen, nbytes);
  while (is_cast && !IsAligned(to)) to = RandomUniqueLayout(gen, nbytes);
  const Index itemsize = is_cast ? Pick<Index>(gen, {1, 2, 4}) : to.itemsize();
  return Map(to.shape(), SideOf(to), RandomFromSide(gen, to.shape(), itemsize), is_cast);
}

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_TESTING_RANDOM_GEOMETRY_H_
