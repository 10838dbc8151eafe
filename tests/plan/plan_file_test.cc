#include "plan/plan_file.h"

#include <functional>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/cases.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "plan/byte_codec.h"
#include "plan/plan_file_geometry.h"
#include "plan/plan_file_sections.h"
#include "tests/plan/random_programs.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/plan_files.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"

namespace loadplan::testing {
namespace {

using ::testing::HasSubstr;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// A plan with something of everything: a direct, a cast, a computed and an unneeded name, two
// that overlap, a constant, live bytes that are read, bytes that nothing writes.
void FillLog(LogBuilder& log) {
  const View a = log.Source("a", {4, 3}, kFloat32);
  const View b = log.Source("größe.b", {6}, kFloat16);
  const View c = log.Source("c", {2, 3}, kFloat32);
  log.Source("unneeded", {5}, kFloat32);
  const View e = log.Source("e", {4});
  const View f = log.Source("f", {4});
  const View p = log.Target("p", {4, 3}, kFloat32);
  log.Alias("p.tied", p);
  log.Copy(p, a.Transpose(0, 1).Transpose(0, 1));
  log.Copy(log.Target("q", {6}, kFloat32), b);
  const View r = log.Target("r", {4, 3}, kFloat32);
  log.Copy(r.Slice(0, 0, 2), log.Node("aten::neg", {c}, {2, 3}));
  log.Copy(r.Slice(0, 2, 3),
           log.Constant(3, {1}, kFloat32).Expand(0, 3).Reshape({1, 3}).With(0, {1, 3}, {4, 0}));
  const View s = log.Target("s", {6});
  log.Copy(s.Slice(0, 0, 4), e);
  log.Copy(s.Slice(0, 2, 6), f);
  log.Copy(log.Target("t", {3}), log.Target("u", {3}));
}

LoadPlan MakePlan(const LogBuilder& log, OverlapPolicy overlaps = OverlapPolicy::kLastWins) {
  absl::StatusOr<LoadPlan> plan = log.Build(overlaps);
  EXPECT_THAT(plan, IsOk());
  return plan.ok() ? *std::move(plan) : LoadPlan();
}

std::vector<std::string> Lines(std::span<const WriteItem> items) {
  std::vector<std::string> lines;
  for (const WriteItem& item : items) lines.push_back(ToString(item));
  return lines;
}

void ExpectSame(const LoadPlan& was, const LoadPlan& now) {
  ASSERT_EQ(now.sources().size(), was.sources().size());
  for (std::size_t n = 0; n < was.sources().size(); ++n) {
    const auto entry = static_cast<std::int32_t>(n);
    EXPECT_EQ(now.sources()[n].name, was.sources()[n].name);
    EXPECT_EQ(now.sources()[n].shape, was.sources()[n].shape);
    EXPECT_EQ(now.sources()[n].dtype.name, was.sources()[n].dtype.name);
    EXPECT_EQ(now.Find(was.sources()[n].name), entry);
    EXPECT_EQ(now.entries()[n].kind, was.entries()[n].kind);
    EXPECT_EQ(now.entries()[n].reason, was.entries()[n].reason);
    EXPECT_EQ(Lines(now.writes_of(entry)), Lines(was.writes_of(entry)));
    EXPECT_EQ(now.Reads(entry), was.Reads(entry));
    EXPECT_EQ(now.GetBoxes(entry), was.GetBoxes(entry));
    EXPECT_EQ(now.GetDest(entry).has_value(), was.GetDest(entry).has_value());
  }
  ASSERT_EQ(now.targets().size(), was.targets().size());
  for (std::size_t t = 0; t < was.targets().size(); ++t) {
    EXPECT_EQ(now.targets()[t].name, was.targets()[t].name);
    EXPECT_EQ(now.targets()[t].storage, was.targets()[t].storage);
    EXPECT_EQ(now.targets()[t].layout, was.targets()[t].layout);
    EXPECT_EQ(now.targets()[t].dtype, was.targets()[t].dtype);
  }
  EXPECT_EQ(Lines(now.constants()), Lines(was.constants()));
  EXPECT_EQ(Lines(now.live_copies()), Lines(was.live_copies()));
  EXPECT_EQ(Lines(now.value_writes()), Lines(was.value_writes()));
  ASSERT_EQ(now.programs().size(), was.programs().size());
  for (std::size_t p = 0; p < was.programs().size(); ++p) {
    EXPECT_EQ(now.programs()[p].node, was.programs()[p].node);
    EXPECT_EQ(now.programs()[p].names, was.programs()[p].names);
    ASSERT_EQ(now.programs()[p].inputs.size(), was.programs()[p].inputs.size());
    for (std::size_t i = 0; i < was.programs()[p].inputs.size(); ++i) {
      EXPECT_EQ(now.programs()[p].inputs[i].layout, was.programs()[p].inputs[i].layout);
      EXPECT_EQ(Lines(now.programs()[p].inputs[i].pieces),
                Lines(was.programs()[p].inputs[i].pieces));
    }
  }
  EXPECT_EQ(now.overlap_policy(), was.overlap_policy());
  EXPECT_EQ(now.Report(), was.Report());
}

TEST(PlanFileTest, GivesBackAPlanWithSomethingOfEverything) {
  LogBuilder log;
  FillLog(log);
  for (const OverlapPolicy policy : {OverlapPolicy::kLastWins, OverlapPolicy::kFallback}) {
    const LoadPlan plan = MakePlan(log, policy);
    const PlanExtras extras = ExtrasFor(plan, log.input().log);
    const absl::StatusOr<std::string> bytes = EncodePlanFile(plan, extras);
    ASSERT_THAT(bytes, IsOk());
    const absl::StatusOr<PlanFile> file = DecodePlanFile(*bytes, KnownDType);
    ASSERT_THAT(file, IsOk());
    ExpectSame(plan, file->plan);
    EXPECT_EQ(file->extras, extras);
    EXPECT_EQ(*EncodePlanFile(file->plan, file->extras), *bytes) << "the same file once more";
  }
}

TEST(PlanFileTest, NamesOfEqualGeometryShareIt) {
  const auto size_of = [](int layers) {
    const BuildInput input = bench::MakeK2({.layers = layers});
    const LoadPlan plan = *BuildLoadPlan(input);
    const std::string bytes = *EncodePlanFile(plan, ExtrasFor(plan, input.log));
    return std::pair(static_cast<double>(bytes.size()),
                     SplitSections(bytes)->at(static_cast<std::size_t>(Section::kGeometry)).size());
  };
  const auto [small, small_geometry] = size_of(2);
  const auto [large, large_geometry] = size_of(6);
  EXPECT_EQ(large_geometry, small_geometry);
  EXPECT_LT(large / small, 5.5);
}

// Fields of a section, replaced. A section is written anew because its numbers have no fixed place.
struct Damage {
  std::string name;
  Section section;
  std::function<void(ByteWriter&)> write;
  std::string words;
};
std::ostream& operator<<(std::ostream& stream, const Damage& damage) {
  return stream << damage.name;
}

// One name `w` of four bytes, copied into target `p`.
std::string SmallFile() {
  LogBuilder log;
  const View w = log.Source("w", {4});
  log.Copy(log.Target("p", {4}), w);
  const LoadPlan plan = MakePlan(log);
  return *EncodePlanFile(plan, ExtrasFor(plan, log.input().log));
}

class DamagedFile : public ::testing::TestWithParam<Damage> {};

TEST_P(DamagedFile, IsRefusedInWords) {
  const std::string file = SmallFile();
  const absl::StatusOr<SectionViews> views = SplitSections(file);
  ASSERT_THAT(views, IsOk());
  SectionBytes sections;
  for (std::size_t s = 0; s < views->size(); ++s) sections[s] = std::string((*views)[s]);
  ASSERT_THAT(DecodePlanFile(JoinSections(sections), KnownDType), IsOk());
  ByteWriter out;
  GetParam().write(out);
  sections[static_cast<std::size_t>(GetParam().section)] = out.Take();
  EXPECT_THAT(DecodePlanFile(JoinSections(sections), KnownDType),
              StatusIs(kInvalid, HasSubstr(GetParam().words)));
}

// Numbers and texts, one after the other.
struct Put {
  ByteWriter& out;
  Put& operator<<(std::int64_t value) {
    out.Signed(value);
    return *this;
  }
  Put& operator<<(const char* text) {
    out.String(text);
    return *this;
  }
  Put& operator<<(std::size_t count) {
    out.Count(count);
    return *this;
  }
};
constexpr std::int64_t operator""_i(unsigned long long value) {
  return static_cast<std::int64_t>(value);
}
constexpr std::size_t operator""_n(unsigned long long value) { return value; }

const std::vector<Damage> kDamages = {
    {"a_text_that_is_no_utf8", Section::kAbout, [](ByteWriter& out) { Put{out} << "\xFF"; },
     "section `about` of the plan file is damaged at byte 2: a text is no UTF-8"},
    {"an_unknown_dtype", Section::kDTypes,
     [](ByteWriter& out) { Put{out} << 1_n << "float3" << 1_n; },
     "this torch has no dtype `float3` of 1 bytes"},
    {"a_dtype_of_another_size", Section::kDTypes,
     [](ByteWriter& out) { Put{out} << 1_n << "uint8" << 2_n; }, "no dtype `uint8` of 2 bytes"},
    {"a_storage_twice", Section::kStorages,
     [](ByteWriter& out) { Put{out} << 2_n << 1_i << 4_i << "cpu" << 1_i << 4_i << "cpu"; },
     "storage 1 is there twice"},
    {"a_target_out_of_its_storage", Section::kTargets,
     [](ByteWriter& out) {
       Put{out} << 1_n << "p" << 1_i << 1_i << 1_n << 4_i << 1_i << 1_i << 0_n;
     },
     "does not lie in 4 bytes"},
    {"a_target_in_no_storage", Section::kTargets,
     [](ByteWriter& out) { Put{out} << 1_n << "p" << 7_i << 0_i << 0_n << 1_i << 0_n; },
     "storage 7 is not among those"},
    {"a_negative_stride", Section::kTargets,
     [](ByteWriter& out) {
       Put{out} << 1_n << "p" << 1_i << 0_i << 1_n << 4_i << -1_i << 1_i << 0_n;
     },
     "stride"},
    {"a_name_twice", Section::kSources,
     [](ByteWriter& out) {
       Put{out} << 2_n << "w" << 1_n << 4_i << 0_n << 0_i << "w" << 1_n << 4_i << 0_n << 0_i;
     },
     "`w` is declared twice"},
    {"a_negative_extent", Section::kSources,
     [](ByteWriter& out) { Put{out} << 1_n << "w" << 1_n << -4_i << 0_n << 0_i; },
     "an extent is -4"},
    {"a_tensor_larger_than_memory", Section::kSources,
     [](ByteWriter& out) {
       Put{out} << 1_n << "w" << 3_n << (1_i << 40) << (1_i << 40) << 0_i << 0_n << 0_i;
     },
     "`w` is larger than any tensor"},
    {"many_dimensions", Section::kSources,
     [](ByteWriter& out) { Put{out} << 1_n << "w" << 65_n << 0_i << 0_i; }, "expected at most 64"},
    {"more_names_than_bytes", Section::kSources, [](ByteWriter& out) { Put{out} << 1000000_n; },
     "1000000 items cannot lie in the 0 bytes that are left"},
    {"a_map_that_writes_a_byte_twice", Section::kGeometry,
     [](ByteWriter& out) {
       Put{out} << 1_n << 2_n << 2_i << 1_i << 1_i << 2_i << 1_i << 1_i << 1_i << 1_i << 0_n;
     },
     "no map from bytes to bytes"},
    {"a_map_between_sizes", Section::kGeometry,
     [](ByteWriter& out) { Put{out} << 1_n << 0_n << 4_i << 2_i << 0_n; },
     "no map from bytes to bytes"},
    {"a_kind_that_is_none", Section::kEntries,
     [](ByteWriter& out) { Put{out} << 1_n << "" << 4_n << 0_n << 1_n; },
     "the kind of a name is 4, expected at most 3"},
    {"a_fallback_that_writes", Section::kEntries,
     [](ByteWriter& out) { Put{out} << 1_n << "" << 2_n << 0_n << 1_n; },
     "`w` is fallback and writes all the same"},
    {"a_write_into_no_storage", Section::kWrites,
     [](ByteWriter& out) { Put{out} << 0_i << 0_n << 0_i << 0_i << 0_n << 0_n << 0_n; },
     "storage 0 is not among those of the targets"},
    {"a_write_out_of_its_storage", Section::kWrites,
     [](ByteWriter& out) { Put{out} << 1_i << 0_n << 1_i << 0_i << 0_n << 0_n << 0_n; },
     "a write reaches out of its storage"},
    {"a_write_before_its_source", Section::kWrites,
     [](ByteWriter& out) { Put{out} << 1_i << 0_n << 0_i << -1_i << 0_n << 0_n << 0_n; },
     "a write reaches out of its storage"},
    {"a_constant_that_is_not_there", Section::kWrites,
     [](ByteWriter& out) {
       Put{out} << 1_i << 0_n << 0_i << 0_i << 1_n << 1_n << 9_i << 0_i << 1_i << 0_n << 0_i << 0_i;
     },
     "bytes come from constant 9"},
    {"an_operator_that_lacks_a_name", Section::kPrograms,
     [](ByteWriter& out) {
       Put{out} << 1_n << 0_i << "aten::neg" << 0_n << 1_n << 0_i << 1_n << 4_i << 1_i << 1_i << 0_n
                << 1_n << 0_n << 0_i << 0_i << 0_n << 0_i << 0_i << 0_n << "";
     },
     "`aten::neg` lacks a name it needs"},
    {"an_overlap_of_a_name_that_is_not_there", Section::kFindings,
     [](ByteWriter& out) { Put{out} << 1_n << 0_i << 1_i << 1_i << 1_i; }, "name 1 of 1"},
};

INSTANTIATE_TEST_SUITE_P(, DamagedFile, ::testing::ValuesIn(kDamages),
                         [](const auto& param_info) { return param_info.param.name; });

TEST(PlanFileTest, SaysWhatKindOfFileItIsNot) {
  const std::string file = SmallFile();
  const auto refused = [](const std::string& bytes, const std::string& words) {
    EXPECT_THAT(DecodePlanFile(bytes, KnownDType), StatusIs(kInvalid, HasSubstr(words)));
  };
  refused("", "this is no plan file");
  refused("PK\x03\x04 a zip archive", "this is no plan file");
  refused(file.substr(0, 12), "it ends inside its header");
  refused(file.substr(0, file.size() - 1), "it was written with");
  refused(file + "x", "it was written with");
  std::string newer = file;
  newer[8] = 2;
  refused(newer, "format version 2, and this library reads version 1");
}

TEST(PlanFileTest, ShowsEveryByteThatChanged) {
  const std::string file = SmallFile();
  for (std::size_t at = 0; at < file.size(); ++at) {
    std::string changed = file;
    changed[at] = static_cast<char>(changed[at] ^ 0x10);
    EXPECT_FALSE(DecodePlanFile(changed, KnownDType).ok()) << "byte " << at;
  }
}

TEST(PlanFileTest, RefusesExtrasThatDoNotFitThePlan) {
  LogBuilder log;
  FillLog(log);
  const LoadPlan plan = MakePlan(log);
  PlanExtras extras = ExtrasFor(plan, log.input().log);
  extras.programs.clear();
  EXPECT_THAT(EncodePlanFile(plan, extras), StatusIs(kInvalid, HasSubstr("0 operators")));
}

TEST(PlanFilePropertyTest, AFileOfARandomPlanIsThatPlan) {
  ForEachRandom(500, [&](std::mt19937& generator) {
    const RandomProgram program = MakeRandomProgram(generator);
    const absl::StatusOr<LoadPlan> plan = BuildLoadPlan(program.input);
    if (!plan.ok()) return;
    const absl::StatusOr<PlanFile> file = SavedAndRead(*plan, program.input.log);
    ASSERT_THAT(file, IsOk());
    ExpectSame(*plan, file->plan);
  });
}

}  // namespace
}  // namespace loadplan::testing
