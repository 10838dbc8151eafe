#include "geometry/strided_layout.h"

#include <algorithm>
#include <numeric>
#include <ostream>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace loadplan {
namespace {

// The number of items, or nullopt where it does not fit; 0 wherever one extent is.
std::optional<Index> CheckedCount(const DimVector& shape) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  std::optional<Index> count = 1;
  for (const Index extent : shape) {
    count = CheckedMultiply(*count, extent);
    if (!count) return std::nullopt;
  }
  return count;
}

// One past the last byte, or nullopt where it does not fit. For layouts that are
// not empty.
std::optional<Index> CheckedEnd(Index byte_offset, const DimVector& shape,
                                const DimVector& byte_strides, Index itemsize) {
  std::optional<Index> end = CheckedAdd(byte_offset, itemsize);
  for (size_t d = 0; end && d < shape.size(); ++d) {
    const std::optional<Index> reach = CheckedMultiply(shape[d] - 1, byte_strides[d]);
    end = reach ? CheckedAdd(*end, *reach) : std::nullopt;
  }
  return end;
}

struct Dim {
  Index extent;
  Index stride;
};

// Decides uniqueness of two dimensions of runs by looking, for each multiple of
// one stride, at the nearest multiples of the other.
bool TwoDimsAreUnique(Dim a, Dim b, Index run) {
  if (a.stride < run || b.stride < run) return false;
  if (a.extent > b.extent) std::swap(a, b);
  for (Index i = 1; i < a.extent; ++i) {
    const Index distance = i * a.stride;
    const Index below = distance / b.stride;
    if (below < b.extent && distance - below * b.stride < run) return false;
    if (below + 1 < b.extent && (below + 1) * b.stride - distance < run) return false;
  }
  return true;
}

// Walks every run. Reached by three and more dimensions that do not nest, and
// only where the bytes fit into the span, so the storage bounds the work.
bool RunsAreUnique(const std::vector<Dim>& dims, Index run) {
  std::vector<Index> starts{0};
  for (const Dim& dim : dims) {
    const size_t count = starts.size();
    for (Index i = 1; i < dim.extent; ++i) {
      for (size_t k = 0; k < count; ++k) starts.push_back(starts[k] + i * dim.stride);
    }
  }
  std::sort(starts.begin(), starts.end());
  for (size_t k = 1; k < starts.size(); ++k) {
    if (starts[k] - starts[k - 1] < run) return false;
  }
  return true;
}

}  // namespace

absl::StatusOr<StridedLayout> StridedLayout::Create(Index byte_offset, DimVector shape,
                                                    DimVector byte_strides, Index itemsize) {
  if (shape.size() != byte_strides.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("`shape` has %d dimensions and `byte_strides` %d; they must be equal",
                        shape.size(), byte_strides.size()));
  }
  if (itemsize <= 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("`itemsize` is %d; it must be positive", itemsize));
  }
  if (byte_offset < 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("`byte_offset` is %d; it cannot be negative", byte_offset));
  }
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] < 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("`shape[%d]` is %d; an extent cannot be negative", d, shape[d]));
    }
    if (byte_strides[d] < 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "`byte_strides[%d]` is %d; a stride cannot be negative", d, byte_strides[d]));
    }
  }
  const std::optional<Index> count = CheckedCount(shape);
  if (!count || !CheckedMultiply(*count, itemsize)) {
    return absl::InvalidArgumentError("the number of bytes of `shape` does not fit in 64 bits");
  }
  if (*count != 0 && !CheckedEnd(byte_offset, shape, byte_strides, itemsize)) {
    return absl::InvalidArgumentError("the end of the last item does not fit in 64 bits");
  }
  return Unchecked(byte_offset, std::move(shape), std::move(byte_strides), itemsize);
}

absl::StatusOr<StridedLayout> StridedLayout::Contiguous(Index byte_offset, DimVector shape,
                                                        Index itemsize) {
  DimVector byte_strides(shape.size(), 0);
  Index stride = itemsize;
  for (size_t d = shape.size(); d-- > 0;) {
    byte_strides[d] = stride;
    // Create reports negative extents and totals that do not fit; the stride of
    // an empty tensor is that of extents of at least 1.
    const std::optional<Index> next = CheckedMultiply(stride, std::max<Index>(shape[d], 1));
    if (!next && d > 0) {
      return absl::InvalidArgumentError("the number of bytes of `shape` does not fit in 64 bits");
    }
    stride = next.value_or(0);
  }
  return Create(byte_offset, std::move(shape), std::move(byte_strides), itemsize);
}

