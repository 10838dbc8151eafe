// Statements that move elements by indices, and those that read values.
#include <ATen/ATen.h>

#include <algorithm>

#include "tests/differential/generator.h"
#include "tests/differential/value_bounds.h"

namespace loadplan::testing {

// Elements moved by indices that the loader knows.
int Generator::Moved(int reg) {
  const at::Tensor& self = At(reg);
  if (self.dim() == 0 || self.numel() == 0) return reg;
  const int d = Dim(reg);
  const auto size = static_cast<int>(self.size(d));
  std::vector<std::int64_t> ints;
  switch (Uniform(0, 4)) {
    case 0:
      for (int count = Uniform(1, 4); count > 0; --count)
        ints.push_back(Uniform(0, static_cast<int>(self.size(0)) - 1));
      return EmitNew(Bound(reg), Op::kIndex, {reg}, ints);
    case 1:
      ints.push_back(d);
      for (std::int64_t i = 0; i < self.numel(); ++i) ints.push_back(Uniform(0, size - 1));
      return EmitNew(Bound(reg), Op::kGather, {reg}, ints);
    case 2: {
      for (int tries = 0; tries < 6; ++tries) {
        const int other = Uniform(0, static_cast<int>(registers_.size()) - 1);
        if (!At(other).defined() || At(other).sizes() != self.sizes() ||
            At(other).scalar_type() != self.scalar_type()) {
          continue;
        }
        for (std::int64_t i = 0; i < self.numel(); ++i) ints.push_back(Uniform(0, 1));
        return EmitNew(std::max(Bound(reg), Bound(other)), Op::kWhere, {reg, other}, ints);
      }
      return reg;
    }
    case 3:
      return EmitNew(Bound(reg), Op::kRoll, {reg}, {Uniform(-3, 3), d});
    default:
      return EmitNew(Bound(reg), Op::kRepeat, {reg}, {Uniform(1, 2), d});
  }
}

// Arithmetic and choices by the value of an item of a checkpoint tensor.
int Generator::ByValue(int reg) {
  const int item = Views(Uniform(0, program_.num_sources() - 1), 2);
  if (!At(item).defined() || At(item).numel() != 1 || !(Bound(item) < 1e4)) return reg;
  if (Chance(50)) {
    const at::ScalarType dtype = At(reg).scalar_type();
    if (!c10::isFloatingType(dtype) || dtype == at::kFloat8_e4m3fn || Bound(reg) > 1e4) return reg;
    return EmitNew(Bound(reg) * std::max(1.0, Bound(item)), Op::kMulItem, {reg, item});
  }
  for (int tries = 0; tries < 6; ++tries) {
    const int other = Uniform(0, static_cast<int>(registers_.size()) - 1);
    if (!At(other).defined() || At(other).sizes() != At(reg).sizes() ||
        At(other).scalar_type() != At(reg).scalar_type()) {
      continue;
    }
    return EmitNew(std::max(Bound(reg), Bound(other)), Op::kBranch, {reg, item, other}, {},
                   Pick({0.0, -3.0, 5.0}));
  }
  return reg;
}

// Writes rows of `to` that an index names, or elements that a mask names.
bool Generator::MovedInto(int to, int from) {
  const at::Tensor& self = At(to);
  if (self.dim() == 0 || self.numel() == 0 || TouchesTwice(self)) return false;
  std::vector<std::int64_t> ints;
  if (Chance(40)) {
    for (std::int64_t i = 0; i < self.numel(); ++i) ints.push_back(Uniform(0, 1));
    return Emit(Op::kMaskedFill, {to}, ints, Pick({0.0, 1.0, 3.0})) != to;
  }
  if (At(from).sizes() != self.sizes() || At(from).scalar_type() != self.scalar_type() ||
      MayOverlap(self, At(from))) {
    return false;
  }
  for (std::int64_t row = 0; row < self.size(0); ++row) ints.push_back(row);
  std::shuffle(ints.begin(), ints.end(), gen_);
  StorageBound(to) = std::max(StorageBound(to), Bound(from));
  return Emit(Op::kIndexPut, {to, from}, ints) != to;
}

}  // namespace loadplan::testing
