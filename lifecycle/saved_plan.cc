#include "lifecycle/saved_plan.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <span>
#include <system_error>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "backend/convert.h"
#include "backend/operator_codec.h"
#include "lifecycle/annotate.h"

namespace loadplan {
namespace {

absl::Status CheckExternals(const TracedPlan& traced) {
  if (traced.externals.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the plan cannot be saved: its loader read ", traced.externals.front().what,
      traced.externals.size() == 1 ? ""
                                   : absl::StrCat(" and ", traced.externals.size() - 1, " more"),
      " that is no target, and another process has no name by which to find it and see that it is "
      "the same; make it a buffer of the model, or plan again in each process"));
}

absl::Status CheckMirrors(const TargetSet& targets) {
  const auto mirror = std::ranges::find(targets.targets(), true, &LiveTarget::is_mirror);
  if (mirror == targets.targets().end()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the plan cannot be saved: its loader writes `", mirror->name,
      "`, which is no target, and another process has no name by which to find it; make it a "
      "buffer of the model, or plan again in each process"));
}

absl::StatusOr<PlanExtras> ExtrasOf(const BoundPlan& bound, PlanFileInfo info) {
  const TracedPlan& traced = *bound.traced;
  PlanExtras extras;
  extras.info = std::move(info);
  extras.premise_digests = bound.premises.digests();
  for (std::size_t s = 0; s < bound.targets->storages().size(); ++s) {
    const at::Tensor& tensor = bound.targets->storages()[s];
    extras.storages.push_back({static_cast<StorageId>(s),
                               static_cast<Index>(tensor.storage().nbytes()),
                               tensor.device().str()});
  }
  // In order, so that equal plans are equal files.
  std::set<std::int32_t> constants;
  for (const auto& [index, tensor] : traced.constants) constants.insert(index);
  for (const std::int32_t index : constants) {
    const at::Tensor& tensor = traced.constants.at(index);
    absl::StatusOr<std::string> blob = EncodeTensor(tensor);
    if (!blob.ok()) return blob.status();
    extras.constants.push_back({index, NbytesOf(MetaOf(tensor)), *std::move(blob)});
  }
  for (const Program& program : traced.plan.programs()) {
    const auto node = traced.nodes.find(program.node);
    if (node == traced.nodes.end()) {
      return absl::InternalError(absl::StrCat("the plan lost `", program.op, "`"));
    }
    absl::StatusOr<std::string> blob = EncodeOperator(*node->second);
    if (!blob.ok()) return blob.status();
    SavedProgram& saved = extras.programs.emplace_back();
    saved.blob = *std::move(blob);
    for (const ResultMeta& meta : node->second->results) {
      saved.result_nbytes.push_back(NbytesOf(meta));
    }
  }
  return extras;
}

absl::Status WriteWhole(const std::string& path, const std::string& bytes) {
  const std::string beside = absl::StrCat(path, ".", getpid(), ".part");
  const auto failed = [&] {
    const std::string why = std::strerror(errno);
    std::remove(beside.c_str());
    return absl::UnavailableError(
        absl::StrCat("`", path, "` cannot be written: ", why, "; nothing was saved"));
  };
  errno = 0;
  std::ofstream file(beside, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file || std::rename(beside.c_str(), path.c_str()) != 0) return failed();
  return absl::OkStatus();
}

absl::Status Differs(const std::string& name, std::string_view what, const std::string& saved,
                     const std::string& now) {
  return absl::FailedPreconditionError(absl::StrCat("target `", name, "`: the plan was made for ",
                                                    std::string(what), " ", saved,
                                                    ", and the model has ", now, "; plan again"));
}

std::string Text(std::span<const Index> values) {
  return absl::StrCat("[", absl::StrJoin(values, ", "), "]");
}

std::string InElements(const DimVector& byte_strides, Index itemsize) {
  DimVector strides = byte_strides;
  for (Index& stride : strides) stride /= itemsize;
  return Text(strides);
}

// The name of a target that shares a storage with target `t` and comes before it; "".
std::string SharedWith(const std::vector<TargetTensor>& targets, std::size_t t) {
  for (std::size_t other = 0; other < t; ++other) {
    if (targets[other].storage == targets[t].storage) return targets[other].name;
  }
  return "";
}

std::string SharingText(const std::string& other) {
  return other.empty() ? "of its own" : absl::StrCat("shared with `", other, "`");
}

std::string TypeOf(const std::string& device) { return device.substr(0, device.find(':')); }

