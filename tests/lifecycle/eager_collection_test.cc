#include "lifecycle/eager_collection.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/log_builder.h"

namespace loadplan {
namespace {

using ::loadplan::testing::kFloat32;
using ::loadplan::testing::LogBuilder;
using ::loadplan::testing::View;

// Names a to e; `writes` says which slots of one target each of them writes.
LoadPlan PlanOf(const std::vector<std::vector<Index>>& writes) {
  LogBuilder log;
  const View target = log.Target("t", {8}, kFloat32);
  std::vector<View> sources;
  for (std::size_t i = 0; i < writes.size(); ++i) {
    sources.push_back(log.Source(std::string(1, static_cast<char>('a' + i)), {1}, kFloat32));
  }
  for (std::size_t i = 0; i < writes.size(); ++i) {
    for (const Index slot : writes[i]) log.Copy(target.Slice(0, slot, slot + 1), sources[i]);
  }
  return log.Build().value();
}

struct OrderCase {
  std::string name;
  std::vector<std::vector<Index>> writes;
  std::string arrival;
  std::string call;
};
std::ostream& operator<<(std::ostream& stream, const OrderCase& c) { return stream << c.name; }

class CallOrderTest : public ::testing::TestWithParam<OrderCase> {};

TEST_P(CallOrderTest, IsDeclaredOrderWithOverlapsInArrivalOrder) {
  const LoadPlan plan = PlanOf(GetParam().writes);
  EagerCollection collection(plan, at::kCPU);
  for (const char name : GetParam().arrival) collection.Add(name - 'a', at::full({1}, name));
  std::string call;
  for (const auto& [source, tensor] : collection.Take()) {
    call += plan.sources()[static_cast<std::size_t>(source)].name;
    EXPECT_EQ(tensor.item<float>(), static_cast<float>(call.back()));
  }
  EXPECT_EQ(call, GetParam().call);
  EXPECT_TRUE(collection.Take().empty());
}

INSTANTIATE_TEST_SUITE_P(
    Cases, CallOrderTest,
    ::testing::Values(OrderCase{"NothingOverlaps", {{0}, {1}, {2}}, "cab", "abc"},
                      OrderCase{"OnePair", {{0}, {1}, {0}}, "cab", "cba"},
                      OrderCase{"APairInDeclaredOrder", {{0}, {1}, {0}}, "bac", "abc"},
                      OrderCase{"AChain", {{0}, {0, 1}, {1}, {2}}, "dcba", "cbad"},
                      OrderCase{"TwoPairs", {{0}, {1}, {0}, {1}}, "dcba", "cdab"},
                      OrderCase{"SomeDidNotArrive", {{0}, {1}, {0}, {2}}, "dc", "cd"}),
    [](const auto& test) { return test.param.name; });

TEST(EagerCollectionTest, KeepsBytesOfItsOwn) {
  const LoadPlan plan = PlanOf({{0}});
  EagerCollection collection(plan, at::kCPU);
  const at::Tensor buffer = at::full({2, 3}, 5).t();
  collection.Add(0, buffer);
  buffer.fill_(-1);
  const auto call = collection.Take();
  ASSERT_EQ(call.size(), 1U);
  EXPECT_TRUE(call[0].second.is_contiguous());
  EXPECT_TRUE(at::equal(call[0].second, at::full({3, 2}, 5)));
}

// A transport that has no order of its own says which name came first.
TEST(CallOrderOfPartsTest, IsThatInWhichNamesWereBegun) {
  const LoadPlan plan = PlanOf({{0}, {0}, {1}});
  EagerCollection collection(plan, at::kCPU);
  const std::int64_t a = collection.NextArrival();
  const std::int64_t b = collection.NextArrival();
  collection.Give(1, at::full({1}, 'b'), b);
  collection.Give(0, at::full({1}, 'a'), a);
  std::string call;
  for (const auto& [source, tensor] : collection.Take()) {
    call += plan.sources()[static_cast<std::size_t>(source)].name;
  }
  EXPECT_EQ(call, "ab");
}

}  // namespace
}  // namespace loadplan
