// What a finished plan answers: boxes, destinations, names.
#include "plan/load_plan.h"

#include <functional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/cases.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/plan/builder_cases.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/status_matchers.h"

namespace loadplan::testing {
namespace {

std::string BoxesText(const std::optional<std::vector<Box>>& boxes) {
  if (!boxes) return "none";
  std::string text;
  for (const Box& box : *boxes) absl::StrAppend(&text, text.empty() ? "" : " ", ToString(box));
  return text;
}

std::string DestText(const LoadPlan& plan) {
  const std::optional<std::vector<LoadPlan::Dest>> dests = plan.GetDest(0);
  if (!dests) return "none";
  std::string text;
  for (const LoadPlan::Dest& dest : *dests) {
    absl::StrAppend(&text, text.empty() ? "" : "; ", ToString(dest.box), " -> ",
                    NameOf(plan, dest.storage), ": ", ToString(dest.region));
  }
  return text;
}

// What the plan says of its first name.
struct AnswerCase {
  std::string name;
  std::function<void(LogBuilder&)> records;
  std::string reads;
  Index read_nbytes;
  std::string boxes;  // GetBoxes
  std::string dest;   // GetDest
};

std::ostream& operator<<(std::ostream& stream, const AnswerCase& c) { return stream << c.name; }

class AnswerTest : public ::testing::TestWithParam<AnswerCase> {};

TEST_P(AnswerTest, SaysWhatIsReadAndWhereItGoes) {
  LogBuilder log;
  GetParam().records(log);
  const absl::StatusOr<LoadPlan> plan = log.Build();
  ASSERT_THAT(plan, IsOk());
  EXPECT_EQ(BoxesText(plan->Reads(0)), GetParam().reads);
  EXPECT_EQ(plan->ReadNbytes(0), GetParam().read_nbytes);
  EXPECT_EQ(BoxesText(plan->GetBoxes(0)), GetParam().boxes);
  EXPECT_EQ(DestText(*plan), GetParam().dest);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, AnswerTest,
    ::testing::ValuesIn(std::vector<AnswerCase>{
        {"RowShard",
         [](LogBuilder& log) {
           log.Copy(log.Target("p", {2, 3}, kFloat32),
                    log.Source("w", {4, 3}, kFloat32).Slice(0, 2, 4));
         },
         "[2:4, 0:3]", 24, "[2:4, 0:3]", "[2:4, 0:3] -> p: 0 + (6):(4) x 4"},
        {"ColumnShard",
         [](LogBuilder& log) {
           log.Copy(log.Target("p", {4, 2}, kBFloat16),
                    log.Source("w", {4, 8}, kBFloat16).Slice(1, 2, 4));
         },
         "[0:4, 2:4]", 16, "[0:4, 2:4]", "[0:4, 2:4] -> p: 0 + (4, 2):(4, 2) x 2"},
        {"Transpose",
         [](LogBuilder& log) {
           log.Copy(log.Target("p", {3, 2}), log.Source("w", {2, 3}).Transpose(0, 1));
         },
         "[0:2, 0:3]", 6, "[0:2, 0:3]", "[0:2, 0:3] -> p: 0 + (2, 3):(1, 2) x 1"},
        {"TwoPlaces",
         [](LogBuilder& log) {
           const View w = log.Source("w", {4});
           log.Copy(log.Target("p", {2}), w.Slice(0, 0, 2));
           log.Copy(log.Target("q", {3}), w.Slice(0, 1, 4));
         },
         "[0:4]", 4, "[0:2] [1:4]", "[0:2] -> p: 0 + (2):(1) x 1; [1:4] -> q: 0 + (3):(1) x 1"},
        {"OneBoxTwice",
         [](LogBuilder& log) {
           const View w = log.Source("w", {4});
           log.Copy(log.Target("p", {4}), w);
           log.Copy(log.Target("q", {4}), w);
         },
         "[0:4]", 4, "[0:4]", "[0:4] -> p: 0 + (4):(1) x 1; [0:4] -> q: 0 + (4):(1) x 1"},
        {"Scalar",
         [](LogBuilder& log) {
           log.Copy(log.Target("p", {}, kFloat32), log.Source("w", {}, kFloat32));
         },
         "[]", 4, "[]", "[] -> p: 0 + ():() x 4"},
        {"RawBytesKeepTheCheckpointDtype",
         [](LogBuilder& log) {
           log.Copy(log.Target("p", {2}, kFloat32).As(kBFloat16), log.Source("w", {4}, kBFloat16));
         },
         "[0:4]", 8, "[0:4]", "[0:4] -> p: 0 + (4):(2) x 2"},
        {"Broadcast",
         [](LogBuilder& log) {
           log.Copy(log.Target("p", {3, 2}), log.Source("w", {4}).Slice(0, 1, 3).Expand(0, 3));
         },
         "[1:3]", 2, "[0:4]", "none"},
        {"Step",
         [](LogBuilder& log) {
           log.Copy(log.Target("p", {3}), log.Source("w", {6}).Slice(0, 0, 6, 2));
         },
         "[0:1] [2:3] [4:5]", 3, "[0:6]", "none"},
        {"SplitElements",
         [](LogBuilder& log) {
           log.Copy(log.Target("p", {2}),
                    log.Source("w", {3}, kBFloat16).As(kUint8).Slice(0, 1, 3));
         },
         "[0:2]", 4, "[0:3]", "none"},
        {"RegionOffItsDtype",
         [](LogBuilder& log) {
           log.Copy(log.Target("p", {6}).Slice(0, 1, 5),
                    log.Source("w", {2}, kBFloat16).As(kUint8));
         },
         "[0:2]", 4, "[0:2]", "none"},
        {"Cast",
         [](LogBuilder& log) {
           log.Copy(log.Target("p", {2}, kBFloat16), log.Source("w", {4}, kFloat32).Slice(0, 2, 4));
         },
         "[2:4]", 8, "[0:4]", "none"},
        {"Program",
         [](LogBuilder& log) {
           const View w = log.Source("w", {4, 2});
           log.Copy(log.Target("p", {2}), log.Node("aten::exp", {w.Select(0, 1)}, {2}));
           log.Copy(log.Target("q", {2}), w.Select(0, 2));
         },
         "[1:3, 0:2]", 4, "[0:4, 0:2]", "none"},
        {"Fallback",
         [](LogBuilder& log) {
           log.Source("w", {4, 2});
           log.input().fallbacks.emplace_back(0, "given");
         },
         "[0:4, 0:2]", 8, "[0:4, 0:2]", "none"},
        {"Unneeded", [](LogBuilder& log) { log.Source("w", {4}); }, "", 0, "none", ""},
        {"Empty", [](LogBuilder& log) { log.Copy(log.Target("p", {0}), log.Source("w", {0})); }, "",
         0, "none", ""},
    }),
    [](const auto& test) { return test.param.name; });

TEST(LoadPlanTest, FindsNamesAfterAMove) {
  LogBuilder log;
  log.Source("a", {1});
  log.Source("a name too long to be held inside of a string", {1});
  absl::StatusOr<LoadPlan> plan = log.Build();
  ASSERT_THAT(plan, IsOk());
  const LoadPlan moved = *std::move(plan);
  EXPECT_EQ(moved.Find("a"), 0);
  EXPECT_EQ(moved.Find("a name too long to be held inside of a string"), 1);
  EXPECT_EQ(moved.Find("b"), std::nullopt);
}

static_assert(!std::is_copy_constructible_v<LoadPlan>);
static_assert(std::is_move_constructible_v<LoadPlan>);

TEST(LoadPlanTest, KindsHaveNames) {
  EXPECT_EQ(ToString(EntryKind::kDirect), "direct");
  EXPECT_EQ(ToString(EntryKind::kDerived), "derived");
  EXPECT_EQ(ToString(EntryKind::kFallback), "fallback");
  EXPECT_EQ(ToString(EntryKind::kUnneeded), "unneeded");
}

TEST(LoadPlanTest, WritesPrintOriginTargetMapAndCasts) {
  WriteItem item{.origin = {OriginKind::kValue, 3, 1}, .target = 7, .map = {}, .casts = {}};
  EXPECT_EQ(::testing::PrintToString(item),
            "program 3 output 1 -> storage 7: " + ToString(StridedMap()));
  item.origin = {OriginKind::kLiveBefore, 2, 0};
  item.target = -1;
  item.casts = {kFloat32, kBFloat16, kFloat32};
  EXPECT_EQ(ToString(item), "live storage 2 -> input: " + ToString(StridedMap()) +
                                ", cast float32 -> bfloat16 -> float32");
}

TEST(LoadPlanTest, KimiK2IsDirectAndCovered) {
  for (const bool is_expert_parallel : {false, true}) {
    SCOPED_TRACE(is_expert_parallel ? "EP8" : "TP8");
    const bench::K2Case k2{.layers = 2, .is_expert_parallel = is_expert_parallel};
    const absl::StatusOr<LoadPlan> plan = BuildLoadPlan(bench::MakeK2(k2));
    ASSERT_THAT(plan, IsOk());
    EXPECT_EQ(plan->sources().size(), k2.num_names());
    EXPECT_TRUE(plan->uncovered().empty());
    EXPECT_TRUE(plan->overlaps().empty());
    size_t unneeded = 0;
    for (size_t n = 0; n < plan->entries().size(); ++n) {
      if (plan->entries()[n].kind == EntryKind::kUnneeded) {
        ++unneeded;
        continue;
      }
      EXPECT_EQ(plan->entries()[n].kind, EntryKind::kDirect);
      const auto dests = plan->GetDest(static_cast<std::int32_t>(n));
      EXPECT_TRUE(dests && dests->size() == 1) << plan->sources()[n].name;
    }
    EXPECT_EQ(unneeded, is_expert_parallel ? size_t{3 * (384 - 48)} : size_t{0});
  }
  EXPECT_EQ(bench::K2Case().num_names(), size_t{69975});
}

}  // namespace
}  // namespace loadplan::testing
