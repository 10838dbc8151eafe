// What the classes of ops.cc share: lists as they cross into a host language, and Status as
// an exception.
#ifndef LOADPLAN_OPS_ARGUMENTS_H_
#define LOADPLAN_OPS_ARGUMENTS_H_

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "backend/target_set.h"
#include "ops/raise.h"

namespace loadplan {

using Ints = std::vector<std::int64_t>;
using Strings = std::vector<std::string>;
using Tensors = std::vector<at::Tensor>;

inline std::vector<LiveTarget> LiveTargets(Strings names, Tensors tensors) {
  TORCH_CHECK_VALUE(names.size() == tensors.size(), "as many names as target tensors are needed");
  std::vector<LiveTarget> targets;
  targets.reserve(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    targets.push_back({std::move(names[i]), std::move(tensors[i])});
  }
  return targets;
}

}  // namespace loadplan

#endif  // LOADPLAN_OPS_ARGUMENTS_H_
