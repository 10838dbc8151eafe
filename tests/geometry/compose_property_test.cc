// Laws of geometry/compose.h on random maps, against the byte-by-byte oracle.
#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "geometry/compose.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/oracle.h"
#include "tests/testing/random_geometry.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using testing::ByteSet;
using testing::ForEachRandom;
using testing::IsOk;
using testing::Pair;
using testing::Pairs;
using testing::SortedPairs;
using testing::Uniform;

constexpr Index kNbytes = 96;
constexpr int kIterations = 6000;

struct Expected {
  std::vector<Pair> matched;
  std::vector<Pair> rest;
};

// Composition of maps without casts, byte by byte.
Expected ComposeBytes(const StridedMap& outer, const StridedMap& inner) {
  std::map<Index, Index> source;
  for (const auto& [t, s] : Pairs(inner)) source.emplace(t, s);
  Expected expected;
  for (const auto& [d, t] : Pairs(outer)) {
    const auto found = source.find(t);
    if (found == source.end()) {
      expected.rest.emplace_back(d, t);
    } else {
      expected.matched.emplace_back(d, found->second);
    }
  }
  std::sort(expected.matched.begin(), expected.matched.end());
  std::sort(expected.rest.begin(), expected.rest.end());
  return expected;
}

// Composition where `outer` is a cast, item by item; nullopt where one would be cut.
std::optional<Expected> ComposeCastOuter(const StridedMap& outer, const StridedMap& inner) {
  const Index itemsize = outer.from().itemsize;
  std::map<Index, Index> source;  // bytes, or items where `inner` is a cast too
  std::set<Index> written;
  for (const auto& [t, s] : Pairs(inner)) {
    source.emplace(t, s);
    for (Index i = 0; i < (inner.is_cast() ? inner.to().itemsize : 1); ++i) written.insert(t + i);
  }
  Expected expected;
  for (const auto& [d, t] : Pairs(outer)) {
    Index touched = 0;
    for (Index i = 0; i < itemsize; ++i) touched += static_cast<Index>(written.count(t + i));
    if (touched == 0) {
      expected.rest.emplace_back(d, t);
      continue;
    }
    const auto start = source.find(t);
    if (touched < itemsize || start == source.end()) return std::nullopt;
    if (inner.is_cast() && inner.to().itemsize != itemsize) return std::nullopt;
    for (Index i = 1; i < itemsize && !inner.is_cast(); ++i) {
      if (source.at(t + i) != start->second + i) return std::nullopt;
    }
    expected.matched.emplace_back(d, start->second);
  }
  std::sort(expected.matched.begin(), expected.matched.end());
  std::sort(expected.rest.begin(), expected.rest.end());
  return expected;
}

// Composition where only `inner` is a cast: `outer` must carry whole items.
std::optional<Expected> ComposeCastInner(const StridedMap& outer, const StridedMap& inner) {
  const Index itemsize = inner.to().itemsize;
  std::map<Index, Pair> item_of;  // byte of T -> (first byte of its item, item of S)
  for (const auto& [t, s] : Pairs(inner)) {
    for (Index i = 0; i < itemsize; ++i) item_of[t + i] = {t, s};
  }
  const std::vector<Pair> pairs = Pairs(outer);
  const std::set<Pair> all(pairs.begin(), pairs.end());
  Expected expected;
  for (const auto& [d, t] : pairs) {
    const auto found = item_of.find(t);
    if (found == item_of.end()) {
      expected.rest.emplace_back(d, t);
      continue;
    }
    const auto [item, s] = found->second;
    for (Index i = 0; i < itemsize; ++i) {
      if (all.count({d - (t - item) + i, item + i}) == 0) return std::nullopt;
    }
    if (t == item) expected.matched.emplace_back(d, s);
  }
  std::sort(expected.matched.begin(), expected.matched.end());
  std::sort(expected.rest.begin(), expected.rest.end());
  return expected;
}

std::optional<Expected> ComposeOracle(const StridedMap& outer, const StridedMap& inner) {
  if (outer.is_cast()) return ComposeCastOuter(outer, inner);
  if (inner.is_cast()) return ComposeCastInner(outer, inner);
  return ComposeBytes(outer, inner);
}

void CheckCoalesced(const std::vector<StridedMap>& maps) {
  for (const StridedMap& map : maps) {
    EXPECT_EQ(Coalesce(map), map);
    EXPECT_FALSE(map.empty());
  }
}

bool StepsAreMultiplesOf(Index itemsize, const StridedLayout& layout) {
  const DimVector strides = Coalesce(layout).byte_strides();
  return std::all_of(strides.begin(), strides.end(),
                     [&](Index stride) { return stride % itemsize == 0; });
}

// Whether items of `side` could share an atom of `itemsize` bytes.
bool HasPartsOfAtoms(const MapSide& side, Index itemsize) {
  return side.byte_offset % itemsize != 0 || side.itemsize % itemsize != 0 ||
         std::any_of(side.byte_strides.begin(), side.byte_strides.end(),
                     [&](Index stride) { return stride % itemsize != 0; });
}

