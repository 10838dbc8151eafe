// The oracle of the geometry tests: layouts and maps by walking every byte.
#ifndef LOADPLAN_TESTS_TESTING_ORACLE_H_
#define LOADPLAN_TESTS_TESTING_ORACLE_H_

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "geometry/box.h"
#include "geometry/index.h"
#include "geometry/strided_layout.h"
#include "geometry/strided_map.h"

namespace loadplan::testing {

// (byte of `to`, byte of `from`); for a cast: the first bytes of two items.
using Pair = std::pair<Index, Index>;

// Calls `f(coordinate)` for each coordinate of `shape`, row-major.
template <typename F>
void ForEachCoordinate(const DimVector& shape, const F& f) {
  for (const Index extent : shape) {
    if (extent <= 0) return;
  }
  DimVector c(shape.size(), 0);
  while (true) {
    f(c);
    size_t d = shape.size();
    while (d > 0 && ++c[d - 1] == shape[d - 1]) c[--d] = 0;
    if (d == 0) return;
  }
}

inline Index Dot(const DimVector& coordinate, const DimVector& strides) {
  Index sum = 0;
  for (size_t d = 0; d < coordinate.size(); ++d) sum += coordinate[d] * strides[d];
  return sum;
}

// The bytes of a layout in its order.
inline std::vector<Index> Bytes(const StridedLayout& layout) {
  std::vector<Index> bytes;
  ForEachCoordinate(layout.shape(), [&](const DimVector& c) {
    const Index start = layout.byte_offset() + Dot(c, layout.byte_strides());
    for (Index i = 0; i < layout.itemsize(); ++i) bytes.push_back(start + i);
  });
  return bytes;
}

inline std::set<Index> ByteSet(const StridedLayout& layout) {
  const std::vector<Index> bytes = Bytes(layout);
  return {bytes.begin(), bytes.end()};
}

// The pairs of a map in its order: bytes, or items for a cast.
inline std::vector<Pair> Pairs(const StridedMap& map) {
  std::vector<Pair> pairs;
  const Index count = map.is_cast() ? 1 : map.to().itemsize;
  ForEachCoordinate(map.shape(), [&](const DimVector& c) {
    const Index to = map.to().byte_offset + Dot(c, map.to().byte_strides);
    const Index from = map.from().byte_offset + Dot(c, map.from().byte_strides);
    for (Index i = 0; i < count; ++i) pairs.emplace_back(to + i, from + i);
  });
  return pairs;
}

inline std::vector<Pair> SortedPairs(const StridedMap& map) {
  std::vector<Pair> pairs = Pairs(map);
  std::sort(pairs.begin(), pairs.end());
  return pairs;
}

inline std::vector<Pair> SortedPairs(const std::vector<StridedMap>& maps) {
  std::vector<Pair> pairs;
  for (const StridedMap& map : maps) {
    const std::vector<Pair> more = Pairs(map);
    pairs.insert(pairs.end(), more.begin(), more.end());
  }
  std::sort(pairs.begin(), pairs.end());
  return pairs;
}

// Flat row-major indices of a box of a tensor of `shape`, in row-major order.
inline std::vector<Index> Elements(const Box& box, const DimVector& shape) {
  std::vector<Index> elements;
  ForEachCoordinate(box.shape(), [&](const DimVector& c) {
    Index flat = 0;
    for (int d = 0; d < box.rank(); ++d) {
      const auto i = static_cast<size_t>(d);
      flat = flat * shape[i] + box[d].start + c[i];
    }
    elements.push_back(flat);
  });
  return elements;
}

// Builds a layout of valid arguments in one expression.
inline StridedLayout Layout(Index offset, DimVector shape, DimVector strides, Index itemsize) {
  return StridedLayout::Unchecked(offset, std::move(shape), std::move(strides), itemsize);
}

// Builds a map likewise.
inline StridedMap Map(DimVector shape, MapSide to, MapSide from, bool is_cast = false) {
  return StridedMap::Unchecked(std::move(shape), std::move(to), std::move(from), is_cast);
}

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_TESTING_ORACLE_H_
