// TracedPlan: a LoadPlan together with what only torch can hold for it.
#ifndef LOADPLAN_BACKEND_TRACED_PLAN_H_
#define LOADPLAN_BACKEND_TRACED_PLAN_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "backend/operator_node.h"
#include "plan/load_plan.h"

namespace loadplan {

struct TracedPlan {
  LoadPlan plan;
  // Origin kConstant: index -> the captured value, contiguous, read as bytes.
  absl::flat_hash_map<std::int32_t, at::Tensor> constants;
  // Program::node -> the operator and its arguments.
  absl::flat_hash_map<NodeId, std::shared_ptr<const OperatorNode>> nodes;
};

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_TRACED_PLAN_H_
