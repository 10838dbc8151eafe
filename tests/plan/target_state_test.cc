#include "plan/target_state.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"

namespace loadplan::testing {
namespace {

using Pairs = std::vector<std::pair<std::int32_t, std::int32_t>>;

// What is left of each write, and who met.
std::string Describe(const TargetState& state) {
  std::string text;
  for (const PlainWrite& write : state.plain) {
    absl::StrAppend(&text, write.time, ": plain, of ", write.name, "\n");
  }
  for (const TargetWrite& write : state.writes) {
    absl::StrAppend(&text, write.time, ": of", write.names.empty() ? " no name" : "");
    for (const std::int32_t name : write.names) absl::StrAppend(&text, " ", name);
    if (write.reads_live) absl::StrAppend(&text, ", reads live bytes");
    if (write.is_overwritten_by_nothing_named) absl::StrAppend(&text, ", under no name");
    absl::StrAppend(&text, "\n");
    for (const Piece& piece : write.visible) {
      absl::StrAppend(&text, "  ", ToString(Coalesce(piece.map)), "\n");
    }
  }
  for (const NameMeeting& meeting : state.meetings) {
    absl::StrAppend(&text, meeting.earlier, " meets ", meeting.later, " in ", meeting.nbytes, "\n");
  }
  for (const auto& [one, other] : state.neighbours) {
    absl::StrAppend(&text, one, " beside ", other, "\n");
  }
  return text;
}

TargetState Resolve(LogBuilder& log, StorageId target) {
  const RecordLog& records = log.input().log;
  const SymbolicMemory memory(records);
  NodeTable nodes(records, memory);
  return ResolveTarget(records, memory, nodes, target);
}

struct StateCase {
  std::string name;
  std::function<void(LogBuilder&, const View& p)> records;  // into the bytes 0..7 of `p`
  std::string state;
};

std::ostream& operator<<(std::ostream& stream, const StateCase& c) { return stream << c.name; }

class TargetStateTest : public ::testing::TestWithParam<StateCase> {};

TEST_P(TargetStateTest, SaysWhatIsLeft) {
  LogBuilder log;
  const View p = log.Target("p", {8});
  GetParam().records(log, p);
  const TargetState state = Resolve(log, p.storage);
  EXPECT_TRUE(state.status.ok());
  EXPECT_EQ(Describe(state), GetParam().state);
}

INSTANTIATE_TEST_SUITE_P(Cases, TargetStateTest,
                         ::testing::ValuesIn(std::vector<StateCase>{
                             {"ApartStaysPlain",
                              [](LogBuilder& log, const View& p) {
                                log.Copy(p.Slice(0, 0, 4), log.Source("a", {4}));
                                log.Copy(p.Slice(0, 4, 8), log.Source("b", {4}));
                              },
                              "0: plain, of 0\n1: plain, of 1\n"},
                             {"InterleavedStaysPlain",
                              [](LogBuilder& log, const View& p) {
                                log.Copy(p.Slice(0, 0, 8, 2), log.Source("a", {4}));
                                log.Copy(p.Slice(0, 1, 8, 2), log.Source("b", {4}));
                              },
                              "0: plain, of 0\n1: plain, of 1\n"},
                             {"ThroughATemporary",
                              [](LogBuilder& log, const View& p) {
                                const View tmp = log.Temporary({8});
                                log.Copy(tmp.Slice(0, 0, 4), log.Source("a", {4}));
                                log.Copy(tmp.Slice(0, 4, 8), log.Source("b", {4}));
                                log.Copy(p.Slice(0, 0, 4), tmp.Slice(0, 2, 6));
                              },
                              "2: of 0 1\n"
                              "  0 + ():() x 2 <- 2 + ():() x 2\n"
                              "  2 + ():() x 2 <- 0 + ():() x 2\n"},
                             {"LaterNameClips",
                              [](LogBuilder& log, const View& p) {
                                log.Copy(p, log.Source("a", {8}));
                                log.Copy(p.Slice(0, 6, 8), log.Source("b", {2}));
                              },
                              "0: of 0\n"
                              "  0 + ():() x 6 <- 0 + ():() x 6\n"
                              "1: of 1\n"
                              "  6 + ():() x 2 <- 0 + ():() x 2\n"
                              "0 meets 1 in 2\n"
                              "0 beside 1\n"},
                             {"ZeroedFirstLeavesTheRestPlain",
                              [](LogBuilder& log, const View& p) {
                                log.Copy(p, log.Constant(0, {8}));
                                log.Copy(p.Slice(0, 0, 6), log.Source("a", {6}));
                              },
                              "1: plain, of 0\n"
                              "0: of no name\n"
                              "  6 + ():() x 2 <- 6 + ():() x 2\n"},
                             {"ConstantOverAName",
                              [](LogBuilder& log, const View& p) {
                                log.Copy(p, log.Source("a", {8}));
                                log.Copy(p.Slice(0, 0, 6), log.Constant(0, {6}));
                              },
                              "0: of 0, under no name\n"
                              "  6 + ():() x 2 <- 6 + ():() x 2\n"
                              "1: of no name\n"
                              "  0 + ():() x 6 <- 0 + ():() x 6\n"},
                             {"ReadBackMeetsNobody",
                              [](LogBuilder& log, const View& p) {
                                log.Copy(p, log.Source("a", {8}));
                                log.Copy(p, log.Node("aten::neg", {p}, {8}));
                              },
                              "0: of 0\n"
                              "1: of 0\n"
                              "  0 + ():() x 8 <- 0 + ():() x 8\n"},
                             {"LiveBytes",
                              [](LogBuilder& log, const View& p) {
                                log.Copy(p.Slice(0, 0, 4), p.Slice(0, 4, 8));
                              },
                              "0: of no name, reads live bytes\n"
                              "  0 + ():() x 4 <- 4 + ():() x 4\n"},
                         }),
                         [](const auto& test) { return test.param.name; });

TEST(TargetStateTest, KeepsAWriteThatCannotBeFollowed) {
  LogBuilder log;
  const View p = log.Target("p", {3});
  log.Copy(p.With(0, {2, 2}, {1, 1}), log.Source("a", {2, 2}));
  const TargetState state = Resolve(log, p.storage);
  ASSERT_EQ(state.writes.size(), 1U);
  EXPECT_THAT(state.writes[0].status,
              StatusIs(absl::StatusCode::kFailedPrecondition, "it writes one byte twice"));
  EXPECT_EQ(state.writes[0].names, std::vector<std::int32_t>{0});
  ASSERT_EQ(state.writes[0].visible.size(), 1U);
  EXPECT_EQ(state.writes[0].visible[0].storage, -1);
}

// The bytes that a copy writes, one by one.
std::vector<bool> BytesOf(const CopyRecord& copy, Index nbytes) {
  std::vector<bool> bytes(static_cast<size_t>(nbytes));
  ForEachRun(copy.map, [&](Index to, Index, Index run) {
    for (Index i = to; i < to + run; ++i) bytes[static_cast<size_t>(i)] = true;
  });
  return bytes;
}

TEST(MeetingCopiesPropertyTest, AreThePairsThatShareAByte) {
  ForEachRandom(500, [](std::mt19937& gen) {
    constexpr Index kExtent = 6;
    LogBuilder log;
    const View p = log.Target("p", {kExtent, kExtent});
    const auto draw = [&](Index low, Index high) {
      return std::uniform_int_distribution<Index>(low, high)(gen);
    };
    const Index num_copies = draw(0, 8);
    for (Index i = 0; i < num_copies; ++i) {
      View view = p;
      for (const size_t dim : {size_t{0}, size_t{1}}) {
        const Index start = draw(0, kExtent - 1);
        view = view.Slice(dim, start, draw(start + 1, kExtent), draw(1, 3));
      }
      log.Copy(view, log.Source(absl::StrCat("w", i), view.layout.shape()));
    }
    const RecordLog& records = log.input().log;
    Pairs expected;
    for (size_t a = 0; a < records.copies.size(); ++a) {
      const std::vector<bool> bytes = BytesOf(records.copies[a], p.layout.nbytes());
      for (size_t b = a + 1; b < records.copies.size(); ++b) {
        const std::vector<bool> others = BytesOf(records.copies[b], p.layout.nbytes());
        bool meets = false;
        for (size_t i = 0; i < bytes.size(); ++i) meets |= bytes[i] && others[i];
        if (meets) expected.emplace_back(a, b);
      }
    }
    std::vector<std::int32_t> times(records.copies.size());
    std::iota(times.begin(), times.end(), 0);
    EXPECT_THAT(MeetingCopies(records, times), IsOkAndHolds(expected));
  });
}

}  // namespace
}  // namespace loadplan::testing
