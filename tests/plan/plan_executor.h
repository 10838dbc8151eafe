// PlanExecutor: runs a plan on plain byte arrays, by the letter of plan/load_plan.h.
#ifndef LOADPLAN_TESTS_PLAN_PLAN_EXECUTOR_H_
#define LOADPLAN_TESTS_PLAN_PLAN_EXECUTOR_H_

#include <cstdint>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "plan/load_plan.h"
#include "plan/records.h"

namespace loadplan::testing {

using Bytes = std::vector<std::uint8_t>;

struct Execution {
  std::vector<Bytes> storages;                 // targets as the plan leaves them
  std::vector<std::vector<int>> write_counts;  // how often each of their bytes was written
  std::vector<std::set<Index>> read_elements;  // per name: elements of which a byte was read
};

// `initial`: bytes of every storage before the update. Writes run in random order.
Execution Execute(const LoadPlan& plan, const RecordLog& log, const std::vector<Bytes>& initial,
                  std::mt19937& generator);

// Bytes of the target storages after doing to `initial` what GetDest says for `entry`;
// nullopt where it says nothing.
std::optional<std::vector<Bytes>> ExecuteDests(const LoadPlan& plan, std::int32_t entry,
                                               const std::vector<Bytes>& initial);

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_PLAN_PLAN_EXECUTOR_H_
