#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lifecycle/execute.h"
#include "lifecycle/reference_copies.h"
#include "tests/lifecycle/live_log.h"
#include "tests/lifecycle/random_log.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using ::loadplan::testing::ForEachRandom;
using ::loadplan::testing::IsOk;
using ::loadplan::testing::kBFloat16;
using ::loadplan::testing::kFloat32;
using ::loadplan::testing::LiveLog;
using ::loadplan::testing::RandomLog;
using ::loadplan::testing::StatusIs;
using ::loadplan::testing::View;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Some bytes of a tensor in a buffer of their own.
struct Part {
  std::int32_t source = 0;
  StridedMap held;
  at::Tensor buffer;
};

StridedMap RunMap(Index to, Index from, Index nbytes) {
  return StridedMap::Unchecked({}, {to, {}, nbytes}, {from, {}, nbytes}, /*is_cast=*/false);
}

Part RunPart(std::int32_t source, const at::Tensor& tensor, Index start, Index stop, Index at = 0) {
  at::Tensor buffer = at::full({at + stop - start}, 170, at::kByte);
  if (stop > start)
    std::memcpy(static_cast<char*>(buffer.mutable_data_ptr()) + at,
                static_cast<const char*>(tensor.const_data_ptr()) + start,
                static_cast<std::size_t>(stop - start));
  return {source, RunMap(start, at, stop - start), std::move(buffer)};
}

absl::Status Deliver(PlanExecutor& executor, const Part& part) {
  return executor.DeliverPart(part.source, part.held, ByteSide::OfStorage(part.buffer));
}

// The tensor as columns [start, stop) of `pitch` bytes, as a column shard keeps them; or, stored
// the other way round, column by column.
Part ColumnPart(std::mt19937& gen, std::int32_t source, const at::Tensor& tensor, Index pitch,
                Index start, Index stop) {
  const Index rows = static_cast<Index>(tensor.nbytes()) / pitch;
  const Index width = stop - start;
  const bool by_column = gen() % 2 == 0;
  const Index gap = static_cast<Index>(gen() % 3);
  MapSide from = by_column ? MapSide{gap, {1, rows}, 1} : MapSide{gap, {width + gap, 1}, 1};
  StridedMap held = StridedMap::Unchecked({rows, width}, {start, {pitch, 1}, 1}, std::move(from),
                                          /*is_cast=*/false);
  at::Tensor buffer = at::full({held.FromSpan().stop}, 170, at::kByte);
  const StridedMap out = Invert(held);
  EXPECT_THAT(CopyMapped(out, {}, ByteSide::OfStorage(buffer), ByteSide::OfElements(tensor)),
              IsOk());
  return {source, std::move(held), std::move(buffer)};
}

std::vector<Index> Cuts(std::mt19937& gen, Index stop) {
  std::vector<Index> cuts = {0, stop};
  // Short parts lie within what one copy reads, and can go straight to their place.
  for (auto n = gen() % (gen() % 2 == 0 ? 4 : 24); n > 0; --n)
    cuts.push_back(static_cast<Index>(gen()) % stop);
  std::ranges::sort(cuts);
  return cuts;
}

void Cut(std::mt19937& gen, std::int32_t source, const at::Tensor& tensor,
         std::vector<Part>& parts) {
  const auto nbytes = static_cast<Index>(tensor.nbytes());
  const Index pitches[] = {nbytes, nbytes / 4, nbytes / 6, nbytes / 16};
  const Index pitch = pitches[gen() % 4];
  const std::vector<Index> cuts = Cuts(gen, pitch);
  for (std::size_t i = 1; i < cuts.size(); ++i) {
    if (pitch == nbytes) {
      const auto at = static_cast<Index>(gen() % 2 == 0 ? 0 : gen() % 20);
      parts.push_back(RunPart(source, tensor, cuts[i - 1], cuts[i], at));
    } else {
      parts.push_back(ColumnPart(gen, source, tensor, pitch, cuts[i - 1], cuts[i]));
    }
  }
}

absl::Status Land(std::mt19937& gen, PlanExecutor& executor, Part& part, int& in_place) {
  const ByteRange bytes = part.held.ToSpan();
  if (part.held.shape().empty() && gen() % 2 == 0) {
    if (const std::optional<ByteSide> place = *executor.InPlace(part.source, bytes)) {
      ++in_place;
      absl::Status status = CopyMapped(RunMap(0, part.held.from().byte_offset, bytes.nbytes()), {},
                                       *place, ByteSide::OfStorage(part.buffer));
      return status.ok() ? executor.DeliveredInPlace(part.source, bytes) : status;
    }
  }
  if (gen() % 2 == 0) {
    if (const std::optional<PlacedPart> placed = *executor.PlacesOf(part.source, part.held)) {
      in_place += placed->nbytes > 0 ? 1 : 0;
      placed->Write(static_cast<const std::byte*>(part.buffer.const_data_ptr()));
      return executor.DeliveredPart(part.source, part.held, *placed);
    }
  }
  absl::Status status = Deliver(executor, part);
  // Where copies are batched they may wait until the sender wants its buffer back.
  if (!status.ok() || gen() % 2 == 0) return status;
  status = executor.Flush();
  part.buffer.fill_(85);  // the sender reuses it
  return status;
}

