// LoadPlanClass: a plan as host processes see it.
#ifndef LOADPLAN_OPS_PLAN_CLASS_H_
#define LOADPLAN_OPS_PLAN_CLASS_H_

#include <ATen/Version.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/convert.h"
#include "lifecycle/reload_session.h"
#include "lifecycle/saved_plan.h"
#include "loadplan_built_for.h"
#include "ops/arguments.h"
#include "ops/encode.h"

namespace loadplan {

class LoadPlanClass : public torch::CustomClassHolder {
 public:
  explicit LoadPlanClass(std::shared_ptr<const BoundPlan> bound)
      : LoadPlanClass(std::shared_ptr<const LoadPlan>(bound, &bound->plan())) {
    bound_ = std::move(bound);
  }
  // Out of a file, without live tensors: can be asked, not used.
  explicit LoadPlanClass(std::shared_ptr<const LoadPlan> plan) : plan_(std::move(plan)) {
    for (const TargetTensor& target : plan_->targets()) {
      const auto storage = static_cast<std::size_t>(target.storage);
      if (storage_names_.size() <= storage) storage_names_.resize(storage + 1);
      if (storage_names_[storage].empty()) storage_names_[storage] = target.name;
    }
  }

  const std::shared_ptr<const BoundPlan>& bound() const {
    TORCH_CHECK(bound_ != nullptr, "this plan was opened without a model; use `load_plan`");
    return bound_;
  }
  const LoadPlan& plan() const { return *plan_; }

  void save(const std::string& path, const Strings& about, Strings rebound, double seconds) const {
    Raise(SavePlan(*bound(),
                   {kVersion, about.at(0), at::get_cpu_capability(), about.at(1), about.at(2),
                    std::move(rebound), seconds},
                   path));
  }
  // Shapes one after the other, ranks, dtypes; parallel to names().
  std::tuple<Ints, Ints, Ints> metas() const {
    std::tuple<Ints, Ints, Ints> result;
    for (const SourceTensor& source : plan().sources()) {
      std::get<0>(result).insert(std::get<0>(result).end(), source.shape.begin(),
                                 source.shape.end());
      std::get<1>(result).push_back(static_cast<int64_t>(source.shape.size()));
      std::get<2>(result).push_back(source.dtype.code);
    }
    return result;
  }
  // The first name of the storage of each target; per target its dtype, byte offset, itemsize,
  // rank, shape and byte strides.
  std::tuple<Strings, Strings, Ints> targets() const {
    std::tuple<Strings, Strings, Ints> result;
    for (const TargetTensor& target : plan().targets()) {
      std::get<0>(result).push_back(target.name);
      std::get<1>(result).push_back(storage_names_[static_cast<std::size_t>(target.storage)]);
      const StridedLayout& layout = target.layout;
      Ints& numbers = std::get<2>(result);
      for (const int64_t number : {int64_t{target.dtype.code}, layout.byte_offset(),
                                   layout.itemsize(), static_cast<int64_t>(layout.shape().size())})
        numbers.push_back(number);
      numbers.insert(numbers.end(), layout.shape().begin(), layout.shape().end());
      numbers.insert(numbers.end(), layout.byte_strides().begin(), layout.byte_strides().end());
    }
    return result;
  }

