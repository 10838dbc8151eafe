#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "plan/landings.h"
#include "plan/plan_file.h"
#include "plan/plan_file_sections.h"
#include "tests/fuzz/fuzz_targets.h"
#include "tests/testing/plan_files.h"

namespace loadplan::testing {
namespace {

std::uint64_t NumberAt(std::string_view bytes, std::size_t at) {
  std::uint64_t value = 0;
  if (at + 8 <= bytes.size()) std::memcpy(&value, bytes.data() + at, 8);
  return value;
}

// The sections that the header announces, as far as there are bytes, in a sound frame.
std::string SetRight(std::string_view bytes) {
  constexpr std::size_t kFirstRow = 24;
  constexpr std::size_t kRow = 36;
  constexpr std::size_t kSizeInRow = 20;
  SectionBytes sections;
  std::size_t at = kFirstRow + sections.size() * kRow + 8;
  if (at > bytes.size()) return "";
  for (std::size_t s = 0; s < sections.size(); ++s) {
    const std::uint64_t size = NumberAt(bytes, kFirstRow + s * kRow + kSizeInRow);
    const std::size_t taken = std::min<std::uint64_t>(size, bytes.size() - at);
    sections[s] = std::string(bytes.substr(at, taken));
    at += taken;
  }
  return JoinSections(sections);
}

void Use(const PlanFile& file) {
  const LoadPlan& plan = file.plan;
  for (std::size_t n = 0; n < plan.entries().size(); ++n) {
    const auto entry = static_cast<std::int32_t>(n);
    plan.Reads(entry);
    plan.GetBoxes(entry);
    plan.GetDest(entry);
  }
  plan.Report();
  LandingsOf(plan);
  const absl::StatusOr<std::string> again = EncodePlanFile(plan, file.extras);
  if (!again.ok() || !DecodePlanFile(*again, KnownDType).ok()) std::abort();
}

}  // namespace

void FuzzPlanFile(std::string_view bytes) {
  for (const bool is_whole : {true, false}) {
    const std::string set_right = is_whole ? "" : SetRight(bytes);
    const auto file = DecodePlanFile(is_whole ? bytes : std::string_view(set_right), KnownDType);
    if (file.ok()) Use(*file);
  }
}

}  // namespace loadplan::testing
