// Captured tensors and operator programs as bytes, for plan files. See Note [Plan files] in
// plan/plan_file.h: plans hold them as blobs.
#ifndef LOADPLAN_BACKEND_OPERATOR_CODEC_H_
#define LOADPLAN_BACKEND_OPERATOR_CODEC_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "backend/operator_node.h"
#include "plan/dtype.h"

namespace loadplan {

// A dtype by the name that ToDType gives it.
std::optional<DType> DTypeByName(std::string_view name);

// Shape, strides and bytes. Unimplemented, in words, for a tensor without plain memory.
absl::StatusOr<std::string> EncodeTensor(const at::Tensor& tensor);
// A tensor that was not on the CPU comes back on `device`. InvalidArgument where the bytes are no
// tensor.
absl::StatusOr<at::Tensor> DecodeTensor(std::string_view bytes, at::Device device);

// Name and overload, arguments as tagged values, what the trace saw of its results. Unimplemented
// where an argument is of a kind that no file holds (a generator, a stream).
absl::StatusOr<std::string> EncodeOperator(const OperatorNode& node);
// InvalidArgument where the bytes are no call that the trace device could have recorded: the
// dispatcher does not know the operator, an argument is not of the type that its schema names,
// nothing of the plan goes into it, or it draws random numbers.
absl::StatusOr<std::shared_ptr<const OperatorNode>> DecodeOperator(std::string_view bytes,
                                                                   at::Device device);

// From the first byte of the first element to the end of the last one; 0 for no elements.
Index NbytesOf(const ResultMeta& meta);

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_OPERATOR_CODEC_H_
