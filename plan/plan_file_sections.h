// The frame of a plan file: named sections with lengths and checksums. See Note [Plan files] in
// plan/plan_file.h.
#ifndef LOADPLAN_PLAN_PLAN_FILE_SECTIONS_H_
#define LOADPLAN_PLAN_PLAN_FILE_SECTIONS_H_

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace loadplan {

enum class Section : std::size_t {
  kAbout,      // versions, tag, placement, seconds, overlap policy
  kDTypes,     // the dtypes that the other sections name by number
  kStorages,   // of the targets
  kTargets,    // names, storages, layouts
  kSources,    // names, shapes, dtypes
  kConstants,  // captured tensors
  kGeometry,   // shapes, strides and casts, each once
  kEntries,    // kinds, reasons, numbers of writes
  kPrograms,   // operators, their inputs
  kWrites,     // of names, constants, live bytes, results
  kFindings,   // overlaps, uncovered targets, premises
};
inline constexpr std::array<std::string_view, 11> kSectionNames = {
    "about",    "dtypes",  "storages", "targets", "sources", "constants",
    "geometry", "entries", "programs", "writes",  "findings"};

// Contents by section.
using SectionBytes = std::array<std::string, kSectionNames.size()>;
using SectionViews = std::array<std::string_view, kSectionNames.size()>;

// The bytes of a file.
std::string JoinSections(const SectionBytes& sections);

// InvalidArgument: another kind of file, another format version, cut off, a checksum that is
// wrong, a section that is missing or unknown. The views are into `bytes`.
absl::StatusOr<SectionViews> SplitSections(std::string_view bytes);

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_PLAN_FILE_SECTIONS_H_
