#include "plan/report.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/status_matchers.h"

namespace loadplan::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string ReportOf(const LogBuilder& log, OverlapPolicy policy = OverlapPolicy::kFallback) {
  absl::StatusOr<LoadPlan> plan = log.Build(policy);
  EXPECT_THAT(plan, IsOk());
  if (!plan.ok()) return "";
  plan->trace_seconds = 1.5;
  plan->build_seconds = 0.25;
  return plan->Report();
}

TEST(ReportTest, ListsEverythingThatThereIs) {
  LogBuilder log;
  const View p = log.Target("p", {6}, kFloat32);
  const View q = log.Target("q", {4}, kBFloat16);
  const View a = log.Source("a", {8}, kFloat32);
  log.Copy(p, log.Constant(0, {1}, kFloat32).Select(0, 0).Expand(0, 6));
  log.Copy(p.Slice(0, 0, 4), a.Slice(0, 4, 8));
  log.Copy(q.Slice(0, 0, 2), log.Source("b", {2}, kFloat32));
  log.Source("c", {2});
  const View d = log.Source("d", {4});
  log.Copy(log.Target("r", {4}), d);
  log.Refuse("aten::item", "its value is read", "loader.py:12", {d});
  log.Copy(log.Target("s", {4}), log.Node("aten::exp", {log.Source("e", {4})}, {4}));
  EXPECT_EQ(ReportOf(log),
            "load plan: 5 names, 50 bytes; reads 32 bytes\n"
            "  direct         1 name     16 bytes read of 32 bytes\n"
            "  derived       2 names     12 bytes read of 12 bytes\n"
            "  fallback       1 name      4 bytes read of 4 bytes\n"
            "  unneeded       1 name      0 bytes read of 2 bytes\n"
            "fallbacks\n"
            "  1 name: `aten::item`: its value is read (loader.py:12)\n"
            "    d\n"
            "derived\n"
            "  1 name: cast float32 -> bfloat16\n"
            "    b\n"
            "  1 name: `aten::exp` reads it\n"
            "    e\n"
            "constants: 1 write, 8 bytes\n"
            "computed: 1 write, 4 bytes\n"
            "programs: 1 operator\n"
            "not written: 1 target\n"
            "  `q`: 4 bytes of 8 bytes\n"
            "seconds: trace 1.500, build 0.250\n");
}

TEST(ReportTest, GroupsReasonsThatDifferInNamesAndNumbers) {
  LogBuilder log;
  const View scale = log.Source("scale", {1});
  log.Refuse("aten::item", "its value is read", "l.py:9", {scale});
  for (int i = 0; i < 12; ++i) {
    const View w = log.Source(absl::StrCat("w", i), {1});
    log.Refuse("aten::equal", "a branch read it", absl::StrCat("l.py:", i), {w});
  }
  const std::string report = ReportOf(log);
  EXPECT_THAT(report, HasSubstr("fallbacks\n"
                                "  12 names: `aten::equal`: a branch read it (l.py:0)\n"
                                "    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, ...\n"
                                "  1 name: `aten::item`: its value is read (l.py:9)\n"
                                "    scale\n"));
}

TEST(ReportTest, ListsOverlapsWithTheirBytes) {
  LogBuilder log;
  const View p = log.Target("p", {2});
  log.Copy(p, log.Source("a", {2}));
  log.Copy(p, log.Source("b", {2}));
  const std::string report = ReportOf(log, OverlapPolicy::kLastWins);
  EXPECT_THAT(report, HasSubstr("overlaps: 1 pair\n  `a` and `b` share 2 bytes of `p`\n"));
  EXPECT_THAT(report, HasSubstr("unneeded\n"
                                "  1 name: every byte that it writes is overwritten by `b`\n"
                                "    a\n"));
}

TEST(ReportTest, LeavesOutEmptySections) {
  LogBuilder log;
  log.Copy(log.Target("p", {2}), log.Source("a", {2}));
  const std::string report = ReportOf(log);
  for (const char* section : {"fallback", "derived", "constants", "overlaps", "not written"}) {
    EXPECT_THAT(report, Not(HasSubstr(section)));
  }
}

TEST(ReportTest, CutsLongLists) {
  LogBuilder log;
  for (int i = 0; i < 12; ++i) log.Target(absl::StrCat("p", i), {2});
  const std::string report = ReportOf(log);
  EXPECT_THAT(report, HasSubstr("not written: 12 targets\n  `p0`: 2 bytes of 2 bytes\n"));
  EXPECT_THAT(report, HasSubstr("`p9`: 2 bytes of 2 bytes\n  ...\n"));
}

TEST(FormatNbytesTest, UsesTheLargestUnit) {
  EXPECT_EQ(FormatNbytes(0), "0 bytes");
  EXPECT_EQ(FormatNbytes(1), "1 byte");
  EXPECT_EQ(FormatNbytes(1023), "1023 bytes");
  EXPECT_EQ(FormatNbytes(1024), "1.0 KiB");
  EXPECT_EQ(FormatNbytes(Index{7} << 29), "3.5 GiB");
  EXPECT_EQ(FormatNbytes(Index{3} << 60), "3072.0 PiB");
}

}  // namespace
}  // namespace loadplan::testing
