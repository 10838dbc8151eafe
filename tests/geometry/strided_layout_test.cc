#include "geometry/strided_layout.h"

#include <algorithm>
#include <limits>
#include <set>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/oracle.h"
#include "tests/testing/random_geometry.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using testing::Bytes;
using testing::ForEachRandom;
using ::testing::HasSubstr;
using testing::IsOkAndHolds;
using testing::Layout;
using testing::StatusIs;

static_assert(std::regular<StridedLayout>);

constexpr Index kMax = std::numeric_limits<Index>::max();

struct CreateErrorCase {
  std::string name;
  Index offset;
  DimVector shape;
  DimVector strides;
  Index itemsize;
  std::string words;

  friend std::ostream& operator<<(std::ostream& s, const CreateErrorCase& c) { return s << c.name; }
};

class CreateErrorTest : public ::testing::TestWithParam<CreateErrorCase> {};

TEST_P(CreateErrorTest, SaysWhatIsWrong) {
  const CreateErrorCase& c = GetParam();
  EXPECT_THAT(StridedLayout::Create(c.offset, c.shape, c.strides, c.itemsize),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(c.words)));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, CreateErrorTest,
    ::testing::ValuesIn(std::vector<CreateErrorCase>{
        {"Ranks", 0, {2, 3}, {1}, 1, "`shape` has 2 dimensions and `byte_strides` 1"},
        {"Itemsize", 0, {2}, {1}, 0, "`itemsize` is 0; it must be positive"},
        {"Offset", -4, {2}, {1}, 1, "`byte_offset` is -4"},
        {"Extent", 0, {2, -1}, {1, 1}, 1, "`shape[1]` is -1"},
        {"Stride", 0, {2, 2}, {1, -8}, 1, "`byte_strides[1]` is -8"},
        {"StrideOfAnEmptyOne", 0, {0, 2}, {1, -8}, 1, "`byte_strides[1]` is -8"},
        {"Reach", 0, {3}, {kMax / 2}, 4, "the end of the last item does not fit"},
        {"ReachOverflowsAtOnce", 0, {4}, {kMax / 2}, 4, "the end of the last item does not fit"},
        {"End", kMax - 3, {}, {}, 4, "the end of the last item does not fit"},
        {"SumOfReaches",
         0,
         {2, 2},
         {kMax / 2, kMax / 2},
         2,
         "the end of the last item does not fit"},
        {"CountOfABroadcast", 0, {kMax / 2, 4}, {0, 0}, 1, "the number of bytes of `shape`"},
        {"BytesOfABroadcast", 0, {kMax / 2}, {0}, 4, "the number of bytes of `shape`"},
    }),
    [](const auto& test) { return test.param.name; });

TEST(StridedLayoutTest, CreateKeepsWhatItIsGiven) {
  const absl::StatusOr<StridedLayout> layout = StridedLayout::Create(24, {3, 2}, {4, 12}, 4);
  ASSERT_TRUE(layout.ok());
  EXPECT_EQ(layout->byte_offset(), 24);
  EXPECT_EQ(layout->shape(), DimVector({3, 2}));
  EXPECT_EQ(layout->byte_strides(), DimVector({4, 12}));
  EXPECT_EQ(layout->itemsize(), 4);
  EXPECT_EQ(layout->num_elements(), 6);
  EXPECT_EQ(layout->nbytes(), 24);
  EXPECT_EQ(layout->Span(), (ByteRange{24, 48}));
  EXPECT_EQ(ToString(*layout), "24 + (3, 2):(4, 12) x 4");
  std::ostringstream stream;
  stream << *layout;
  EXPECT_EQ(stream.str(), ToString(*layout));
}

TEST(StridedLayoutTest, DefaultIsOneByte) {
  EXPECT_EQ(ToString(StridedLayout()), "0 + ():() x 1");
  EXPECT_EQ(StridedLayout().nbytes(), 1);
}

TEST(StridedLayoutTest, ComparedByFields) {
  const StridedLayout layout = Layout(0, {2}, {1}, 1);
  EXPECT_EQ(layout, Layout(0, {2}, {1}, 1));
  EXPECT_NE(layout, Layout(1, {2}, {1}, 1));
  EXPECT_NE(layout, Layout(0, {3}, {1}, 1));
  EXPECT_NE(layout, Layout(0, {2}, {2}, 1));
  EXPECT_NE(layout, Layout(0, {2}, {1}, 2));
}

TEST(StridedLayoutTest, LargestEndThatFits) {
  EXPECT_TRUE(StridedLayout::Create(kMax - 4, {}, {}, 4).ok());
  EXPECT_TRUE(StridedLayout::Create(0, {2}, {kMax - 4}, 4).ok());
}

TEST(StridedLayoutTest, EmptyOnesFitWhateverTheirExtents) {
  const absl::StatusOr<StridedLayout> layout =
      StridedLayout::Create(0, {kMax, 0, kMax}, {kMax, 1, kMax}, 8);
  ASSERT_TRUE(layout.ok());
  EXPECT_TRUE(layout->empty());
  EXPECT_EQ(layout->nbytes(), 0);
  EXPECT_TRUE(layout->Span().empty());
}

