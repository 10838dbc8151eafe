// Random copies in memory, and what they leave: for batches on the host and on a device.
#ifndef LOADPLAN_TESTS_TESTING_RANDOM_COPIES_H_
#define LOADPLAN_TESTS_TESTING_RANDOM_COPIES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "geometry/copy_jobs.h"
#include "geometry/strided_map.h"
#include "gtest/gtest.h"
#include "tests/testing/oracle.h"
#include "tests/testing/random_geometry.h"

namespace loadplan::testing {

inline StridedMap RandomMap(std::mt19937& gen, int max_rank, Index max_extent) {
  DimVector shape(static_cast<std::size_t>(Uniform(gen, 0, max_rank)));
  for (Index& extent : shape) extent = Uniform(gen, 1, max_extent);
  const Index itemsize = Pick<Index>(gen, {1, 2, 3, 4, 6, 8, 16, 24, 64});
  return Map(shape, RandomDenseSide(gen, shape, itemsize), RandomFromSide(gen, shape, itemsize));
}

// Memory whose address is a multiple of 64, with some bytes around it.
class Memory {
 public:
  explicit Memory(Index nbytes)
      : bytes_(new std::byte[static_cast<std::size_t>(nbytes) + 64]),
        nbytes_(static_cast<std::size_t>(nbytes)) {
    address_ = (reinterpret_cast<std::uint64_t>(bytes_.get()) + 63) / 64 * 64;
  }
  std::uint64_t address() const { return address_; }
  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  std::size_t nbytes() const { return nbytes_; }
  void Fill(std::mt19937& gen) const {
    std::generate_n(data(), nbytes_, [&] { return static_cast<std::byte>(gen()); });
  }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  std::size_t nbytes_;
  std::uint64_t address_;
};

// A map between two memories, and what it leaves in the first.
struct MemoryCopy {
  StridedMap map;
  Memory to;
  Memory from;
  Index from_start;  // of the source's bytes in `from`
  std::vector<std::byte> want;
};

inline MemoryCopy RandomMemoryCopy(std::mt19937& gen) {
  StridedMap map = Uniform(gen, 0, 9) == 0 ? RandomMap(gen, 2, 200) : RandomMap(gen, 5, 5);
  const Index to_start = Uniform(gen, 0, 2) == 0 ? Uniform(gen, 0, 32) : 0;
  const Index from_start = Uniform(gen, 0, 2) == 0 ? Uniform(gen, 0, 32) : 0;
  MapSide to = map.to();
  to.byte_offset += to_start;
  map = Map(map.shape(), to, map.from());
  const Index shift = std::max<Index>(0, -map.FromSpan().start);
  MapSide from = map.from();
  from.byte_offset += shift;
  map = Map(map.shape(), map.to(), from);
  MemoryCopy copy{map,
                  Memory(map.ToSpan().stop + 8),
                  Memory(from_start + map.FromSpan().stop + 8),
                  from_start,
                  {}};
  copy.to.Fill(gen);
  copy.from.Fill(gen);
  copy.want.assign(copy.to.data(), copy.to.data() + copy.to.nbytes());
  for (const auto& [to_byte, from_byte] : Pairs(map)) {
    copy.want[static_cast<std::size_t>(to_byte)] = copy.from.data()[from_start + from_byte];
  }
  return copy;
}

// Jobs of `copy` behind `jobs`, and an item for each behind `items`.
inline void AppendCopy(const MemoryCopy& copy, CopyCast cast, std::vector<CopyJob>* jobs,
                       std::vector<CopyItem>* items) {
  auto job = static_cast<std::uint32_t>(jobs->size());
  ASSERT_TRUE(AppendCopyJobs(copy.map, copy.to.address(), 1U << 20, jobs, cast));
  const std::uint64_t from = copy.from.address() + static_cast<std::uint64_t>(copy.from_start);
  for (; job < jobs->size(); ++job) items->push_back({from, job, 0});
}

// `items` are of `jobs`, the first `num_planned` of which are those of a plan. Both must outlive
// it.
inline CopyBatch BatchOf(std::span<const CopyJob> jobs, std::span<CopyItem> items,
                         std::size_t num_planned = 0) {
  const std::span<const CopyJob> planned = jobs.first(num_planned);
  const std::span<const CopyJob> extra = jobs.subspan(num_planned);
  CopyBatch batch;
  batch.num_tiles = NumberTiles(planned, extra, items);
  batch.planned = planned.data();
  batch.extra = extra.data();
  batch.items = items.data();
  batch.num_planned = static_cast<std::uint32_t>(planned.size());
  batch.num_items = static_cast<std::uint32_t>(items.size());
  return batch;
}

inline void ExpectCopied(const MemoryCopy& copy) {
  SCOPED_TRACE(ToString(copy.map));
  const std::vector<std::byte> got(copy.to.data(), copy.to.data() + copy.to.nbytes());
  ASSERT_EQ(got, copy.want);
}

// A map of a cast between items of these sizes, each at a multiple of its size.
inline StridedMap RandomCastMap(std::mt19937& gen, Index to_itemsize, Index from_itemsize) {
  const bool is_long = Uniform(gen, 0, 3) == 0;
  DimVector shape(static_cast<std::size_t>(Uniform(gen, 0, is_long ? 2 : 6)));
  for (Index& extent : shape) extent = Uniform(gen, 1, is_long ? 100 : 4);
  MapSide to = RandomDenseSide(gen, shape, to_itemsize);
  MapSide from = RandomFromSide(gen, shape, from_itemsize);
  // In units of items, and none before the first byte.
  const auto round = [](MapSide& side) {
    side.byte_offset -= side.byte_offset % side.itemsize;
    for (Index& stride : side.byte_strides) stride -= stride % side.itemsize;
  };
  round(to);
  round(from);
  StridedMap map = Map(shape, to, from, /*is_cast=*/true);
  const Index start = map.FromSpan().start;
  if (start < 0) from.byte_offset -= start;
  if (Uniform(gen, 0, 1) == 0) {
    to.byte_offset += to_itemsize * Uniform(gen, 0, 20);
    from.byte_offset += from_itemsize * Uniform(gen, 0, 20);
  }
  return Map(std::move(shape), std::move(to), std::move(from), /*is_cast=*/true);
}

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_TESTING_RANDOM_COPIES_H_
