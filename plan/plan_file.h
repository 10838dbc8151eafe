// Plan files: a LoadPlan and what it was made for, as bytes.
//
// Note [Plan files]
//
//   magic `LOADPLAN`, format version, number of sections, size of the file, checksum of the header
//   per section: name, offset, size, checksum
//   sections, one after the other
//
// A file is read by index arithmetic alone: nothing in it is executed, and nothing in it is
// believed. Every count is bounded by the bytes that are there, every index by its table, every
// layout by its storage, so that a plan that was read can be asked and executed like one that was
// built: a damaged file is an error, a forged one can say which bytes go where in the targets
// and no more. Operators and tensors are blobs here; `backend/` reads them with the same care.
//
// Names with equal geometry share one row of a table; a write is then a few small numbers.
#ifndef LOADPLAN_PLAN_PLAN_FILE_H_
#define LOADPLAN_PLAN_PLAN_FILE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "geometry/export.h"
#include "plan/load_plan.h"

namespace loadplan {

inline constexpr std::uint32_t kPlanFormatVersion = 1;

// What a plan was made with, in words that people compare.
struct PlanFileInfo {
  std::string library_version;
  std::string torch_version;
  std::string processor;  // its vector instructions, as torch calls them: `AVX2`
  std::string tag;        // of the caller: a rank, a configuration
  std::string placement;  // the token of the placement hook, as the host language writes it
  std::vector<std::string> rebound;  // attributes that the loader set while it was traced
  double plan_seconds = 0;           // of the caller, passes included

  friend bool operator==(const PlanFileInfo&, const PlanFileInfo&) = default;
};

// A storage that the targets lie in.
struct SavedStorage {
  StorageId id = -1;
  Index nbytes = 0;
  std::string device;  // `cpu`, `cuda:0`

  friend bool operator==(const SavedStorage&, const SavedStorage&) = default;
};

// A captured tensor. The plan reads at most `nbytes` bytes of it.
struct SavedConstant {
  std::int32_t index = -1;  // Origin::index
  Index nbytes = 0;
  std::string blob;

  friend bool operator==(const SavedConstant&, const SavedConstant&) = default;
};

// The operator of a program. The plan reads at most `result_nbytes[k]` bytes of result k.
struct SavedProgram {
  std::vector<Index> result_nbytes;
  std::string blob;

  friend bool operator==(const SavedProgram&, const SavedProgram&) = default;
};

// What a file holds beside the plan.
struct PlanExtras {
  PlanFileInfo info;
  std::vector<SavedStorage> storages;
  std::vector<std::uint64_t> premise_digests;  // parallel to LoadPlan::premises()
  std::vector<SavedConstant> constants;
  std::vector<SavedProgram> programs;  // parallel to LoadPlan::programs()

  friend bool operator==(const PlanExtras&, const PlanExtras&) = default;
};

struct PlanFile {
  LoadPlan plan;
  PlanExtras extras;
};

// A dtype by its name; nullopt where there is none.
using DTypeLookup = std::function<std::optional<DType>(std::string_view)>;

// The bytes of a plan file. InvalidArgument where `extras` does not fit the plan: a storage, a
// constant or a program that the plan uses is missing, or more than 64 dimensions.
LOADPLAN_API absl::StatusOr<std::string> EncodePlanFile(const LoadPlan& plan,
                                                        const PlanExtras& extras);

// The plan again. InvalidArgument with what is wrong and where: no plan file, another format
// version, cut off, changed, or a number that contradicts another one.
LOADPLAN_API absl::StatusOr<PlanFile> DecodePlanFile(std::string_view bytes,
                                                     const DTypeLookup& dtype_of);

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_PLAN_FILE_H_
