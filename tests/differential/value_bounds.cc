#include "tests/differential/value_bounds.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>
#include <vector>

namespace loadplan::testing {

double BoundOf(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
      return 200;
    case at::kChar:
      return 100;
    case at::kInt:
    case at::kLong:
      return 100000;
    default:
      return 8;
  }
}

namespace {

double Limit(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat8_e4m3fn:
      return 400;
    case at::kHalf:
      return 30000;
    case at::kByte:
      return 255;
    case at::kChar:
      return 127;
    case at::kInt:
      return 2147483647.0;
    case at::kLong:
      return 1e15;
    default:
      return 1e30;
  }
}

}  // namespace

std::optional<double> CastBound(double bound, at::ScalarType from, at::ScalarType to) {
  if (from == to) return bound;
  if (!std::isfinite(bound)) return std::nullopt;
  if (c10::isIntegralType(to, true) && c10::isIntegralType(from, true))
    return std::min(std::max(bound, bound > Limit(to) ? Limit(to) + 1 : 0), Limit(to) + 1);
  if (c10::isFloatingType(from) && to == at::kByte) return std::nullopt;
  if (bound > Limit(to) * 0.9) return std::nullopt;
  return bound * 1.1 + 1;
}

bool TouchesTwice(const at::Tensor& tensor) {
  std::set<std::int64_t> seen;
  std::vector<std::int64_t> offsets{0};
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    std::vector<std::int64_t> next;
    for (const std::int64_t offset : offsets) {
      for (std::int64_t i = 0; i < tensor.size(d); ++i)
        next.push_back(offset + i * tensor.stride(d));
    }
    offsets = std::move(next);
  }
  for (const std::int64_t offset : offsets) {
    if (!seen.insert(offset).second) return true;
  }
  return false;
}

bool MayOverlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.storage().unsafeGetStorageImpl() != b.storage().unsafeGetStorageImpl()) return false;
  const auto span = [](const at::Tensor& t) {
    std::int64_t last = 0;
    for (std::int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
    const auto size = static_cast<std::int64_t>(t.element_size());
    return std::pair{t.storage_offset() * size, (t.storage_offset() + last + 1) * size};
  };
  if (a.numel() == 0 || b.numel() == 0) return false;
  return span(a).first < span(b).second && span(b).first < span(a).second;
}

}  // namespace loadplan::testing
