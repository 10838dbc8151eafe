#include "plan/pass_writes.h"

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/log_builder.h"

namespace loadplan::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

constexpr DType kUint16{27, 2, "uint16"};

std::vector<PassWrite> WritesOf(const std::function<void(LogBuilder&)>& records) {
  LogBuilder log;
  records(log);
  return WritesOfPass(log.input().log, {});
}

// Targets first: their numbers are part of what is compared.
void Plain(LogBuilder& log) {
  const View p = log.Target("p", {4});
  log.Copy(p, log.Source("w", {4}));
}

void ThroughATemporary(LogBuilder& log) {
  const View p = log.Target("p", {4});
  const View w = log.Source("w", {4});
  const View tmp = log.Temporary({6});
  log.Copy(tmp.Slice(0, 0, 4), w);
  log.Copy(p, tmp.Slice(0, 0, 4));
}

void OfTwoNames(LogBuilder& log) {
  const View p = log.Target("p", {4});
  const View tmp = log.Temporary({4});
  log.Copy(tmp.Slice(0, 0, 2), log.Source("w", {2}));
  log.Copy(tmp.Slice(0, 2, 4), log.Source("x", {2}));
  log.Copy(p, tmp);
}

TEST(WritesOfPassTest, NamesAreThoseBehindTheBytes) {
  const auto plain = WritesOf(Plain);
  ASSERT_EQ(plain.size(), 1u);
  EXPECT_THAT(plain[0].names, ElementsAre(0));
  EXPECT_TRUE(plain[0].is_exact);
  const auto two = WritesOf(OfTwoNames);
  ASSERT_EQ(two.size(), 1u);
  EXPECT_THAT(two[0].names, ElementsAre(0, 1));
  EXPECT_EQ(two[0].time, 2);
}

TEST(WritesOfPassTest, AConstantHasNoName) {
  const auto writes = WritesOf([](LogBuilder& log) {
    const View p = log.Target("p", {4});
    log.Copy(p, log.Constant(0, {4}));
  });
  ASSERT_EQ(writes.size(), 1u);
  EXPECT_THAT(writes[0].names, IsEmpty());
}

TEST(WritesOfPassTest, BytesThatCannotBeFollowed) {
  const auto writes = WritesOf([](LogBuilder& log) {
    const View p = log.Target("p", {4});
    const View tmp = log.Temporary({3});
    log.Copy(tmp.With(0, {2, 2}, {1, 1}), log.Source("w", {2, 2}));
    log.Copy(p.Slice(0, 0, 3), tmp);
  });
  ASSERT_EQ(writes.size(), 1u);
  EXPECT_FALSE(writes[0].is_exact);
  EXPECT_THAT(writes[0].names, ElementsAre(0));
}

// Each differs from Plain in one respect.
struct Case {
  std::string name;
  std::function<void(LogBuilder&)> records;
};
std::ostream& operator<<(std::ostream& stream, const Case& c) { return stream << c.name; }

class OtherContentTest : public ::testing::TestWithParam<Case> {};

TEST_P(OtherContentTest, Differs) {
  const auto writes = WritesOf(GetParam().records);
  ASSERT_EQ(writes.size(), 1u);
  EXPECT_NE(writes[0].content, WritesOf(Plain)[0].content);
  EXPECT_EQ(writes[0].content, WritesOf(GetParam().records)[0].content);
}

INSTANTIATE_TEST_SUITE_P(
    , OtherContentTest,
    ::testing::ValuesIn(std::vector<Case>{
        {"Target",
         [](LogBuilder& log) {
           log.Target("o", {4});
           Plain(log);
         }},
        {"Name",
         [](LogBuilder& log) {
           log.Source("v", {4});
           Plain(log);
         }},
        {"Place",
         [](LogBuilder& log) {
           const View p = log.Target("p", {5});
           log.Copy(p.Slice(0, 1, 5), log.Source("w", {4}));
         }},
        {"Part",
         [](LogBuilder& log) {
           const View p = log.Target("p", {4});
           log.Copy(p, log.Source("w", {5}).Slice(0, 1, 5));
         }},
        {"Order",
         [](LogBuilder& log) {
           const View p = log.Target("p", {4});
           log.Copy(p.Reshape({2, 2}), log.Source("w", {4}).Reshape({2, 2}).Transpose(0, 1));
         }},
        {"Cast",
         [](LogBuilder& log) {
           const View p = log.Target("p", {4});
           log.Copy(p, log.Source("w", {4}, kUint16));
         }},
        {"Constant",
         [](LogBuilder& log) {
           const View p = log.Target("p", {4});
           log.Copy(p, log.Constant(0, {4}));
         }},
        {"Operator",
         [](LogBuilder& log) {
           const View p = log.Target("p", {4});
           log.Copy(p, log.Node("aten::neg", {log.Source("w", {4})}, {4}));
         }},
        {"LiveBytes",
         [](LogBuilder& log) {
           const View p = log.Target("p", {4});
           log.Copy(p, log.Target("q", {4}));
         }},
        {"Memory",
         [](LogBuilder& log) {
           const View p = log.Target("p", {4});
           log.Copy(p, log.Temporary({4}));
         }},
    }),
    [](const ::testing::TestParamInfo<Case>& test) { return test.param.name; });

