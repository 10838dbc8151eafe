#include "backend/cast_bits.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <utility>
#include <vector>

#include "backend/mode.h"
#include "backend/trace_tensor.h"

namespace loadplan {
namespace {

bool HasNaN(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
    case at::kFloat8_e4m3fnuz:
    case at::kFloat8_e5m2fnuz:
      return true;
    default:
      return false;
  }
}

// Numbers of NaN: both signs, every single bit of the payload, none but that bit, all.
at::Tensor Probe(at::ScalarType dtype) {
  const auto bits = static_cast<int>(c10::elementSize(dtype)) * 8;
  std::vector<std::int64_t> patterns;
  if (bits <= 8) {
    for (std::int64_t i = 0; i < 256; ++i) patterns.push_back(i);
  } else {
    const int payload = dtype == at::kDouble  ? 52
                        : dtype == at::kFloat ? 23
                        : dtype == at::kHalf  ? 10
                                              : 7;
    const std::uint64_t sign = std::uint64_t{1} << (bits - 1);
    const std::uint64_t all = (std::uint64_t{1} << payload) - 1;
    const std::uint64_t infinity = (sign - 1) & ~all;
    for (const std::uint64_t s : {std::uint64_t{0}, sign}) {
      for (int bit = 0; bit < payload; ++bit) {
        const std::uint64_t one = std::uint64_t{1} << bit;
        for (const std::uint64_t p : {one, all & ~one, all >> bit, all & ~(one - 1)})
          patterns.push_back(static_cast<std::int64_t>(s | infinity | (p == 0 ? one : p)));
      }
    }
  }
  at::Tensor probe = at::tensor(patterns, at::kLong).to(BitsOf(dtype)).view(dtype);
  // A whole number of vectors, so that no item of the reference is a last one.
  return probe.repeat({64});
}

at::Tensor Bits(const at::Tensor& tensor) { return tensor.view(BitsOf(tensor.scalar_type())); }

// `items` as another dtype, in a row, converted one by one.
at::Tensor ConvertOneByOne(const at::Tensor& items, at::ScalarType dtype) {
  // One more than there are: a single item counts as a row.
  at::Tensor spaced = at::zeros({items.numel() + 1, 2}, items.options()).select(1, 0);
  spaced.slice(0, 0, items.numel()).view(items.sizes()).copy_(items);
  const at::Tensor converted = at::empty({items.numel() + 1}, items.options().dtype(dtype));
  return converted.copy_(spaced).slice(0, 0, items.numel()).view(items.sizes());
}

CastBits Ask(at::ScalarType from, at::ScalarType to) {
  if (from == to || !HasNaN(from)) return CastBits::kEqual;
  const ModeOff mode_off;
  const at::Tensor probe = Probe(from);
  const at::Tensor in_rows = at::empty(probe.sizes(), at::TensorOptions(to)).copy_(probe);
  const at::Tensor one_by_one = ConvertOneByOne(probe, to);
  const at::Tensor once = probe.slice(0, 0, probe.numel() / 64);
  const bool is_equal = at::equal(Bits(in_rows), Bits(one_by_one));
  for (const int64_t length : {1, 3, 7}) {
    for (int64_t start = 0; start + length <= once.numel(); start += length) {
      const at::Tensor row = at::empty({length}, at::TensorOptions(to));
      row.copy_(once.slice(0, start, start + length));
      if (!at::equal(Bits(row), Bits(in_rows).slice(0, start, start + length)))
        return is_equal ? CastBits::kLastOfRow : CastBits::kByPosition;
    }
  }
  return is_equal ? CastBits::kEqual : CastBits::kByRow;
}

}  // namespace

at::ScalarType BitsOf(at::ScalarType dtype) {
  switch (c10::elementSize(dtype)) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    default:
      return at::kLong;
  }
}