  Strings names() const {
    Strings names;
    names.reserve(plan().sources().size());
    for (const SourceTensor& source : plan().sources()) names.push_back(source.name);
    return names;
  }
  Ints kinds() const {
    Ints kinds;
    kinds.reserve(plan().entries().size());
    for (const PlanEntry& entry : plan().entries())
      kinds.push_back(static_cast<int64_t>(entry.kind));
    return kinds;
  }
  // reason, nbytes, reads, writes (numbers, targets), names that its programs need.
  std::tuple<std::string, int64_t, Ints, Ints, Strings, Ints> entry(int64_t index) const {
    const std::int32_t entry = Checked(index);
    EncodedWrites writes = EncodeWrites(plan().writes_of(entry), storage_names_);
    return {plan().entries()[static_cast<std::size_t>(entry)].reason,
            plan().ReadNbytes(entry),
            EncodeBoxes(plan().Reads(entry)),
            std::move(writes.numbers),
            std::move(writes.targets),
            InputNames(plan(), entry)};
  }
  // Of all entries: reasons; per entry nbytes, the number of boxes that are read, these as
  // EncodeBoxes does, the number of names that its programs need, and these.
  std::tuple<Strings, Ints> entries() const {
    std::tuple<Strings, Ints> result;
    auto& [reasons, numbers] = result;
    const auto append = [&numbers = numbers](std::size_t count, const Ints& items) {
      numbers.push_back(static_cast<int64_t>(count));
      numbers.insert(numbers.end(), items.begin(), items.end());
    };
    const std::vector<Ints> inputs = InputNames(plan());
    for (std::size_t i = 0; i < plan().entries().size(); ++i) {
      reasons.push_back(plan().entries()[i].reason);
      const auto entry = static_cast<std::int32_t>(i);
      numbers.push_back(plan().ReadNbytes(entry));
      const auto reads = plan().Reads(entry);
      append(reads.size(), EncodeBoxes(reads));
      append(inputs[i].size(), inputs[i]);
    }
    return result;
  }
  Ints entry_digests() const { return EntryDigests(plan(), storage_names_); }
  std::optional<Ints> boxes(int64_t index) const {
    const auto boxes = plan().GetBoxes(Checked(index));
    if (!boxes.has_value()) return std::nullopt;
    return EncodeBoxes(*boxes);
  }
  std::optional<std::tuple<Ints, Tensors>> dest(int64_t index) const {
    const std::int32_t entry = Checked(index);
    const auto dests = plan().GetDest(entry);
    if (!dests.has_value()) return std::nullopt;
    const DType dtype = plan().sources()[static_cast<std::size_t>(entry)].dtype;
    std::vector<Box> boxes;
    Tensors tensors;
    for (const LoadPlan::Dest& dest : *dests) {
      // Without memory outside an update: only load_planned knows where the bytes go.
      const at::Tensor& storage =
          bound()->targets->storages()[static_cast<std::size_t>(dest.storage)];
      if (storage.is_meta()) return std::nullopt;
      boxes.push_back(dest.box);
      tensors.push_back(bound()->targets->View(dest.storage, dest.region, ToScalarType(dtype)));
    }
    if (!tensors.empty()) bound()->handed_out.Add(entry);
    return std::make_tuple(EncodeBoxes(boxes), std::move(tensors));
  }
  std::tuple<Strings, Ints, Ints> uncovered() const {
    std::tuple<Strings, Ints, Ints> result;
    for (const UncoveredTarget& item : plan().uncovered()) {
      if (item.nbytes == 0) continue;
      std::get<0>(result).push_back(plan().targets()[static_cast<std::size_t>(item.target)].name);
      std::get<1>(result).push_back(item.nbytes);
      std::get<2>(result).push_back(item.total_nbytes);
    }
    return result;
  }
  // Names, and all bytes of each.
  std::tuple<Strings, Tensors> mirrors() const {
    std::tuple<Strings, Tensors> result;
    if (bound_ == nullptr) return result;  // a saved plan has none
    for (const LiveTarget& target : bound_->targets->targets()) {
      if (!target.is_mirror) continue;
      std::get<0>(result).push_back(target.name);
      std::get<1>(result).push_back(target.tensor);
    }
    return result;
  }
  // (first, second, bytes) per pair, and the target.
  std::tuple<Ints, Strings> overlaps() const {
    std::tuple<Ints, Strings> result;
    for (const NameOverlap& overlap : plan().overlaps()) {
      for (const int64_t value :
           {int64_t{overlap.first}, int64_t{overlap.second}, overlap.nbytes}) {
        std::get<0>(result).push_back(value);
      }
      std::get<1>(result).push_back(storage_names_[static_cast<std::size_t>(overlap.storage)]);
    }
    return result;
  }
  // Every write as EncodeLandings says it; per program its operator, and the number of names
  // behind it and these.
  std::tuple<Ints, Strings, Ints> landings() const {
    Strings operators;
    Ints names;
    for (const Program& program : plan().programs()) {
      operators.push_back(program.op);
      names.push_back(static_cast<int64_t>(program.names.size()));
      names.insert(names.end(), program.names.begin(), program.names.end());
    }
    return {EncodeLandings(LandingsOf(plan())), std::move(operators), std::move(names)};
  }
  std::string report() const { return plan().Report(); }
  int64_t num_fallbacks() const {
    return std::ranges::count(plan().entries(), EntryKind::kFallback, &PlanEntry::kind);
  }

 private:
  std::int32_t Checked(int64_t index) const {
    TORCH_CHECK_INDEX(index >= 0 && index < static_cast<int64_t>(plan().entries().size()),
                      "entry ", index, " of a plan with ", plan().entries().size());
    return static_cast<std::int32_t>(index);
  }

  std::shared_ptr<const BoundPlan> bound_;  // null where the plan has no live tensors
  std::shared_ptr<const LoadPlan> plan_;
  Strings storage_names_;
};

}  // namespace loadplan

#endif  // LOADPLAN_OPS_PLAN_CLASS_H_
