// LogBuilder: records as a pass over a loader would leave them, written by hand.
// For tests and benchmarks of `plan/`, which knows no torch.
#ifndef LOADPLAN_TESTS_TESTING_LOG_BUILDER_H_
#define LOADPLAN_TESTS_TESTING_LOG_BUILDER_H_

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "geometry/index.h"
#include "geometry/strided_layout.h"
#include "geometry/strided_map.h"
#include "plan/load_plan_builder.h"
#include "plan/records.h"

namespace loadplan::testing {

// Codes as torch numbers them.
inline constexpr DType kUint8{0, 1, "uint8"};
inline constexpr DType kFloat32{6, 4, "float32"};
inline constexpr DType kFloat16{5, 2, "float16"};
inline constexpr DType kBFloat16{15, 2, "bfloat16"};

// A strided view of a storage. The members make views of it, as torch's do.
struct View {
  StorageId storage = -1;
  StridedLayout layout;
  DType dtype;

  Index extent(size_t dim) const { return layout.shape()[dim]; }
  View With(Index byte_offset, DimVector shape, DimVector byte_strides) const {
    return {storage,
            StridedLayout::Unchecked(byte_offset, std::move(shape), std::move(byte_strides),
                                     layout.itemsize()),
            dtype};
  }
  View Slice(size_t dim, Index start, Index stop, Index step = 1) const {
    DimVector shape = layout.shape();
    DimVector strides = layout.byte_strides();
    const Index offset = layout.byte_offset() + start * strides[dim];
    shape[dim] = (stop - start + step - 1) / step;
    strides[dim] *= step;
    return With(offset, std::move(shape), std::move(strides));
  }
  View Select(size_t dim, Index index) const {
    View view = Slice(dim, index, index + 1);
    DimVector shape = view.layout.shape();
    DimVector strides = view.layout.byte_strides();
    shape.erase(shape.begin() + static_cast<std::ptrdiff_t>(dim));
    strides.erase(strides.begin() + static_cast<std::ptrdiff_t>(dim));
    return view.With(view.layout.byte_offset(), std::move(shape), std::move(strides));
  }
  View Transpose(size_t a, size_t b) const {
    DimVector shape = layout.shape();
    DimVector strides = layout.byte_strides();
    std::swap(shape[a], shape[b]);
    std::swap(strides[a], strides[b]);
    return With(layout.byte_offset(), std::move(shape), std::move(strides));
  }
  View Unsqueeze(size_t dim) const { return Insert(dim, 1, 0); }
  // A new dimension of `extent` equal slices.
  View Expand(size_t dim, Index extent) const { return Insert(dim, extent, 0); }
  // Of a contiguous view.
  View Reshape(DimVector shape) const {
    View view = *this;
    view.layout =
        *StridedLayout::Contiguous(layout.byte_offset(), std::move(shape), layout.itemsize());
    return view;
  }
  // The last dimension, contiguous, seen through another dtype.
  View As(const DType& other) const {
    DimVector shape = layout.shape();
    DimVector strides = layout.byte_strides();
    shape.back() = shape.back() * layout.itemsize() / other.itemsize;
    strides.back() = other.itemsize;
    return {storage,
            StridedLayout::Unchecked(layout.byte_offset(), std::move(shape), std::move(strides),
                                     other.itemsize),
            other};
  }

 private:
  View Insert(size_t dim, Index extent, Index stride) const {
    DimVector shape = layout.shape();
    DimVector strides = layout.byte_strides();
    shape.insert(shape.begin() + static_cast<std::ptrdiff_t>(dim), extent);
    strides.insert(strides.begin() + static_cast<std::ptrdiff_t>(dim), stride);
    return With(layout.byte_offset(), std::move(shape), std::move(strides));
  }
};

class LogBuilder {
 public:
  View Source(std::string name, DimVector shape, const DType& dtype = kUint8) {
    const View view = NewStorage(StorageKind::kCheckpoint, shape, dtype,
                                 static_cast<std::int32_t>(input_.sources.size()));
    input_.sources.push_back({std::move(name), std::move(shape), dtype, view.storage});
    return view;
  }
  View Target(std::string name, DimVector shape, const DType& dtype = kUint8) {
    const View view = NewStorage(StorageKind::kTarget, std::move(shape), dtype, -1);
    Alias(std::move(name), view);
    return view;
  }
  // Another name of bytes of a target's storage.
  void Alias(std::string name, const View& view) {
    input_.targets.push_back({std::move(name), view.storage, view.layout, view.dtype});
  }
  View Temporary(DimVector shape, const DType& dtype = kUint8) {
    return NewStorage(StorageKind::kTemporary, std::move(shape), dtype, -1);
  }
  View Scratch(std::int32_t captured, DimVector shape, const DType& dtype = kUint8) {
    return NewStorage(StorageKind::kScratch, std::move(shape), dtype, captured);
  }
  View Constant(std::int32_t captured, DimVector shape, const DType& dtype = kUint8) {
    return NewStorage(StorageKind::kConstant, std::move(shape), dtype, captured);
  }
  // `to.copy_(from)`; shapes must be equal. A cast where the dtypes differ.
  void Copy(const View& to, const View& from) {
    const bool is_cast = to.dtype != from.dtype;
    input_.log.copies.push_back({to.storage, from.storage, to.dtype, from.dtype,
                                 *StridedMap::Create(to.layout, from.layout, is_cast)});
  }
  // An operator with one output of `shape` in the dtype of its first input (uint8
  // without inputs).
  View Node(std::string op, const std::vector<View>& inputs, DimVector shape,
            std::string not_replayable = "") {
    NodeRecord node;
    node.op = std::move(op);
    for (const View& input : inputs) {
      node.inputs.push_back({input.storage, input.layout, input.dtype});
    }
    node.time = now();
    node.not_replayable = std::move(not_replayable);
    const View output =
        NewStorage(StorageKind::kValue, std::move(shape), inputs.empty() ? kUint8 : inputs[0].dtype,
                   static_cast<std::int32_t>(input_.log.nodes.size()));
    node.outputs.push_back(output.storage);
    input_.log.nodes.push_back(std::move(node));
    return output;
  }
  void Refuse(std::string op, std::string reason, std::string where,
              const std::vector<View>& inputs) {
    RefusalRecord refusal{std::move(op), std::move(reason), std::move(where), {}, now()};
    for (const View& input : inputs) {
      refusal.inputs.push_back({input.storage, input.layout, input.dtype});
    }
    input_.log.refusals.push_back(std::move(refusal));
  }

  Index now() const { return static_cast<Index>(input_.log.copies.size()); }
  BuildInput& input() { return input_; }
  absl::StatusOr<LoadPlan> Build(OverlapPolicy overlaps = OverlapPolicy::kFallback) const {
    BuildInput input = input_;
    input.overlaps = overlaps;
    return BuildLoadPlan(std::move(input));
  }

 private:
  View NewStorage(StorageKind kind, DimVector shape, const DType& dtype, std::int32_t ref) {
    const auto id = static_cast<StorageId>(input_.log.storages.size());
    View view{id, *StridedLayout::Contiguous(0, std::move(shape), dtype.itemsize), dtype};
    input_.log.storages.push_back({kind, view.layout.nbytes(), ref, /*output=*/0});
    return view;
  }

  BuildInput input_;
};

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_TESTING_LOG_BUILDER_H_