StridedLayout StridedLayout::Unchecked(Index byte_offset, DimVector shape, DimVector byte_strides,
                                       Index itemsize) {
  StridedLayout layout;
  layout.byte_offset_ = byte_offset;
  layout.shape_ = std::move(shape);
  layout.byte_strides_ = std::move(byte_strides);
  layout.itemsize_ = itemsize;
  return layout;
}

Index StridedLayout::num_elements() const { return CheckedCount(shape_).value_or(0); }

ByteRange StridedLayout::Span() const {
  if (empty()) return {};
  Index stop = byte_offset_ + itemsize_;
  for (size_t d = 0; d < shape_.size(); ++d) stop += (shape_[d] - 1) * byte_strides_[d];
  return {byte_offset_, stop};
}

StridedLayout Coalesce(const StridedLayout& layout) {
  if (layout.empty()) return StridedLayout::Unchecked(0, {0}, {1}, 1);
  Index itemsize = layout.itemsize();
  // Innermost first, so that merging appends to the back.
  absl::InlinedVector<Dim, 4> dims;
  for (size_t d = layout.shape().size(); d-- > 0;) {
    const Dim dim{layout.shape()[d], layout.byte_strides()[d]};
    if (dim.extent == 1) continue;
    if (dims.empty() && dim.stride == itemsize) {
      itemsize *= dim.extent;
    } else if (!dims.empty() &&
               CheckedMultiply(dims.back().extent, dims.back().stride) == dim.stride) {
      dims.back().extent *= dim.extent;
    } else {
      dims.push_back(dim);
    }
  }
  DimVector shape;
  DimVector byte_strides;
  for (size_t d = dims.size(); d-- > 0;) {
    shape.push_back(dims[d].extent);
    byte_strides.push_back(dims[d].stride);
  }
  return StridedLayout::Unchecked(layout.byte_offset(), std::move(shape), std::move(byte_strides),
                                  itemsize);
}

bool IsUnique(const StridedLayout& layout) {
  if (layout.empty()) return true;
  absl::InlinedVector<Dim, 4> dims;
  for (size_t d = 0; d < layout.shape().size(); ++d) {
    if (layout.shape()[d] == 1) continue;
    if (layout.byte_strides()[d] == 0) return false;
    dims.push_back({layout.shape()[d], layout.byte_strides()[d]});
  }
  std::sort(dims.begin(), dims.end(),
            [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
  // A dimension whose stride steps over everything below it cannot collide; what
  // is left after the outermost of those are gone decides.
  Index nested_span = layout.itemsize();
  size_t num_tangled = 0;  // dims[0, num_tangled) do not all nest
  Index tangled_span = 0;
  Index tangled_count = 1;
  Index count = 1;
  for (size_t d = 0; d < dims.size(); ++d) {
    const bool nests = dims[d].stride >= nested_span;
    nested_span += (dims[d].extent - 1) * dims[d].stride;
    count *= dims[d].extent;
    if (nests) continue;
    num_tangled = d + 1;
    tangled_span = nested_span;
    tangled_count = count;
  }
  if (num_tangled == 0) return true;
  if (tangled_count > tangled_span / layout.itemsize()) return false;
  if (num_tangled == 2) return TwoDimsAreUnique(dims[0], dims[1], layout.itemsize());
  return RunsAreUnique({dims.begin(), dims.begin() + static_cast<std::ptrdiff_t>(num_tangled)},
                       layout.itemsize());
}

bool IsContiguous(const StridedLayout& layout) {
  return layout.empty() || Coalesce(layout).shape().empty();
}

std::string ToString(const StridedLayout& layout) {
  return absl::StrCat(layout.byte_offset(), " + (", absl::StrJoin(layout.shape(), ", "), "):(",
                      absl::StrJoin(layout.byte_strides(), ", "), ") x ", layout.itemsize());
}

std::ostream& operator<<(std::ostream& stream, const StridedLayout& layout) {
  return stream << ToString(layout);
}

}  // namespace loadplan
