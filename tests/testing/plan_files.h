// Plan files in tests that know no torch: what stands beside a plan, and plans that have been
// written and read.
#ifndef LOADPLAN_TESTS_TESTING_PLAN_FILES_H_
#define LOADPLAN_TESTS_TESTING_PLAN_FILES_H_

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "plan/plan_file.h"
#include "plan/records.h"
#include "tests/testing/log_builder.h"

namespace loadplan::testing {

inline std::optional<DType> KnownDType(std::string_view name) {
  static constexpr std::array kKnown = {kUint8, kFloat32, kFloat16, kBFloat16};
  for (const DType& dtype : kKnown) {
    if (dtype.name == name) return dtype;
  }
  return std::nullopt;
}

// What `backend/` and the caller would put beside the plan of `log`.
inline PlanExtras ExtrasFor(const LoadPlan& plan, const RecordLog& log) {
  PlanExtras extras;
  extras.info = {"1.2.3", "2.14.0", "AVX2", "rank 1 of 8", "('a', 1)", {"model.scale"}, 1.5};
  std::map<std::int32_t, Index> constants;  // the larger one, where a test reuses a number
  for (std::size_t s = 0; s < log.storages.size(); ++s) {
    const StorageRecord& storage = log.storages[s];
    if (storage.kind == StorageKind::kTarget) {
      extras.storages.push_back({static_cast<StorageId>(s), storage.nbytes, "cpu"});
    } else if (storage.kind == StorageKind::kConstant || storage.kind == StorageKind::kScratch) {
      Index& nbytes = constants[storage.ref];
      nbytes = std::max(nbytes, storage.nbytes);
    }
  }
  for (const auto& [index, nbytes] : constants) {
    extras.constants.push_back({index, nbytes, absl::StrCat("constant ", index)});
  }
  for (std::size_t i = 0; i < plan.premises().size(); ++i) extras.premise_digests.push_back(77 + i);
  for (const Program& program : plan.programs()) {
    SavedProgram& saved = extras.programs.emplace_back();
    saved.blob = program.op;
    for (const StorageId output : log.nodes[static_cast<std::size_t>(program.node)].outputs) {
      saved.result_nbytes.push_back(log.storages[static_cast<std::size_t>(output)].nbytes);
    }
  }
  return extras;
}

// The plan after it was a file.
inline absl::StatusOr<PlanFile> SavedAndRead(const LoadPlan& plan, const RecordLog& log) {
  const absl::StatusOr<std::string> bytes = EncodePlanFile(plan, ExtrasFor(plan, log));
  if (!bytes.ok()) return bytes.status();
  return DecodePlanFile(*bytes, KnownDType);
}

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_TESTING_PLAN_FILES_H_