// Atoms that come together from several parts may be refused without need; see the
// header.
bool MayRefuse(const StridedMap& outer, const StridedMap& inner) {
  return (outer.is_cast() && HasPartsOfAtoms(Coalesce(inner).to(), outer.from().itemsize)) ||
         (inner.is_cast() && HasPartsOfAtoms(Coalesce(outer).from(), inner.to().itemsize));
}

void CheckCompose(const StridedMap& outer, const StridedMap& inner) {
  SCOPED_TRACE("outer " + ToString(outer) + "\ninner " + ToString(inner));
  const absl::StatusOr<Composition> result = Compose(outer, inner);
  const std::optional<Expected> expected = ComposeOracle(outer, inner);
  if (!expected) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition);
    return;
  }
  if (absl::IsFailedPrecondition(result.status()) && MayRefuse(outer, inner)) return;
  ASSERT_THAT(result, IsOk());
  EXPECT_EQ(SortedPairs(result->matched), expected->matched);
  EXPECT_EQ(SortedPairs(result->rest), expected->rest);
  CheckCoalesced(result->matched);
  CheckCoalesced(result->rest);
  for (const StridedMap& map : result->matched) {
    EXPECT_EQ(map.is_cast(), outer.is_cast() || inner.is_cast());
  }
  for (const StridedMap& map : result->rest) EXPECT_EQ(map.is_cast(), outer.is_cast());
}

TEST(ComposePropertyTest, EqualsTheOracle) {
  ForEachRandom(kIterations, [](std::mt19937& gen) {
    CheckCompose(testing::RandomOuter(gen, kNbytes, false),
                 testing::RandomInner(gen, kNbytes, false));
  });
}

TEST(ComposePropertyTest, EqualsTheOracleForCasts) {
  ForEachRandom(kIterations, [](std::mt19937& gen) {
    const Index which = Uniform(gen, 0, 2);
    CheckCompose(testing::RandomOuter(gen, kNbytes, which != 1),
                 testing::RandomInner(gen, kNbytes, which != 0));
  });
}

TEST(SubtractToPropertyTest, KeepsThePairsOutside) {
  ForEachRandom(kIterations, [](std::mt19937& gen) {
    const StridedMap map = testing::RandomInner(gen, kNbytes, Uniform(gen, 0, 3) == 0);
    StridedLayout region = testing::RandomLayout(gen, kNbytes);
    // Steps that are no whole items may be refused without need; see the header.
    while (map.is_cast() && !StepsAreMultiplesOf(map.to().itemsize, region)) {
      region = testing::RandomLayout(gen, kNbytes);
    }
    SCOPED_TRACE(ToString(map) + "\nregion " + ToString(region));
    const std::set<Index> taken = ByteSet(region);
    std::vector<Pair> expected;
    bool cut = false;
    const Index itemsize = map.is_cast() ? map.to().itemsize : 1;
    for (const auto& [t, s] : Pairs(map)) {
      Index touched = 0;
      for (Index i = 0; i < itemsize; ++i) touched += static_cast<Index>(taken.count(t + i));
      cut = cut || (touched != 0 && touched != itemsize);
      if (touched == 0) expected.emplace_back(t, s);
    }
    const absl::StatusOr<std::vector<StridedMap>> rest = SubtractTo(map, region);
    if (cut) {
      EXPECT_EQ(rest.status().code(), absl::StatusCode::kFailedPrecondition);
      return;
    }
    ASSERT_THAT(rest, IsOk());
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(SortedPairs(*rest), expected);
    CheckCoalesced(*rest);
  });
}

TEST(IntersectPropertyTest, TogetherWithSubtractItIsTheWhole) {
  ForEachRandom(kIterations, [](std::mt19937& gen) {
    const StridedLayout layout = testing::RandomLayout(gen, kNbytes);
    const StridedLayout region = testing::RandomLayout(gen, kNbytes);
    SCOPED_TRACE(ToString(layout) + "\nregion " + ToString(region));
    const std::set<Index> taken = ByteSet(region);
    std::vector<Index> inside;
    std::vector<Index> outside;
    for (const Index byte : ByteSet(layout)) {
      (taken.count(byte) != 0 ? inside : outside).push_back(byte);
    }
    const auto sorted_bytes = [](const std::vector<StridedLayout>& layouts) {
      std::vector<Index> bytes;
      for (const StridedLayout& part : layouts) {
        const std::vector<Index> more = testing::Bytes(part);
        bytes.insert(bytes.end(), more.begin(), more.end());
      }
      std::sort(bytes.begin(), bytes.end());
      return bytes;
    };
    const absl::StatusOr<std::vector<StridedLayout>> common = Intersect(layout, region);
    const absl::StatusOr<std::vector<StridedLayout>> rest = Subtract(layout, region);
    ASSERT_THAT(common, IsOk());
    ASSERT_THAT(rest, IsOk());
    EXPECT_EQ(sorted_bytes(*common), inside);
    EXPECT_EQ(sorted_bytes(*rest), outside);
  });
}

}  // namespace
}  // namespace loadplan
