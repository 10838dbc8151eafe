// TorchCasts: what one thread does of one tile of a job that casts. See Note [Copies in tiles] in
// geometry/copy_job.h.
//
// As geometry/copy_tile.h: the kernel and the host run this same code. C++17; of torch only the
// headers of its number types, which need no library.
#ifndef LOADPLAN_CUDA_CAST_TILE_H_
#define LOADPLAN_CUDA_CAST_TILE_H_

#include <c10/core/ScalarType.h>
#include <c10/util/TypeCast.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "geometry/copy_tile.h"

namespace loadplan {

// Note [Casts as torch makes them]
//
// What a cast leaves is what torch's own `copy_` leaves on that device, NaN included. The kernel of
// torch (aten/src/ATen/native/cuda/Copy.cu, `direct_copy_kernel_cuda`) converts an item by
// `c10::convert<To, From>`: for most pairs inside `c10::fetch_and_cast`, for float to half,
// bfloat16 and float8, and for half and bfloat16 to float8, by the constructor of the number type,
// which is what `c10::convert` calls for those. On a device these constructors are intrinsics
// (`__float2half`, `__float2bfloat16`: NaN becomes 0x7fff) or integer code. nvcc compiles the same
// functions here. Bytes of bool are read as `c10::load<bool>` does: anything but 0 is true.
//
// In two steps, because 121 pairs would take nvcc minutes, and change no bit:
//
//   float8, half, bfloat16, float32    by way of float
//   float64                            by way of double
//   bool, uint8, int8 to int64         by way of int64
//
// The first step loses nothing. The second is what torch does: its number types know conversions
// from and to float and no others, and an integer has one value in whichever type it is.
//
// That is an argument about sources, and torch's are not the last word: built with CUDA 13.2 its
// float8 casts are other instructions, which go round a fault of ptxas. So before a pair is first
// used, a device is asked (lifecycle/cast_check.h), and what differs is left to `copy_`.
//
// Left to it from the start: complex and quantised numbers, uint16 to uint64, the float8 of other
// makers (fnuz), and floating point to integers, where C++ does not say what becomes of a number
// that does not fit.
namespace cast_tile_internal {

using copy_tile_internal::CopyUnits;
using copy_tile_internal::Load;
using copy_tile_internal::Store;
using copy_tile_internal::Unit16;

template <std::size_t kNbytes>
using WordOf = std::conditional_t<
    kNbytes == 1, std::uint8_t,
    std::conditional_t<
        kNbytes == 2, std::uint16_t,
        std::conditional_t<kNbytes == 4, std::uint32_t,
                           std::conditional_t<kNbytes == 8, std::uint64_t, Unit16>>>>;

// Whether this pair is made here; see Note [Casts as torch makes them].
template <typename To, typename From>
inline constexpr bool kIsCast =
    !std::is_same_v<To, From> &&
    (std::is_integral_v<From> || !std::is_integral_v<To> || std::is_same_v<To, bool>);

// What numbers of type `From` are between the two steps.
template <typename From>
using WideOf = std::conditional_t<std::is_integral_v<From>, std::int64_t,
                                  std::conditional_t<std::is_same_v<From, double>, double, float>>;

constexpr std::uint32_t Log2(std::size_t power) { return power == 1 ? 0 : 1 + Log2(power / 2); }

// clang-format off
#define LOADPLAN_FOR_CAST_DTYPES(f)                         \
  f(Double, double) f(Float, float)                         \
  f(Half, c10::Half) f(BFloat16, c10::BFloat16)             \
  f(Float8_e4m3fn, c10::Float8_e4m3fn)                      \
  f(Float8_e5m2, c10::Float8_e5m2)                          \
  f(Float8_e8m0fnu, c10::Float8_e8m0fnu)                    \
  f(Bool, bool) f(Byte, std::uint8_t) f(Char, std::int8_t)  \
  f(Short, std::int16_t) f(Int, std::int32_t) f(Long, std::int64_t)
// clang-format on

// Moves `kItems` items of kFrom bytes to as many of kTo bytes, by way of `Wide`.
template <typename Wide, std::size_t kTo, std::size_t kFrom, std::uint32_t kItems>
struct MoveItems {
  using Loaded = WordOf<kItems * kFrom>;
  using Stored = WordOf<kItems * kTo>;
  static constexpr std::size_t kLarge = kTo > kFrom ? kTo : kFrom;
  static constexpr auto kUnit = static_cast<std::uint32_t>(kItems * kLarge);
  static constexpr std::uint32_t kToShift = Log2(kLarge / kTo);
  static constexpr std::uint32_t kFromShift = Log2(kLarge / kFrom);
  // Each converts in code of its own, and there are other warps.
  static constexpr std::uint32_t kInFlight = kItems == 1 ? 2 : 1;

  CopyCast cast;

  LOADPLAN_ON_DEVICE Loaded LoadFrom(std::uint64_t address) const { return Load<Loaded>(address); }
  LOADPLAN_ON_DEVICE void StoreTo(std::uint64_t address, const Loaded& loaded) const {
    Wide wide[kItems];
    Stored stored;
#define LOADPLAN_CASE(name, type)                                                \
  case c10::ScalarType::name:                                                    \
    if constexpr (sizeof(type) == kFrom && std::is_same_v<WideOf<type>, Wide>) { \
      Widen<type>(loaded, wide);                                                 \
      break;                                                                     \
    } else {                                                                     \
      return;                                                                    \
    }
    switch (static_cast<c10::ScalarType>(cast.from)) {
      LOADPLAN_FOR_CAST_DTYPES(LOADPLAN_CASE)
      default:
        return;
    }
#undef LOADPLAN_CASE
#define LOADPLAN_CASE(name, type)                                                               \
  case c10::ScalarType::name:                                                                   \
    if constexpr (sizeof(type) == kTo && (kIsCast<type, Wide> || std::is_same_v<type, Wide>)) { \
      Narrow<type>(wide, &stored);                                                              \
      break;                                                                                    \
    } else {                                                                                    \
      return;                                                                                   \
    }
    switch (static_cast<c10::ScalarType>(cast.to)) {
      LOADPLAN_FOR_CAST_DTYPES(LOADPLAN_CASE)
      default:
        return;
    }
#undef LOADPLAN_CASE
    Store<Stored>(address, stored);
  }