CastBits CastBitsOf(at::ScalarType from, at::ScalarType to) {
  constexpr auto kCount = static_cast<std::size_t>(at::ScalarType::NumOptions);
  // 0: not asked yet.
  static std::array<std::array<std::atomic<std::uint8_t>, kCount>, kCount> known{};
  std::atomic<std::uint8_t>& cell =
      known[static_cast<std::size_t>(from)][static_cast<std::size_t>(to)];
  std::uint8_t bits = cell.load(std::memory_order_relaxed);
  if (bits == 0) {
    bits = static_cast<std::uint8_t>(static_cast<std::uint8_t>(Ask(from, to)) + 1);
    cell.store(bits, std::memory_order_relaxed);
  }
  return static_cast<CastBits>(bits - 1);
}

namespace {

// As at::native::copy_ builds it.
at::TensorIterator CopyIterator(const at::Tensor& to, const at::Tensor& from) {
  // Dimensions of one item are not merged on meta; their strides would count.
  const at::Tensor output = MetaLike(to).squeeze();
  const at::Tensor input = MetaLike(from).expand(to.sizes()).squeeze();
  return at::TensorIteratorConfig()
      .set_check_mem_overlap(false)
      .add_output(output)
      .add_const_input(input)
      .resize_outputs(false)
      .check_all_same_dtype(false)
      .check_all_same_device(false)
      .build();
}

// Whether no row of `to.copy_(from)`, nor what a thread gets of one, ends within a vector.
bool FillsVectors(const at::Tensor& to, const at::Tensor& from) {
  constexpr int64_t kItems = 64;  // a multiple of every vector
  if (to.dim() == 0 || to.numel() < kItems) return false;
  const ModeOff mode_off;
  if (CopyIterator(to, from).shape()[0] % kItems != 0) return false;
  const int64_t grain = at::internal::GRAIN_SIZE;
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), at::divup(to.numel(), grain));
  return at::divup(to.numel(), threads) % kItems == 0;
}

}  // namespace

bool ConvertsScattered(const at::Tensor& to, const at::Tensor& from) {
  // A tensor without dimensions has no row; one item in a dimension is a row.
  if (to.dim() == 0) return true;
  if (to.numel() < 2) return false;
  const ModeOff mode_off;
  const at::TensorIterator items = CopyIterator(to, from);
  return items.strides(0)[0] != static_cast<int64_t>(to.element_size()) ||
         items.strides(1)[0] != static_cast<int64_t>(from.element_size());
}

namespace {

// Without dimensions, an item is the last of its row where such differ.
bool IsScatteredOf(const at::Tensor& to, const at::Tensor& from) {
  return to.dim() > 0 && ConvertsScattered(to, from);
}

}  // namespace

bool CastIsMovable(const at::Tensor& to, const at::Tensor& from, bool* scattered) {
  *scattered = false;
  switch (CastBitsOf(from.scalar_type(), to.scalar_type())) {
    case CastBits::kEqual:
      return true;
    case CastBits::kByRow:
      *scattered = ConvertsScattered(to, from);
      return true;
    case CastBits::kLastOfRow:
      *scattered = IsScatteredOf(to, from) || FillsVectors(to, from);
      return *scattered;
    case CastBits::kByPosition:
      *scattered = IsScatteredOf(to, from);
      return *scattered;
  }
  return false;
}

void CopyConverting(const at::Tensor& to, const at::Tensor& from, const CastStep& step) {
  const CastBits bits = to.is_cpu() && from.is_cpu()
                            ? CastBitsOf(from.scalar_type(), to.scalar_type())
                            : CastBits::kEqual;
  const bool is_scattered =
      bits == CastBits::kByRow ? ConvertsScattered(to, from) : IsScatteredOf(to, from);
  if (bits == CastBits::kEqual || is_scattered == step.scattered ||
      (bits == CastBits::kLastOfRow && step.scattered && FillsVectors(to, from))) {
    to.copy_(from);
    return;
  }
  if (step.scattered) {
    to.copy_(ConvertOneByOne(from, to.scalar_type()));
    return;
  }
  const at::Tensor converted = at::empty({to.numel()}, to.options());
  to.copy_(converted.copy_(from.contiguous().view({to.numel()})).view(to.sizes()));
}

}  // namespace loadplan
