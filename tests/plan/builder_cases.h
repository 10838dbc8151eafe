// The builder's table tests: a case is records and the plan they give, as text.
#ifndef LOADPLAN_TESTS_PLAN_BUILDER_CASES_H_
#define LOADPLAN_TESTS_PLAN_BUILDER_CASES_H_

#include <functional>
#include <ostream>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "plan/load_plan.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/status_matchers.h"

namespace loadplan::testing {

// The name of the first target of `storage`.
inline std::string NameOf(const LoadPlan& plan, StorageId storage) {
  for (const TargetTensor& target : plan.targets()) {
    if (target.storage == storage) return target.name;
  }
  return "?";
}

// A write with names for numbers of storages, which depend on the order in which a
// compiler evaluates arguments.
inline std::string Describe(const LoadPlan& plan, const WriteItem& item) {
  std::string text = ToString(item);
  if (item.origin.kind == OriginKind::kLiveBefore) {
    text = absl::StrCat("live ", NameOf(plan, item.origin.index), text.substr(text.find(" -> ")));
  }
  if (item.target >= 0) {
    const std::string number = absl::StrCat("-> storage ", item.target, ":");
    text.replace(text.find(number), number.size(),
                 absl::StrCat("-> ", NameOf(plan, item.target), ":"));
  }
  return text;
}

// The plan without what the report says better: entries with reasons and writes, then
// writes without names, programs, uncovered bytes, premises.
inline std::string Dump(const LoadPlan& plan) {
  std::string text;
  for (size_t n = 0; n < plan.entries().size(); ++n) {
    const PlanEntry& entry = plan.entries()[n];
    absl::StrAppend(&text, plan.sources()[n].name, ": ", std::string(ToString(entry.kind)),
                    entry.reason.empty() ? "" : ", ", entry.reason, "\n");
    for (const WriteItem& item : plan.writes_of(static_cast<std::int32_t>(n))) {
      absl::StrAppend(&text, "  ", Describe(plan, item), "\n");
    }
  }
  for (const auto* items : {&plan.constants(), &plan.live_copies(), &plan.value_writes()}) {
    for (const WriteItem& item : *items) absl::StrAppend(&text, Describe(plan, item), "\n");
  }
  for (const Program& program : plan.programs()) {
    absl::StrAppend(&text, program.op, " of");
    for (const std::int32_t name : program.names) {
      absl::StrAppend(&text, " ", plan.sources()[static_cast<size_t>(name)].name);
    }
    absl::StrAppend(&text, "\n");
    for (const ProgramInput& input : program.inputs) {
      absl::StrAppend(&text, "  input ", ToString(input.layout), "\n");
      for (const WriteItem& item : input.pieces) {
        absl::StrAppend(&text, "    ", Describe(plan, item), "\n");
      }
    }
  }
  for (const UncoveredTarget& target : plan.uncovered()) {
    absl::StrAppend(&text, "uncovered: ", target.nbytes, " of ", target.total_nbytes, " bytes of ",
                    plan.targets()[static_cast<size_t>(target.target)].name, "\n");
  }
  for (const Premise& premise : plan.premises()) {
    absl::StrAppend(&text, "premise: ", ToString(premise.layout), " of ",
                    NameOf(plan, premise.storage), "\n");
  }
  return text;
}

struct BuilderCase {
  std::string name;
  std::function<void(LogBuilder&)> records;
  std::string plan;
};

inline std::ostream& operator<<(std::ostream& stream, const BuilderCase& c) {
  return stream << c.name;
}

inline std::string CaseName(const ::testing::TestParamInfo<BuilderCase>& test) {
  return test.param.name;
}

inline void CheckPlan(const BuilderCase& c) {
  LogBuilder log;
  c.records(log);
  const absl::StatusOr<LoadPlan> plan = log.Build();
  ASSERT_THAT(plan, IsOk());
  EXPECT_EQ(Dump(*plan), c.plan);
}

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_PLAN_BUILDER_CASES_H_