 private:
  template <typename From>
  LOADPLAN_ON_DEVICE LOADPLAN_INLINE static void Widen(const Loaded& loaded, Wide* wide) {
    // A byte of a bool may hold any number.
    std::conditional_t<std::is_same_v<From, bool>, std::uint8_t, From> from[kItems];
    std::memcpy(from, &loaded, sizeof(loaded));
    LOADPLAN_UNROLL
    for (std::uint32_t i = 0; i < kItems; ++i) {
      if constexpr (std::is_same_v<From, bool>) {
        wide[i] = from[i] != 0;
      } else {
        wide[i] = c10::convert<Wide, From>(from[i]);
      }
    }
  }
  template <typename To>
  LOADPLAN_ON_DEVICE LOADPLAN_INLINE static void Narrow(const Wide* wide, Stored* stored) {
    To to[kItems];
    LOADPLAN_UNROLL
    for (std::uint32_t i = 0; i < kItems; ++i) to[i] = c10::convert<To, Wide>(wide[i]);
    std::memcpy(stored, to, sizeof(to));
  }
};

// A function for all pairs of these sizes, called once for a tile: in one piece all of them would
// be a kernel that takes minutes to compile, twice. (A job that is handed over as such nvcc copies
// to the stack.)
template <typename Wide, std::size_t kTo, std::size_t kFrom>
LOADPLAN_ON_DEVICE LOADPLAN_NOINLINE void CastTile(std::uint64_t job_address, std::uint64_t from,
                                                   std::uint32_t start, std::uint32_t stop,
                                                   std::uint32_t thread,
                                                   std::uint32_t num_threads) {
  const CopyJob job = *reinterpret_cast<const CopyJob*>(job_address);
  using One = MoveItems<Wide, kTo, kFrom, 1>;
  constexpr std::uint32_t kMost = kMaxCopyUnit / One::kUnit;
  constexpr std::uint32_t kItems = kMost < 8 ? kMost : 8;
  using Many = MoveItems<Wide, kTo, kFrom, kItems>;
  if (job.unit == kMaxCopyUnit && from % (kItems * kFrom) == 0) {
    CopyUnits(job, from, start, stop, thread, num_threads, Many{job.cast});
  } else {
    CopyUnits(job, from, start, stop, thread, num_threads, One{job.cast});
  }
}

template <typename From>
LOADPLAN_ON_DEVICE inline void CastTileFrom(const CopyJob& job, std::uint64_t from,
                                            std::uint32_t start, std::uint32_t stop,
                                            std::uint32_t thread, std::uint32_t num_threads) {
  const auto address = reinterpret_cast<std::uint64_t>(&job);
#define LOADPLAN_CASE(name, type)                                                                 \
  case c10::ScalarType::name:                                                                     \
    return CastTile<WideOf<From>, sizeof(type), sizeof(From)>(address, from, start, stop, thread, \
                                                              num_threads);
  switch (static_cast<c10::ScalarType>(job.cast.to)) {
    LOADPLAN_FOR_CAST_DTYPES(LOADPLAN_CASE)
    default:
      return;
  }
#undef LOADPLAN_CASE
}

template <typename From>
constexpr bool HasCastFrom(std::int8_t to) {
#define LOADPLAN_CASE(name, type) \
  case c10::ScalarType::name:     \
    return kIsCast<type, From>;
  switch (static_cast<c10::ScalarType>(to)) {
    LOADPLAN_FOR_CAST_DTYPES(LOADPLAN_CASE)
    default:
      return false;
  }
#undef LOADPLAN_CASE
}

}  // namespace cast_tile_internal

struct TorchCasts {
  static constexpr bool kIsAny = true;

  // Whether `cast` is a pair that Run converts.
  static constexpr bool Has(CopyCast cast) {
    using cast_tile_internal::HasCastFrom;
#define LOADPLAN_CASE(name, type) \
  case c10::ScalarType::name:     \
    return HasCastFrom<type>(cast.to);
    switch (static_cast<c10::ScalarType>(cast.from)) {
      LOADPLAN_FOR_CAST_DTYPES(LOADPLAN_CASE)
      default:
        return false;
    }
#undef LOADPLAN_CASE
  }

  // The share of `thread` in positions [start, stop) of a job; `from` is where its first item lies.
  LOADPLAN_ON_DEVICE static void Run(const CopyJob& job, std::uint64_t from, std::uint32_t start,
                                     std::uint32_t stop, std::uint32_t thread,
                                     std::uint32_t num_threads) {
    using cast_tile_internal::CastTileFrom;
#define LOADPLAN_CASE(name, type) \
  case c10::ScalarType::name:     \
    return CastTileFrom<type>(job, from, start, stop, thread, num_threads);
    switch (static_cast<c10::ScalarType>(job.cast.from)) {
      LOADPLAN_FOR_CAST_DTYPES(LOADPLAN_CASE)
      default:
        return;
    }
#undef LOADPLAN_CASE
  }
};
#undef LOADPLAN_FOR_CAST_DTYPES

}  // namespace loadplan

#endif  // LOADPLAN_CUDA_CAST_TILE_H_
