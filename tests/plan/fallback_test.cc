#include "plan/fallback.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace loadplan::testing {
namespace {

std::vector<SourceTensor> Names(int count) {
  std::vector<SourceTensor> sources(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) sources[static_cast<size_t>(i)].name = absl::StrCat("w", i);
  return sources;
}

TEST(FallbackSetTest, KeepsTheFirstReason) {
  const std::vector<SourceTensor> sources = Names(2);
  FallbackSet set(sources);
  EXPECT_TRUE(set.empty());
  set.Add(1, "first");
  set.AddAll(std::vector<std::int32_t>{1}, "second");
  set.AddEveryName("third");
  EXPECT_EQ(set.reason(1), "first");
  EXPECT_EQ(set.reason(0), "third");
  EXPECT_EQ(set.size(), size_t{2});
}

TEST(FallbackSetTest, GroupsFallTogetherInAChain) {
  const std::vector<SourceTensor> sources = Names(5);
  FallbackSet set(sources);
  set.AddGroup({2, 3}, "`aten::mul` combines it with");
  set.AddGroup({1, 2}, "a copy combines it with");
  set.AddGroup({0}, "a group of one is none");
  set.Propagate();
  EXPECT_TRUE(set.empty());
  set.Add(1, "given");
  EXPECT_FALSE(set.ContainsAnyOf(std::vector<std::int32_t>{0, 2, 3, 4}));
  set.Propagate();
  EXPECT_EQ(set.reason(2), "a copy combines it with `w1`, which goes through the loader");
  EXPECT_EQ(set.reason(3), "`aten::mul` combines it with `w2`, which goes through the loader");
  EXPECT_FALSE(set.Contains(0));
  EXPECT_FALSE(set.Contains(4));
  EXPECT_TRUE(set.ContainsAnyOf(std::vector<std::int32_t>{0, 3}));
}

TEST(FallbackSetTest, PropagatesAgainAfterMoreAreAdded) {
  const std::vector<SourceTensor> sources = Names(4);
  FallbackSet set(sources);
  set.AddGroup({0, 1}, "with");
  set.AddGroup({2, 3}, "with");
  set.Add(0, "given");
  set.Propagate();
  set.Add(3, "given");
  set.Propagate();
  EXPECT_EQ(set.size(), size_t{4});
}

TEST(FallbackReasonTest, NamesOperatorAndPlace) {
  RefusalRecord refusal{"aten::item", "its value is read", "loader.py:3", {}, 0};
  EXPECT_EQ(RefusedReason(refusal), "`aten::item`: its value is read (loader.py:3)");
  refusal.where.clear();
  EXPECT_EQ(RefusedReason(refusal), "`aten::item`: its value is read");
  EXPECT_EQ(NotReplayableReason("aten::rand", "random numbers"),
            "`aten::rand` cannot be replayed: random numbers");
  EXPECT_EQ(IrregularReason("p", absl::ResourceExhaustedError("too many pieces")),
            "a copy into `p` cannot be planned: too many pieces");
  EXPECT_EQ(OverlapReason("b", "p"), "it writes bytes of `p` that `b` writes too");
}

}  // namespace
}  // namespace loadplan::testing
