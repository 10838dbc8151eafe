// The value of a traced tensor that no checkpoint byte reaches.
#ifndef LOADPLAN_BACKEND_CONSTANT_VALUE_H_
#define LOADPLAN_BACKEND_CONSTANT_VALUE_H_

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "plan/records.h"

namespace loadplan {

// Data on the trace device that is no checkpoint tensor's keeps its values: an
// index tensor that a loader moved to `w.device` can be read there. Returns a CPU
// tensor laid out like `tensor`, which lies in `storage`, from the captured values of `log`;
// nullopt where a byte comes from anywhere else. Bytes that nothing wrote are an error too, unless
// `allow_uninitialised` (an output argument that is about to be overwritten).
std::optional<at::Tensor> GatherConstant(const RecordLog& log,
                                         const std::vector<at::Tensor>& captured, StorageId storage,
                                         const at::Tensor& tensor, bool allow_uninitialised);

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_CONSTANT_VALUE_H_
