// CheckedProduct: the items or bytes of a shape that somebody else gave.
#ifndef LOADPLAN_GEOMETRY_CHECKED_PRODUCT_H_
#define LOADPLAN_GEOMETRY_CHECKED_PRODUCT_H_

#include <optional>

#include "geometry/index.h"

namespace loadplan {

// `factor` times all `extents`; nullopt where it does not fit in an Index, or an extent is
// negative.
template <typename Extents>
std::optional<Index> CheckedProduct(Index factor, const Extents& extents) {
  std::optional<Index> product = factor;
  for (const Index extent : extents) {
    if (extent < 0 || !(product = CheckedMultiply(*product, extent)).has_value()) {
      return std::nullopt;
    }
  }
  return product;
}

}  // namespace loadplan

#endif  // LOADPLAN_GEOMETRY_CHECKED_PRODUCT_H_