TEST(ContiguousTest, IsRowMajor) {
  EXPECT_THAT(StridedLayout::Contiguous(8, {2, 3, 4}, 2),
              IsOkAndHolds(Layout(8, {2, 3, 4}, {24, 8, 2}, 2)));
  EXPECT_THAT(StridedLayout::Contiguous(8, {}, 2), IsOkAndHolds(Layout(8, {}, {}, 2)));
  EXPECT_THAT(StridedLayout::Contiguous(0, {3, 0, 2}, 2),
              IsOkAndHolds(Layout(0, {3, 0, 2}, {4, 4, 2}, 2)));
}

TEST(ContiguousTest, ReportsTheErrorsOfCreate) {
  EXPECT_THAT(StridedLayout::Contiguous(0, {2, -3}, 2),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("`shape[1]` is -3")));
  EXPECT_THAT(StridedLayout::Contiguous(0, {2, kMax}, 2),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("number of bytes")));
  EXPECT_THAT(StridedLayout::Contiguous(0, {kMax, 2}, 2),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("number of bytes")));
  EXPECT_THAT(StridedLayout::Contiguous(0, {2}, -1),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("`itemsize` is -1")));
}

void CheckCoalesce(const StridedLayout& layout) {
  SCOPED_TRACE(ToString(layout));
  const StridedLayout result = Coalesce(layout);
  EXPECT_EQ(Coalesce(result), result);
  if (layout.empty()) {
    EXPECT_EQ(result, Layout(0, {0}, {1}, 1));
    return;
  }
  EXPECT_EQ(Bytes(result), Bytes(layout));
  EXPECT_THAT(result.shape(), ::testing::Each(::testing::Ne(1)));
  for (size_t d = 1; d < result.shape().size(); ++d) {
    EXPECT_NE(result.byte_strides()[d - 1], result.shape()[d] * result.byte_strides()[d]);
  }
  if (!result.shape().empty()) {
    EXPECT_NE(result.byte_strides().back(), result.itemsize());
  }
  EXPECT_EQ(result.Span(), layout.Span());
}

struct CoalesceCase {
  std::string name;
  StridedLayout layout;
  std::string result;
  bool unique;

  friend std::ostream& operator<<(std::ostream& s, const CoalesceCase& c) { return s << c.name; }
};

class CoalesceTest : public ::testing::TestWithParam<CoalesceCase> {};

TEST_P(CoalesceTest, KeepsTheBytes) {
  CheckCoalesce(GetParam().layout);
  EXPECT_EQ(ToString(Coalesce(GetParam().layout)), GetParam().result);
}

TEST_P(CoalesceTest, KnowsWhetherBytesRepeat) {
  EXPECT_EQ(testing::HasRepeats(GetParam().layout), !GetParam().unique) << "wrong case";
  EXPECT_EQ(IsUnique(GetParam().layout), GetParam().unique);
  EXPECT_EQ(IsUnique(Coalesce(GetParam().layout)), GetParam().unique);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, CoalesceTest,
    ::testing::ValuesIn(std::vector<CoalesceCase>{
        {"Scalar", Layout(5, {}, {}, 2), "5 + ():() x 2", true},
        {"ContiguousMergesToOne", Layout(0, {4, 3}, {6, 2}, 2), "0 + ():() x 24", true},
        {"RowsKeepTheGap", Layout(6, {2, 2}, {6, 2}, 2), "6 + (2):(6) x 4", true},
        {"TransposeCannotMerge", Layout(0, {3, 2}, {2, 6}, 2), "0 + (3, 2):(2, 6) x 2", true},
        {"ExpandKeepsStrideZero", Layout(0, {2, 3}, {0, 1}, 1), "0 + (2):(0) x 3", false},
        {"ExpandsMerge", Layout(0, {2, 3}, {0, 0}, 1), "0 + (6):(0) x 1", false},
        {"ExpandInside", Layout(0, {3, 2}, {2, 0}, 2), "0 + (3, 2):(2, 0) x 2", false},
        {"UnitExtentsGo", Layout(1, {1, 4, 1}, {99, 2, 7}, 2), "1 + ():() x 8", true},
        {"Empty", Layout(3, {0, 3}, {3, 1}, 1), "0 + (0):(1) x 1", true},
        {"Step", Layout(0, {3, 4}, {8, 2}, 1), "0 + (12):(2) x 1", true},
        {"BytesOfItems", Layout(0, {3, 4}, {4, 1}, 1), "0 + ():() x 12", true},
        {"Diagonal", Layout(0, {4}, {5}, 1), "0 + (4):(5) x 1", true},
        {"Unfold", Layout(0, {3, 4}, {2, 1}, 1), "0 + (3):(2) x 4", false},
        {"UnfoldThatTouches", Layout(0, {3, 4}, {4, 1}, 1), "0 + ():() x 12", true},
        {"TangledButUnique", Layout(0, {2, 2}, {3, 2}, 1), "0 + (2, 2):(3, 2) x 1", true},
        {"TangledAndRepeating", Layout(0, {3, 4}, {3, 2}, 1), "0 + (3, 4):(3, 2) x 1", false},
        {"TangledRunsTouch", Layout(0, {2, 2}, {6, 4}, 2), "0 + (2, 2):(6, 4) x 2", true},
        {"TangledRunsOverlap", Layout(0, {2, 2}, {6, 4}, 3), "0 + (2, 2):(6, 4) x 3", false},
        {"OneDimensionOverlapsItself", Layout(0, {2, 5}, {100, 2}, 4), "0 + (2, 5):(100, 2) x 4",
         false},
        {"ThreeTangledUnique", Layout(0, {2, 2, 2}, {9, 5, 3}, 1), "0 + (2, 2, 2):(9, 5, 3) x 1",
         true},
        {"ThreeTangledRepeating", Layout(0, {2, 2, 2}, {8, 5, 3}, 1), "0 + (2, 2, 2):(8, 5, 3) x 1",
         false},
    }),
    [](const auto& test) { return test.param.name; });

