// CopyTile: what one thread does of one tile of a batch of copies. See Note [Copies in tiles] in
// geometry/copy_job.h.
//
// The kernel and the host run this same code, so that what a device will do is tested where there
// is none. C++17, and nothing of CUDA but its 16-byte type.
#ifndef LOADPLAN_GEOMETRY_COPY_TILE_H_
#define LOADPLAN_GEOMETRY_COPY_TILE_H_

#include <cstdint>
#include <cstring>

#include "geometry/copy_job.h"

#ifdef __CUDA_ARCH__
#define LOADPLAN_UNROLL _Pragma("unroll")
#define LOADPLAN_ROLLED _Pragma("unroll 1")
#define LOADPLAN_INLINE __forceinline__
#define LOADPLAN_NOINLINE __noinline__
#else
#define LOADPLAN_UNROLL
#define LOADPLAN_ROLLED
#define LOADPLAN_INLINE inline
#define LOADPLAN_NOINLINE
#endif

namespace loadplan {
namespace copy_tile_internal {

#ifdef __CUDACC__
using Unit16 = uint4;
#else
struct alignas(16) Unit16 {
  std::uint64_t words[2];
};
#endif

template <typename T>
LOADPLAN_ON_DEVICE inline T Load(std::uint64_t address) {
#ifdef __CUDA_ARCH__
  // Through the read-only cache: no copy of a batch writes what another reads.
  return __ldg(reinterpret_cast<const T*>(address));
#else
  T value;
  std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof(T));
  return value;
#endif
}

template <typename T>
LOADPLAN_ON_DEVICE inline void Store(std::uint64_t address, const T& value) {
#ifdef __CUDA_ARCH__
  // A generic address is that of global memory; said so, no other kind is looked for.
  *static_cast<T*>(__cvta_global_to_generic(address)) = value;
#else
  std::memcpy(reinterpret_cast<void*>(address), &value, sizeof(T));
#endif
}

// Where the byte at `position` of a job lies, from the starts of both sides. For items of a cast
// their sizes below the larger one, as shifts.
struct CopyPlace {
  std::int64_t to;
  std::int64_t from;
};
LOADPLAN_ON_DEVICE LOADPLAN_INLINE CopyPlace PlaceOf(const CopyJob& job, std::uint32_t position,
                                                     std::uint32_t to_shift = 0,
                                                     std::uint32_t from_shift = 0) {
  std::uint32_t rest = job.row_nbytes.Quotient(position);
  const std::uint32_t column = position - rest * job.row_nbytes.value;
  CopyPlace place{column >> to_shift, column >> from_shift};
  LOADPLAN_UNROLL
  for (int d = 0; d < kMaxCopyDims; ++d) {
    std::uint32_t coordinate = rest;
    if (d < kMaxCopyDims - 1 && static_cast<std::uint32_t>(d) + 1 < job.rank) {
      rest = job.extents[d].Quotient(coordinate);
      coordinate -= rest * job.extents[d].value;
    } else {
      rest = 0;
    }
    place.to += coordinate * job.to_strides[d];
    place.from += coordinate * job.from_strides[d];
  }
  return place;
}

// Moves one unit as it is.
template <typename T>
struct MoveBytes {
  using Loaded = T;
  static constexpr auto kUnit = static_cast<std::uint32_t>(sizeof(T));
  static constexpr std::uint32_t kToShift = 0;
  static constexpr std::uint32_t kFromShift = 0;
  // Loads that are under way before the first store waits for one.
  static constexpr std::uint32_t kInFlight = 4;

