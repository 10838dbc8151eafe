#include "lifecycle/cast_check.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <cstdint>
#include <cstring>
#include <mutex>
#include <random>
#include <span>
#include <tuple>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "backend/cast_bits.h"
#include "geometry/copy_jobs.h"
#include "lifecycle/attempt.h"

namespace loadplan {
namespace {

// Of the lowest `bits` bits of a number: none, all, and those around some of them.
std::vector<std::uint64_t> LowBits(int bits) {
  const std::uint64_t all = (std::uint64_t{1} << bits) - 1;
  std::vector<std::uint64_t> lows = {0, all};
  for (int bit = 0; bit < bits; ++bit) {
    // Of 8 bytes: where float, half, bfloat16 and float8 cut a mantissa of 52 bits, or 63.
    if (bits > 16 && bit > 1 && bit < 26) continue;
    const std::uint64_t one = std::uint64_t{1} << bit;
    for (const std::uint64_t low : {one - 1, one, one + 1}) lows.push_back(low & all);
  }
  return lows;
}

// Numbers of `nbytes` bytes; a multiple of 64 of them.
std::vector<std::uint64_t> Numbers(std::size_t nbytes) {
  constexpr std::uint64_t kHighs = std::uint64_t{1} << 16;
  std::vector<std::uint64_t> numbers;
  if (nbytes <= 2) {
    for (std::uint64_t i = 0; i < std::uint64_t{1} << (8 * nbytes); ++i) numbers.push_back(i);
    return numbers;
  }
  const int rest = static_cast<int>(8 * nbytes) - 16;
  for (const std::uint64_t low : LowBits(rest)) {
    for (std::uint64_t high = 0; high < kHighs; ++high) numbers.push_back((high << rest) | low);
  }
  // And of every size, for integers.
  std::mt19937_64 gen(1);
  for (std::uint64_t i = 0; i < kHighs; ++i) {
    const std::uint64_t number = gen() >> (i % 64);
    numbers.push_back(i % 2 == 0 ? number : ~number);
  }
  return numbers;
}

at::Tensor Values(at::ScalarType dtype) {
  const std::size_t nbytes = c10::elementSize(dtype);
  const std::vector<std::uint64_t> numbers = Numbers(nbytes);
  const at::Tensor values = at::empty({static_cast<int64_t>(numbers.size())}, dtype);
  auto* bytes = static_cast<std::byte*>(values.mutable_data_ptr());
  for (const std::uint64_t number : numbers) {
    std::memcpy(bytes, &number, nbytes);
    bytes += nbytes;
  }
  return values;
}

// Items at every other place.
at::Tensor Scattered(int64_t count, const at::TensorOptions& options) {
  return at::zeros({count, 2}, options).select(1, 0);
}

bool IsEqual(const at::Tensor& a, const at::Tensor& b) {
  const at::ScalarType bits = BitsOf(a.scalar_type());
  return at::equal(a.view(bits), b.view(bits));
}

// Puts `to.copy_(from)` on the stream, by the engine; both have one dimension.
void CastByEngine(const CopyDevice& device, const at::Tensor& to, const at::Tensor& from,
                  CopyCast cast) {
  const auto side_of = [](const at::Tensor& tensor) {
    const auto itemsize = static_cast<Index>(tensor.element_size());
    return MapSide{0, {tensor.stride(0) * itemsize}, itemsize};
  };
  const StridedMap map =
      StridedMap::Unchecked({to.numel()}, side_of(to), side_of(from), /*is_cast=*/true);
  std::vector<CopyJob> jobs;
  const auto address = reinterpret_cast<std::uint64_t>(to.mutable_data_ptr());
  TORCH_CHECK(AppendCopyJobs(map, address, 1, &jobs, cast), "a cast is more than one job");
  SmallCopyBatch batch;
  batch.jobs[0] = jobs[0];
  batch.items[0].from = reinterpret_cast<std::uint64_t>(from.const_data_ptr());
  batch.num_items = 1;
  batch.num_tiles = NumberTiles({}, batch.jobs, std::span(batch.items).first(1));
  batch.has_casts = true;
  const char* const error = device.engine->run_small(batch, device.stream());
  TORCH_CHECK(error == nullptr, "a cast could not be tried: ", error);
}

bool Ask(const CopyDevice& device, CopyCast cast) {
  const auto from = static_cast<at::ScalarType>(cast.from);
  const auto to = static_cast<at::ScalarType>(cast.to);
  // There the last items of a row may be converted in a third way.
  if (device.device.is_cpu() && CastBitsOf(from, to) != CastBits::kEqual) return false;
  c10::OptionalDeviceGuard guard;
  if (!device.device.is_cpu()) guard.reset_device(device.device);
  const at::TensorOptions options = at::TensorOptions(to).device(device.device);
  const at::Tensor row = Values(from).to(device.device);
  const at::Tensor scattered = Scattered(row.numel(), row.options()).copy_(row);
  const at::Tensor want = at::empty({row.numel()}, options).copy_(row);
  if (!IsEqual(want, Scattered(row.numel(), options).copy_(scattered))) return false;
  const at::Tensor got = at::zeros({row.numel()}, options);
  const at::Tensor got_scattered = Scattered(row.numel(), options);
  CastByEngine(device, got, row, cast);
  CastByEngine(device, got_scattered, scattered, cast);
  return IsEqual(want, got) && IsEqual(want, got_scattered);
}

}  // namespace

bool CastsAsTorch(const CopyDevice& device, CopyCast cast) {
  using Key = std::tuple<const CopyEngine*, at::DeviceType, int, int, int>;
  static std::mutex mutex;
  static auto& known = *new absl::flat_hash_map<Key, bool>();
  const Key key{device.engine, device.device.type(), device.device.index(), cast.from, cast.to};
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  bool is_equal = false;
  const absl::Status status = Attempt([&] { is_equal = Ask(device, cast); });
  if (status.ok()) known.emplace(key, is_equal);
  return is_equal;
}

}  // namespace loadplan