TEST(CoalesceTest, DoesNotMergeAcrossAnOverflow) {
  // 2^32 * 2^32 wraps to 0, the stride of the outer dimension.
  const Index big = Index{1} << 32;
  const StridedLayout layout = Layout(0, {2, 1, big}, {0, 5, 1}, 2);
  EXPECT_EQ(Coalesce(layout).shape(), DimVector({2, big}));
}

TEST(IsUniqueTest, LargeLayoutsAreDecidedByArithmetic) {
  const Index n = Index{1} << 30;
  EXPECT_TRUE(IsUnique(Layout(0, {n, n}, {n, 1}, 1)));
  EXPECT_FALSE(IsUnique(Layout(0, {n, n}, {n - 1, 1}, 1)));
  EXPECT_FALSE(IsUnique(Layout(0, {n, 3}, {2, 1}, 1)));
  EXPECT_TRUE(IsUnique(Layout(0, {3, n}, {n * 3 + 1, 3}, 1)));
}

TEST(IsContiguousTest, MeansOneRangeInOrder) {
  EXPECT_TRUE(IsContiguous(Layout(8, {2, 3}, {12, 4}, 4)));
  EXPECT_TRUE(IsContiguous(Layout(8, {1, 3, 1}, {0, 4, 9}, 4)));
  EXPECT_TRUE(IsContiguous(Layout(8, {0, 3}, {5, 9}, 4)));
  EXPECT_TRUE(IsContiguous(Layout(8, {}, {}, 4)));
  EXPECT_FALSE(IsContiguous(Layout(8, {3, 2}, {4, 12}, 4)));  // all of it, in another order
  EXPECT_FALSE(IsContiguous(Layout(8, {2}, {8}, 4)));
  EXPECT_FALSE(IsContiguous(Layout(8, {2}, {0}, 4)));
}

TEST(StridedLayoutPropertyTest, CoalesceKeepsTheBytes) {
  ForEachRandom(6000, [](std::mt19937& gen) { CheckCoalesce(testing::RandomLayout(gen, 96)); });
}

TEST(StridedLayoutPropertyTest, IsUniqueEqualsBruteForce) {
  ForEachRandom(6000, [](std::mt19937& gen) {
    const StridedLayout layout = testing::RandomLayout(gen, 96);
    EXPECT_EQ(IsUnique(layout), !testing::HasRepeats(layout)) << layout;
  });
}

TEST(StridedLayoutPropertyTest, IsUniqueEqualsBruteForceForAnyStrides) {
  ForEachRandom(6000, [](std::mt19937& gen) {
    const StridedLayout layout = testing::RandomAsStrided(gen, 96);
    EXPECT_EQ(IsUnique(layout), !testing::HasRepeats(layout)) << layout;
  });
}

TEST(StridedLayoutPropertyTest, IsContiguousEqualsBruteForce) {
  ForEachRandom(3000, [](std::mt19937& gen) {
    const StridedLayout layout = testing::RandomLayout(gen, 24);
    const std::vector<Index> bytes = Bytes(layout);
    bool contiguous = true;
    for (size_t i = 1; i < bytes.size(); ++i) contiguous &= bytes[i] == bytes[i - 1] + 1;
    EXPECT_EQ(IsContiguous(layout), contiguous) << layout;
  });
}

TEST(StridedLayoutPropertyTest, SpanIsTheHull) {
  ForEachRandom(3000, [](std::mt19937& gen) {
    const StridedLayout layout = testing::RandomLayout(gen, 96);
    const std::set<Index> bytes = testing::ByteSet(layout);
    const ByteRange hull =
        bytes.empty() ? ByteRange{} : ByteRange{*bytes.begin(), *bytes.rbegin() + 1};
    EXPECT_EQ(layout.Span(), hull) << layout;
  });
}

}  // namespace
}  // namespace loadplan