  LOADPLAN_ON_DEVICE static Loaded LoadFrom(std::uint64_t address) { return Load<T>(address); }
  LOADPLAN_ON_DEVICE static void StoreTo(std::uint64_t address, const Loaded& value) {
    Store<T>(address, value);
  }
};

// One thread's units of [start, stop): one unit of every `num_threads`.
template <typename Move>
LOADPLAN_ON_DEVICE LOADPLAN_INLINE void CopyUnits(const CopyJob& job, std::uint64_t from,
                                                  std::uint32_t start, std::uint32_t stop,
                                                  std::uint32_t thread, std::uint32_t num_threads,
                                                  const Move& move) {
  constexpr std::uint32_t kInFlight = Move::kInFlight;
  const std::uint32_t step = num_threads * Move::kUnit;
  std::uint32_t position = start + thread * Move::kUnit;
  LOADPLAN_ROLLED
  for (; kInFlight > 1 && position + (kInFlight - 1) * step < stop; position += kInFlight * step) {
    typename Move::Loaded values[kInFlight];
    std::int64_t places[kInFlight];
    LOADPLAN_UNROLL
    for (std::uint32_t i = 0; i < kInFlight; ++i) {
      const CopyPlace place = PlaceOf(job, position + i * step, Move::kToShift, Move::kFromShift);
      places[i] = place.to;
      values[i] = move.LoadFrom(from + static_cast<std::uint64_t>(place.from));
    }
    LOADPLAN_UNROLL
    for (std::uint32_t i = 0; i < kInFlight; ++i) {
      move.StoreTo(job.to + static_cast<std::uint64_t>(places[i]), values[i]);
    }
  }
  LOADPLAN_ROLLED
  for (; position < stop; position += step) {
    const CopyPlace place = PlaceOf(job, position, Move::kToShift, Move::kFromShift);
    move.StoreTo(job.to + static_cast<std::uint64_t>(place.to),
                 move.LoadFrom(from + static_cast<std::uint64_t>(place.from)));
  }
}

}  // namespace copy_tile_internal

// The last item whose first tile is not behind `tile`.
LOADPLAN_ON_DEVICE inline std::uint32_t FindCopyItem(const CopyBatch& batch, std::uint32_t tile) {
  std::uint32_t first = 0;
  std::uint32_t stop = batch.num_items;
  while (stop - first > 1) {
    const std::uint32_t middle = first + (stop - first) / 2;
    if (batch.items[middle].first_tile <= tile) {
      first = middle;
    } else {
      stop = middle;
    }
  }
  return first;
}

// The bytes that are moved at a time where the source's bytes start at address `from`.
LOADPLAN_ON_DEVICE LOADPLAN_INLINE std::uint32_t UnitOf(const CopyJob& job, std::uint64_t from) {
  const auto low_bits = static_cast<std::uint32_t>(from & (kMaxCopyUnit - 1));
  // The lowest bit that is set.
  const std::uint32_t alignment = low_bits == 0 ? kMaxCopyUnit : low_bits & (~low_bits + 1);
  return alignment < job.unit ? alignment : job.unit;
}

// What runs the jobs of a batch that cast: cuda/cast_tile.h has another.
struct NoCasts {
  static constexpr bool kIsAny = false;
};

// The share of `thread` of `num_threads` in a tile.
template <typename Casts>
LOADPLAN_ON_DEVICE inline void CopyTile(const CopyBatch& batch, std::uint32_t tile,
                                        std::uint32_t thread, std::uint32_t num_threads,
                                        const Casts& casts) {
  using namespace copy_tile_internal;  // NOLINT(google-build-using-namespace)
  const CopyItem item = batch.items[FindCopyItem(batch, tile)];
  const CopyJob& held = item.job < batch.num_planned ? batch.planned[item.job]
                                                     : batch.extra[item.job - batch.num_planned];
  const std::uint32_t start = (tile - item.first_tile) * kCopyTileNbytes;
  const std::uint32_t left = held.nbytes - start;
  const std::uint32_t stop = start + (left < kCopyTileNbytes ? left : kCopyTileNbytes);
  const std::uint64_t from = item.from + static_cast<std::uint64_t>(held.from);
  if constexpr (Casts::kIsAny) {
    if (!held.cast.is_none()) return casts.Run(held, from, start, stop, thread, num_threads);
  }
  const CopyJob job = held;  // no store changes it
  switch (UnitOf(job, item.from)) {
    case 16:
      return CopyUnits(job, from, start, stop, thread, num_threads, MoveBytes<Unit16>());
    case 8:
      return CopyUnits(job, from, start, stop, thread, num_threads, MoveBytes<std::uint64_t>());
    case 4:
      return CopyUnits(job, from, start, stop, thread, num_threads, MoveBytes<std::uint32_t>());
    case 2:
      return CopyUnits(job, from, start, stop, thread, num_threads, MoveBytes<std::uint16_t>());
    default:
      return CopyUnits(job, from, start, stop, thread, num_threads, MoveBytes<std::uint8_t>());
  }
}

}  // namespace loadplan

#endif  // LOADPLAN_GEOMETRY_COPY_TILE_H_
