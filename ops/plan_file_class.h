// PlanFileClass: a plan file as host processes see it.
#ifndef LOADPLAN_OPS_PLAN_FILE_CLASS_H_
#define LOADPLAN_OPS_PLAN_FILE_CLASS_H_

#include <ATen/Version.h>
#include <torch/custom_class.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lifecycle/annotate.h"
#include "lifecycle/saved_plan.h"
#include "loadplan_built_for.h"
#include "ops/arguments.h"
#include "ops/plan_class.h"
#include "plan/byte_codec.h"
#include "plan/plan_file_sections.h"

namespace loadplan {

class PlanFileClass : public torch::CustomClassHolder {
 public:
  explicit PlanFileClass(const std::string& path)
      : path_(path), file_(std::make_shared<PlanFile>(Value(ReadPlanFile(path)))) {}

  // Versions of loadplan and torch, tag, placement; what the loader rebound; seconds; numbers of
  // premises, constants and operators, and a checksum of what these hold.
  std::tuple<Strings, Strings, double, Ints> about() const {
    const PlanExtras& extras = file_->extras;
    ByteWriter held;
    for (const std::uint64_t digest : extras.premise_digests) held.Fixed64(digest);
    for (const SavedConstant& constant : extras.constants) held.String(constant.blob);
    for (const SavedProgram& program : extras.programs) held.String(program.blob);
    const auto count = [](const auto& items) { return static_cast<int64_t>(items.size()); };
    return {{extras.info.library_version, extras.info.torch_version, extras.info.tag,
             extras.info.placement},
            extras.info.rebound,
            extras.info.plan_seconds,
            {count(extras.premise_digests), count(extras.constants), count(extras.programs),
             static_cast<int64_t>(Checksum(held.bytes()))}};
  }
  // A checksum of all that the plan does, whoever made it, when and on which device.
  int64_t digest() const {
    PlanExtras extras = file_->extras;
    for (SavedStorage& storage : extras.storages) storage.device.clear();
    // Encoded anew, because two files may number the same things differently.
    const std::string bytes = Value(EncodePlanFile(file_->plan, extras));
    ByteWriter sums;
    for (const std::string_view section : Value(SplitSections(bytes))) {
      sums.Fixed64(Checksum(section));
    }
    constexpr auto kNotAbout = static_cast<std::size_t>(Section::kDTypes) * 8;
    return static_cast<int64_t>(Checksum(sums.bytes().substr(kNotAbout)));
  }
  c10::intrusive_ptr<LoadPlanClass> plan() const {
    return c10::make_intrusive<LoadPlanClass>(std::shared_ptr<const LoadPlan>(file_, &file_->plan));
  }
  // Once: the plan moves out.
  c10::intrusive_ptr<LoadPlanClass> bind(Strings names, Tensors tensors, std::string torch_version,
                                         std::string tag) {
    PlanFileInfo now;
    now.library_version = kVersion;
    now.torch_version = std::move(torch_version);
    now.processor = at::get_cpu_capability();
    now.tag = std::move(tag);
    auto bound =
        BindPlan(std::move(*file_), LiveTargets(std::move(names), std::move(tensors)), now);
    if (!bound.ok()) Raise(Prefixed(absl::StrCat("`", path_, "`: "), bound.status()));
    return c10::make_intrusive<LoadPlanClass>(*std::move(bound));
  }

 private:
  std::string path_;
  std::shared_ptr<PlanFile> file_;
};

}  // namespace loadplan

#endif  // LOADPLAN_OPS_PLAN_FILE_CLASS_H_