TEST(WritesOfPassTest, ContentIsWhatArrivesAndNotTheWayThere) {
  EXPECT_EQ(WritesOf(Plain)[0].content, WritesOf(ThroughATemporary)[0].content);
}

TEST(WritesOfPassTest, ArgumentsOfAnOperatorCount) {
  LogBuilder log;
  const View p = log.Target("p", {4});
  log.Copy(p, log.Node("aten::mul", {log.Source("w", {4})}, {4}));
  ContentDigests two, three;
  two.operators = {2};
  three.operators = {3};
  EXPECT_NE(WritesOfPass(log.input().log, two)[0].content,
            WritesOfPass(log.input().log, three)[0].content);
}

TEST(WritesOfPassTest, BytesOfAConstantCount) {
  const auto content = [](std::uint64_t bytes) {
    LogBuilder log;
    const View p = log.Target("p", {4});
    log.Copy(p, log.Constant(0, {4}));
    ContentDigests digests;
    digests.constant = [bytes](StorageId, const StridedMap&) { return bytes; };
    return WritesOfPass(log.input().log, digests)[0].content;
  };
  EXPECT_EQ(content(1), content(1));
  EXPECT_NE(content(1), content(2));
}

// Two writes of `w` into p, which meet in one byte, and one into q.
std::vector<PassWrite> InOrder(const std::vector<int>& order) {
  return WritesOf([&](LogBuilder& log) {
    const View p = log.Target("p", {4});
    const View q = log.Target("q", {4});
    const View w = log.Source("w", {4});
    for (const int write : order) {
      if (write == 0) log.Copy(p.Slice(0, 0, 2), w.Slice(0, 0, 2));
      if (write == 1) log.Copy(p.Slice(0, 1, 3), w.Slice(0, 2, 4));
      if (write == 2) log.Copy(q, w);
    }
  });
}

TEST(WritesOfPassTest, LaterWritesAreThoseThatShareBytes) {
  const auto writes = InOrder({2, 0, 2, 1});
  ASSERT_EQ(writes.size(), 4u);
  EXPECT_THAT(writes[0].later, ElementsAre(2));
  EXPECT_THAT(writes[1].later, ElementsAre(3));
  EXPECT_THAT(writes[2].later, IsEmpty());
  EXPECT_THAT(writes[3].later, IsEmpty());
}

TEST(OtherwiseOrderedTest, OnlyWritesThatShareBytes) {
  const auto against = [](const std::vector<int>& order, const std::vector<int>& other) {
    return OtherwiseOrdered(InOrder(order), LastWrites(InOrder(other)));
  };
  EXPECT_THAT(against({0, 1, 2}, {0, 1, 2}), IsEmpty());
  EXPECT_THAT(against({0, 1, 2}, {2, 0, 1}), IsEmpty());
  EXPECT_THAT(against({0, 1, 2}, {1, 0, 2}), ElementsAre(Pair(0, 1)));
  EXPECT_THAT(against({2, 1, 0}, {2, 0, 1}), ElementsAre(Pair(1, 2)));
}

TEST(OtherwiseOrderedTest, TheLastOfEqualWritesCounts) {
  const auto against = [](const std::vector<int>& order, const std::vector<int>& other) {
    return OtherwiseOrdered(InOrder(order), LastWrites(InOrder(other)));
  };
  EXPECT_THAT(against({0, 1}, {0, 1, 0, 1}), IsEmpty());
  EXPECT_THAT(against({1, 0, 1}, {0, 1}), IsEmpty());
  EXPECT_THAT(against({0, 1}, {0, 1, 0}), ElementsAre(Pair(0, 1)));
  EXPECT_THAT(against({0, 1, 0}, {0, 1}), ElementsAre(Pair(1, 2)));
}

TEST(OtherwiseOrderedTest, AWriteThatTheOtherPassLacks) {
  EXPECT_THAT(OtherwiseOrdered(InOrder({0, 1}), LastWrites(InOrder({0}))), ElementsAre(Pair(0, 1)));
  EXPECT_THAT(OtherwiseOrdered(InOrder({0, 1}), LastWrites(InOrder({1}))), IsEmpty());
}

TEST(OtherwiseOrderedTest, UnknownOrderIsAnotherOne) {
  auto writes = InOrder({2});
  writes[0].is_order_known = false;
  EXPECT_THAT(OtherwiseOrdered(writes, LastWrites(writes)), ElementsAre(Pair(0, 0)));
  EXPECT_THAT(OtherwiseOrdered(writes, LastWrites({})), IsEmpty());
}

TEST(WriteBagTest, OneWriteStandsForOne) {
  const auto writes = WritesOf(Plain);
  WriteBag bag(writes);
  bag.Add(writes[0]);
  EXPECT_TRUE(bag.Take(writes[0]));
  EXPECT_TRUE(bag.Take(writes[0]));
  EXPECT_FALSE(bag.Take(writes[0]));
  EXPECT_FALSE(bag.Take(WritesOf(OfTwoNames)[0]));
}

}  // namespace
}  // namespace loadplan::testing