void RunRandomParts(std::mt19937& gen, int& planned, int& in_place) {
  RandomLog log(gen);
  const auto bound = log.Bind();
  if (bound == nullptr) return;
  ++planned;
  PlanExecutor executor(bound->traced, bound->targets);
  if (gen() % 2 == 0) {
    const CopyDevice device{&ReferenceCopyEngine(), at::kCPU};
    executor.BatchOn(device, bound->on_device.Get(bound->plan(), *bound->targets, device));
  }
  ASSERT_THAT(executor.Begin(), IsOk());
  std::vector<Part> parts;
  std::vector<int> left(log.weights().size(), 0);
  for (std::size_t i = 0; i < log.weights().size(); ++i) {
    if (gen() % 4 == 0) {  // one of several ways in one update
      ASSERT_THAT(executor.Deliver(static_cast<std::int32_t>(i), log.weights()[i]), IsOk());
    } else {
      Cut(gen, static_cast<std::int32_t>(i), log.weights()[i], parts);
    }
  }
  for (const Part& part : parts) ++left[static_cast<std::size_t>(part.source)];
  std::shuffle(parts.begin(), parts.end(), gen);
  for (Part& part : parts) {
    ASSERT_THAT(Land(gen, executor, part, in_place), IsOk());
    if (--left[static_cast<std::size_t>(part.source)] > 0) continue;
    ASSERT_THAT(executor.Complete(part.source), IsOk());
  }
  ASSERT_THAT(executor.Finish(), IsOk());
  log.ExpectLeftAsRecorded();
}

TEST(DeliverPartPropertyTest, LeavesWhatTheRecordsLeave) {
  int planned = 0;
  int in_place = 0;
  ForEachRandom(1000, [&](std::mt19937& gen) { RunRandomParts(gen, planned, in_place); });
  EXPECT_GT(planned, 500);
  EXPECT_GT(in_place, 10);
}

// `w` (3x4 float32) <- columns 2..6 of `x` (3x8).
class DeliverPartTest : public ::testing::Test {
 protected:
  DeliverPartTest() {
    const View w = log_.Target("w", {3, 4});
    log_.Copy(w, log_.Source("x", {3, 8}).Slice(1, 2, 6));
    plan_ = log_.Bind().value();
    executor_.emplace(plan_->traced, plan_->targets);
    EXPECT_THAT(executor_->Begin(), IsOk());
  }
  absl::Status Deliver(Index start, Index stop) {
    return loadplan::Deliver(*executor_, RunPart(0, x_, start, stop));
  }

  LiveLog log_;
  std::shared_ptr<const BoundPlan> plan_;
  std::optional<PlanExecutor> executor_;
  const at::Tensor x_ = at::randn({3, 8});
};

TEST_F(DeliverPartTest, NeedsOnlyTheBytesThatThePlanReads) {
  for (const Index row : {2, 0, 1}) ASSERT_THAT(Deliver(32 * row + 8, 32 * row + 24), IsOk());
  EXPECT_THAT(executor_->Complete(0), IsOk());
  EXPECT_TRUE(at::equal(log_.target(0), x_.slice(1, 2, 6)));
  EXPECT_EQ(executor_->written_nbytes(), 48);
}

TEST_F(DeliverPartTest, SaysWhatIsMissing) {
  ASSERT_THAT(Deliver(0, 79), IsOk());
  EXPECT_THAT(executor_->Complete(0),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("`x` is not complete: 39 of the 48 bytes")));
}

TEST_F(DeliverPartTest, RefusesBytesThatComeTwiceOrLieOutside) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  ASSERT_THAT(Deliver(0, 40), IsOk());
  EXPECT_THAT(Deliver(30, 50),
              StatusIs(kInvalid, HasSubstr("bytes in [30, 40) of it came in two")));
  // Rows that interleave share nothing.
  const StridedMap rows = StridedMap::Unchecked({2}, {44, {32}, 4}, {0, {4}, 4}, false);
  const StridedMap other = StridedMap::Unchecked({2}, {48, {32}, 4}, {0, {4}, 4}, false);
  const at::Tensor buffer = at::zeros({64}, at::kByte);
  ASSERT_THAT(executor_->DeliverPart(0, rows, ByteSide::OfStorage(buffer)), IsOk());
  ASSERT_THAT(executor_->DeliverPart(0, other, ByteSide::OfStorage(buffer)), IsOk());
  EXPECT_THAT(executor_->DeliverPart(0, rows, ByteSide::OfStorage(buffer)),
              StatusIs(kInvalid, HasSubstr("came in two parts")));
  EXPECT_THAT(executor_->DeliverPart(0, RunMap(90, 0, 7), ByteSide::OfStorage(buffer)),
              StatusIs(kInvalid, AllOf(HasSubstr("[90, 97)"), HasSubstr("96 bytes"))));
  EXPECT_THAT(
      executor_->DeliverPart(0, RunMap(84, 0, 12), ByteSide::OfElements(buffer.slice(0, 62))),
      StatusIs(absl::StatusCode::kInternal, HasSubstr("reads bytes")));
}