absl::Status CompareTarget(const PlanFile& file, const TargetSet& live, std::size_t t) {
  const TargetTensor& was = file.plan.targets()[t];
  const TargetTensor& now = live.target_tensors()[t];
  if (was.dtype != now.dtype) {
    return Differs(was.name, "dtype", std::string(was.dtype.name), std::string(now.dtype.name));
  }
  if (was.layout.shape() != now.layout.shape()) {
    return Differs(was.name, "shape", Text(was.layout.shape()), Text(now.layout.shape()));
  }
  if (was.layout.byte_strides() != now.layout.byte_strides()) {
    return Differs(was.name, "strides", InElements(was.layout.byte_strides(), was.dtype.itemsize),
                   InElements(now.layout.byte_strides(), now.dtype.itemsize));
  }
  if (was.storage != now.storage) {
    return Differs(was.name, "a storage", SharingText(SharedWith(file.plan.targets(), t)),
                   absl::StrCat("one ", SharingText(SharedWith(live.target_tensors(), t))));
  }
  if (was.layout.byte_offset() != now.layout.byte_offset()) {
    return Differs(was.name, "a storage offset of",
                   absl::StrCat(was.layout.byte_offset(), " bytes"),
                   absl::StrCat(now.layout.byte_offset()));
  }
  const SavedStorage& storage = file.extras.storages[static_cast<std::size_t>(was.storage)];
  const at::Tensor& tensor = live.storages()[static_cast<std::size_t>(now.storage)];
  if (TypeOf(storage.device) != TypeOf(tensor.device().str())) {
    return Differs(was.name, "device", storage.device, tensor.device().str());
  }
  if (storage.nbytes != static_cast<Index>(tensor.storage().nbytes())) {
    return Differs(was.name, "a storage of", absl::StrCat(storage.nbytes, " bytes"),
                   absl::StrCat(tensor.storage().nbytes()));
  }
  return absl::OkStatus();
}

bool Converts(const LoadPlan& plan) {
  const auto casts = [](const WriteItem& item) { return !item.casts.empty(); };
  return !plan.programs().empty() || std::ranges::any_of(plan.writes(), casts) ||
         std::ranges::any_of(plan.constants(), casts) ||
         std::ranges::any_of(plan.live_copies(), casts);
}

absl::Status CompareInfo(const PlanFile& file, const PlanFileInfo& now) {
  const PlanFileInfo& was = file.extras.info;
  const auto differs = [](const std::string& text) { return absl::FailedPreconditionError(text); };
  if (was.library_version != now.library_version) {
    return differs(absl::StrCat("the plan was saved by loadplan ", was.library_version,
                                ", and this is loadplan ", now.library_version, "; plan again"));
  }
  if (!file.plan.programs().empty() && was.torch_version != now.torch_version) {
    return differs(absl::StrCat("the plan runs ", file.plan.programs().size(),
                                " operators again, as torch ", was.torch_version,
                                " ran them, and this is torch ", now.torch_version,
                                ", which may give other bits; plan again"));
  }
  if (Converts(file.plan) && was.processor != now.processor) {
    return differs(absl::StrCat(
        "the plan converts or computes values, as torch does with the vector instructions ",
        was.processor, ", and here it has ", now.processor,
        ", which may leave other bits; plan again"));
  }
  if (was.tag != now.tag) {
    return differs(absl::StrCat("the plan was saved with the tag `", was.tag,
                                "`, and is loaded with `", now.tag,
                                "`; load the file of this rank and configuration, or plan again"));
  }
  return absl::OkStatus();
}

// Storages of targets are numbered as a TargetSet does.
absl::Status CheckStorages(const PlanFile& file) {
  for (std::size_t s = 0; s < file.extras.storages.size(); ++s) {
    if (file.extras.storages[s].id != static_cast<StorageId>(s)) {
      return absl::InvalidArgumentError("the storages of the plan file are not in order");
    }
  }
  return absl::OkStatus();
}

// The live tensors in the order of the plan, since storages are numbered in that order.
absl::StatusOr<std::shared_ptr<const TargetSet>> MatchTargets(const PlanFile& file,
                                                              std::vector<LiveTarget> live) {
  absl::flat_hash_map<std::string, at::Tensor> by_name;
  for (const LiveTarget& target : live) by_name.emplace(target.name, target.tensor);
  std::vector<LiveTarget> ordered;
  for (const TargetTensor& target : file.plan.targets()) {
    const auto found = by_name.find(target.name);
    if (found == by_name.end()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "target `", target.name, "` is planned, and the model has no such target; plan again"));
    }
    ordered.push_back({target.name, found->second});
    by_name.erase(found);
  }
  for (const LiveTarget& target : live) {
    if (by_name.contains(target.name)) {
      return absl::FailedPreconditionError(
          absl::StrCat("the model has target `", target.name,
                       "`, which the plan does not know; leave it out or plan again"));
    }
  }
  absl::StatusOr<TargetSet> set = TargetSet::Create(std::move(ordered));
  if (!set.ok()) return set.status();
  for (std::size_t t = 0; t < file.plan.targets().size(); ++t) {
    if (absl::Status status = CompareTarget(file, *set, t); !status.ok()) return status;
  }
  return std::make_shared<const TargetSet>(*std::move(set));
}

