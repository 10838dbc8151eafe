// TracedPlan: a LoadPlan together with what only torch can hold for it.
#ifndef LOADPLAN_BACKEND_TRACED_PLAN_H_
#define LOADPLAN_BACKEND_TRACED_PLAN_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "backend/operator_node.h"
#include "plan/load_plan.h"

namespace loadplan {

// A real tensor that is no target, that the loader read, and that outlives the pass.
struct ExternalTensor {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  std::string what;  // "a tensor of shape [4] and dtype Long"
};

struct TracedPlan {
  LoadPlan plan;
  // Origin kConstant: index -> the captured value, contiguous, read as bytes.
  absl::flat_hash_map<std::int32_t, at::Tensor> constants;
  // Program::node -> the operator and its arguments.
  absl::flat_hash_map<NodeId, std::shared_ptr<const OperatorNode>> nodes;
  // Their values are premises of the plan.
  std::vector<ExternalTensor> externals;
  // Whether the trace shows what every name writes, fallbacks included.
  bool every_name_is_traced = false;
};

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_TRACED_PLAN_H_