TEST_F(DeliverPartTest, GivesAPlaceWhereBytesGoAsTheyAre) {
  EXPECT_TRUE(executor_->InPlace(0, {8, 24})->has_value());
  EXPECT_TRUE(executor_->InPlace(0, {41, 42})->has_value());
  EXPECT_FALSE(executor_->InPlace(0, {8, 40})->has_value());   // two rows
  EXPECT_FALSE(executor_->InPlace(0, {0, 16})->has_value());   // more than is read
  EXPECT_FALSE(executor_->InPlace(0, {24, 40})->has_value());  // not read
}

TEST_F(DeliverPartTest, GivesThePlacesOfAPartWithGaps) {
  const StridedMap rows = StridedMap::Unchecked({2}, {8, {32}, 16}, {0, {16}, 16}, false);
  const std::optional<PlacedPart> placed = *executor_->PlacesOf(0, rows);
  ASSERT_TRUE(placed.has_value());
  EXPECT_EQ(placed->nbytes, 32);
  EXPECT_EQ(placed->target_nbytes, 32);
  EXPECT_EQ(executor_->written_nbytes(), 0);
  ASSERT_THAT(executor_->DeliveredPart(0, rows, *placed), IsOk());
  EXPECT_EQ(executor_->written_nbytes(), 32);
  EXPECT_THAT(executor_->DeliveredPart(0, rows, *placed),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("came in two parts")));
}

TEST(DeliverPartPlacesTest, AreLikelyWhereNothingIsCastNorWaitsForADevice) {
  LiveLog log;
  const View w = log.Target("w", {4}, kBFloat16);
  const View v = log.Target("v", {4}, kFloat32);
  const View plain = log.Source("plain", {4}, kFloat32);
  const View both = log.Source("both", {4}, kFloat32);
  log.Source("unused", {4}, kFloat32);
  log.Copy(w, both);
  log.Copy(v, log.Multiply(plain, both));
  const auto bound = log.Bind().value();
  PlanExecutor executor(bound->traced, bound->targets);
  EXPECT_TRUE(executor.HasPlaces(0));  // what an operator reads
  EXPECT_FALSE(executor.HasPlaces(1));
  EXPECT_TRUE(executor.HasPlaces(2));
  const CopyDevice device{&ReferenceCopyEngine(), at::kCPU};
  executor.BatchOn(device, bound->on_device.Get(bound->plan(), *bound->targets, device));
  EXPECT_FALSE(executor.HasPlaces(0));
}

// NaNs keep their bits by the layout that a cast sees: parts must not change it.
TEST(DeliverPartCastTest, ConvertsNansAsTheWholeTensorWould) {
  std::mt19937 gen(7);
  for (const bool rows : {false, true}) {
    LiveLog log;
    const View w = log.Target("w", {64, 32}, kBFloat16);
    const View x = log.Source("x", {64, 64}, kFloat32);
    log.Copy(w, rows ? x.Reshape({128, 32}).Slice(0, 0, 64) : x.Slice(1, 0, 64, 2));
    const auto bound = log.Bind().value();
    const at::Tensor x_bits = at::empty({64, 64}, at::kInt);
    for (int i = 0; i < 64 * 64; ++i) {
      // Half of them NaNs, with random payloads.
      const auto bits = static_cast<std::uint32_t>(gen()) | (i % 2 == 0 ? 0x7f800001U : 0U);
      x_bits.mutable_data_ptr<int>()[i] = static_cast<int>(bits);
    }
    const at::Tensor tensor = x_bits.view(at::kFloat);
    PlanExecutor whole(bound->traced, bound->targets);
    ASSERT_THAT(whole.Begin(), IsOk());
    ASSERT_THAT(whole.Deliver(0, tensor), IsOk());
    const at::Tensor expected = log.target(0).clone();
    for (int way = 0; way < 20; ++way) {
      log.target(0).zero_();
      PlanExecutor executor(bound->traced, bound->targets);
      ASSERT_THAT(executor.Begin(), IsOk());
      std::vector<Part> parts;
      Cut(gen, 0, tensor, parts);
      int in_place = 0;
      for (Part& part : parts) ASSERT_THAT(Land(gen, executor, part, in_place), IsOk());
      ASSERT_THAT(executor.Complete(0), IsOk());
      EXPECT_EQ(in_place, 0);
      ASSERT_TRUE(at::equal(log.target(0).view(at::kShort), expected.view(at::kShort)));
    }
  }
}

}  // namespace
}  // namespace loadplan