absl::Status CheckOperator(const Program& program, const SavedProgram& saved,
                           const OperatorNode& node) {
  const auto contradicts = [&](std::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat("the plan file is damaged: ", std::string(what), " of `", program.op,
                     "` contradict its operator; save the plan again"));
  };
  if (program.op != c10::toString(node.op.operator_name())) return contradicts("the words");
  if (node.num_inputs != static_cast<int64_t>(program.inputs.size())) {
    return contradicts("the inputs");
  }
  std::size_t next = 0;
  for (const ArgumentSlot& slot : node.slots) {
    if (slot.is_output) continue;
    const ProgramInput& input = program.inputs[next++];
    if (input.dtype != ToDType(slot.meta.dtype) ||
        input.layout.shape() != ToDimVector(slot.meta.sizes)) {
      return contradicts("the inputs");
    }
    for (const Index stride : input.layout.byte_strides()) {
      if (stride % input.dtype.itemsize != 0) return contradicts("the inputs");
    }
  }
  if (saved.result_nbytes.size() != node.results.size()) return contradicts("the results");
  for (std::size_t k = 0; k < node.results.size(); ++k) {
    if (saved.result_nbytes[k] != NbytesOf(node.results[k])) return contradicts("the results");
  }
  return absl::OkStatus();
}

absl::Status DecodeBlobs(const PlanExtras& extras, at::Device device, TracedPlan& traced) {
  for (const SavedConstant& constant : extras.constants) {
    absl::StatusOr<at::Tensor> tensor = DecodeTensor(constant.blob, device);
    if (!tensor.ok()) return tensor.status();
    if (!tensor->defined() || NbytesOf(MetaOf(*tensor)) != constant.nbytes) {
      return absl::InvalidArgumentError("a captured tensor is not as large as the plan file says");
    }
    traced.constants.emplace(constant.index, *std::move(tensor));
  }
  for (std::size_t p = 0; p < extras.programs.size(); ++p) {
    auto node = DecodeOperator(extras.programs[p].blob, device);
    if (!node.ok()) return node.status();
    absl::Status status = CheckOperator(traced.plan.programs()[p], extras.programs[p], **node);
    if (!status.ok()) return status;
    traced.nodes.emplace(traced.plan.programs()[p].node, *std::move(node));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> EncodeBoundPlan(const BoundPlan& bound, PlanFileInfo info) {
  if (absl::Status status = CheckExternals(*bound.traced); !status.ok()) return status;
  if (absl::Status status = CheckMirrors(*bound.targets); !status.ok()) return status;
  absl::StatusOr<PlanExtras> extras = ExtrasOf(bound, std::move(info));
  if (!extras.ok()) return Prefixed("the plan cannot be saved: ", extras.status());
  absl::StatusOr<std::string> bytes = EncodePlanFile(bound.plan(), *extras);
  if (!bytes.ok()) return bytes.status();
  const absl::StatusOr<PlanFile> again = DecodePlanFile(*bytes, DTypeByName);
  if (!again.ok()) return Prefixed("the plan cannot be saved: ", again.status());
  return bytes;
}

absl::Status SavePlan(const BoundPlan& bound, PlanFileInfo info, const std::string& path) {
  const absl::StatusOr<std::string> bytes = EncodeBoundPlan(bound, std::move(info));
  return bytes.ok() ? WriteWhole(path, *bytes) : bytes.status();
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  std::ifstream file(path, std::ios::binary);
  if (error || !file) {
    return absl::NotFoundError(absl::StrCat(
        "`", path, "` cannot be read: ", error ? error.message() : std::strerror(errno)));
  }
  std::string bytes(size, '\0');
  file.read(bytes.data(), static_cast<std::streamsize>(size));
  bytes.resize(static_cast<std::size_t>(file.gcount()));
  return bytes;
}

absl::StatusOr<PlanFile> ReadPlanFile(const std::string& path) {
  const absl::StatusOr<std::string> bytes = ReadFile(path);
  if (!bytes.ok()) return bytes.status();
  absl::StatusOr<PlanFile> file = DecodePlanFile(*bytes, DTypeByName);
  const absl::Status status = file.ok() ? CheckStorages(*file) : file.status();
  if (!status.ok()) return Prefixed(absl::StrCat("`", path, "`: "), status);
  return file;
}

absl::StatusOr<std::shared_ptr<const BoundPlan>> BindPlan(PlanFile file,
                                                          std::vector<LiveTarget> live,
                                                          const PlanFileInfo& info) {
  if (absl::Status status = CheckStorages(file); !status.ok()) return status;
  if (absl::Status status = CompareInfo(file, info); !status.ok()) return status;
  absl::StatusOr<std::shared_ptr<const TargetSet>> targets = MatchTargets(file, std::move(live));
  if (!targets.ok()) return targets.status();
  const auto& storages = (*targets)->storages();
  auto traced = std::make_shared<TracedPlan>();
  traced->plan = std::move(file.plan);
  absl::Status status = DecodeBlobs(
      file.extras, storages.empty() ? at::Device(at::kCPU) : storages.front().device(), *traced);
  if (!status.ok()) return status;
  return std::make_shared<const BoundPlan>(std::move(traced), *std::move(targets),
                                           Premises(std::move(file.extras.premise_digests)));
}

}  // namespace loadplan
