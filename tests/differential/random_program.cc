#include "tests/differential/random_program.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "tests/differential/generator.h"
#include "tests/differential/value_bounds.h"

namespace loadplan::testing {

double Generator::Bound(int reg) {
  return reinterpreted_[static_cast<std::size_t>(reg)] ? kAnything : StorageBound(reg);
}

void Generator::MakeSources() {
  const at::ScalarType common = PickDtype();
  for (int n = Uniform(1, 5); n > 0; --n) {
    const SourceSpec spec{PickSizes(), Chance(60) ? common : PickDtype()};
    sources_.push_back(RandomValues(gen_, spec.sizes, spec.dtype));
    bounds_[sources_.back().storage().unsafeGetStorageImpl()] = BoundOf(spec.dtype);
    program_.sources.push_back(spec);
  }
  registers_.resize(sources_.size());
  reinterpreted_.resize(sources_.size());
}

void Generator::AddTarget(int storage, at::ScalarType dtype, std::int64_t numel) {
  TargetSpec target{storage, dtype, {}, {}, 0};
  const int rank = Uniform(1, 3);
  std::int64_t room = numel;
  for (int d = 0; d < rank; ++d) {
    const int most = static_cast<int>(std::min<std::int64_t>(room, d + 1 == rank ? 16 : 6));
    target.sizes.push_back(Uniform(std::max(1, most / 2), most));
    room /= target.sizes.back();
  }
  std::int64_t stride = 1;
  for (int d = rank; d-- > 0;) {
    target.strides.insert(target.strides.begin(), stride);
    stride *= target.sizes[static_cast<std::size_t>(d)];
  }
  if (Chance(40)) target.offset = Uniform(0, static_cast<int>(numel - stride));
  if (rank > 1 && Chance(20)) {
    std::swap(target.sizes[0], target.sizes[1]);
    std::swap(target.strides[0], target.strides[1]);
  }
  program_.targets.push_back(target);
}

void Generator::MakeTargets() {
  std::vector<at::Tensor> storages;
  for (int s = Uniform(1, 3); s > 0; --s) {
    const at::ScalarType dtype = Chance(60) ? program_.sources[0].dtype : PickDtype();
    const StorageSpec spec{Uniform(4, 60), dtype};
    const int id = static_cast<int>(program_.storages.size());
    program_.storages.push_back(spec);
    storages.push_back(RandomValues(gen_, {spec.numel}, dtype));
    double& bound = bounds_[storages.back().storage().unsafeGetStorageImpl()];
    bound = BoundOf(dtype);
    AddTarget(id, dtype, spec.numel);
    if (Chance(15)) AddTarget(id, dtype, spec.numel);
    if (Chance(4)) {
      AddTarget(id, at::kByte, spec.numel);
      if (dtype != at::kByte) bound = kAnything;
    }
  }
  for (const at::Tensor& target : TargetViews(program_, storages)) {
    registers_.push_back(target);
    reinterpreted_.push_back(false);
  }
}

int Generator::Emit(Op op, std::vector<int> args, std::vector<std::int64_t> ints, double scalar,
                    at::ScalarType dtype) {
  Statement statement{op, at_, std::move(args), std::move(ints), scalar, dtype};
  std::vector<at::Tensor> tensors;
  bool reinterpreted = op == Op::kViewDtype;
  for (const int arg : statement.args) {
    tensors.push_back(At(arg));
    reinterpreted |= reinterpreted_[static_cast<std::size_t>(arg)];
  }
  at::Tensor result;
  try {
    result = Apply(statement, tensors);
  } catch (const std::exception&) {
    return statement.args[0];
  }
  if (result.defined() && result.numel() > 400) return statement.args[0];
  const bool is_view = op < Op::kReshape;
  program_.statements.push_back(std::move(statement));
  registers_.push_back(result);
  reinterpreted_.push_back(is_view && reinterpreted);
  return static_cast<int>(registers_.size()) - 1;
}

int Generator::EmitNew(double bound, Op op, std::vector<int> args, std::vector<std::int64_t> ints,
                       double scalar, at::ScalarType dtype) {
  const int first = args[0];
  const int reg = Emit(op, args, std::move(ints), scalar, dtype);
  if (reg == first) return reg;
  for (const int arg : args) {
    if (At(reg).storage().unsafeGetStorageImpl() == At(arg).storage().unsafeGetStorageImpl()) {
      reinterpreted_[static_cast<std::size_t>(reg)] = reinterpreted_[static_cast<std::size_t>(arg)];
      return reg;  // `contiguous` and the like gave a view
    }
  }
  StorageBound(reg) = bound;
  return reg;
}

bool Generator::EmitCopy(int to, int from) {
  if (MayOverlap(At(to), At(from)) || TouchesTwice(At(to))) return false;
  const std::optional<double> bound =
      CastBound(Bound(from), At(from).scalar_type(), At(to).scalar_type());
  if (!bound.has_value()) return false;
  if (Emit(Op::kCopy, {to, from}) == to) return false;
  const bool opaque = reinterpreted_[static_cast<std::size_t>(to)];
  StorageBound(to) = opaque ? kAnything : std::max(StorageBound(to), *bound);
  return true;
}

int Generator::View(int reg) {
  const at::Tensor& self = At(reg);
  if (self.dim() == 0) return Chance(50) ? Emit(Op::kUnsqueeze, {reg}, {0}) : reg;
  const int d = Dim(reg);
  const int e = Dim(reg);
  const int size = static_cast<int>(self.size(d));
  switch (Uniform(0, 13)) {
    case 0:
    case 1:
    case 2: {
      const int length = Uniform(Chance(3) ? 0 : std::min(1, size), size);
      return Emit(Op::kNarrow, {reg}, {d, Uniform(0, size - length), length});
    }
    case 3:
      return Emit(Op::kSlice, {reg}, {d, Uniform(0, size / 2), size, Uniform(1, 3)});
    case 4:
    case 5:
      return Emit(Op::kTranspose, {reg}, {d, e});
    case 6: {
      std::vector<std::int64_t> order;
      for (int i = 0; i < self.dim(); ++i) order.push_back(i);
      std::shuffle(order.begin(), order.end(), gen_);
      return Emit(Op::kPermute, {reg}, order);
    }
    case 7: {
      const int part = Uniform(1, std::max(1, size));
      return Chance(50) ? Emit(Op::kSplit, {reg}, {part, d, Uniform(0, 1)})
                        : Emit(Op::kChunk, {reg}, {Uniform(1, 3), d, 0});
    }
    case 8:
      return Chance(50) ? Emit(Op::kDetach, {reg}) : Emit(Op::kSqueeze, {reg});
    default:
      return RankChangingView(reg);
  }
}

int Generator::RankChangingView(int reg) {
  const at::Tensor& self = At(reg);
  const int d = Dim(reg);
  const int size = static_cast<int>(self.size(d));
  if (size == 0) return reg;
  switch (Uniform(0, 8)) {
    case 0:
      return Emit(Op::kSelect, {reg}, {d, Uniform(0, size - 1)});
    case 1:
      return Emit(Op::kUnbind, {reg}, {d, Uniform(0, size - 1)});
    case 2: {
      const int dim = Uniform(0, static_cast<int>(self.dim()));
      const int one = Emit(Op::kUnsqueeze, {reg}, {dim});
      if (Chance(60)) return one;
      std::vector<std::int64_t> sizes = At(one).sizes().vec();
      sizes[static_cast<std::size_t>(dim)] = 2;
      return Emit(Op::kExpand, {one}, sizes);
    }
    case 3:
      return Emit(Op::kFlatten, {reg}, {0, self.dim() - 1});
    case 4:
      if (size % 2 == 0 && self.dim() < 4) {
        std::vector<std::int64_t> sizes = self.sizes().vec();
        sizes[static_cast<std::size_t>(d)] /= 2;
        sizes.insert(sizes.begin() + d, 2);
        return Emit(Op::kView, {reg}, sizes);
      }
      return Emit(Op::kView, {reg}, {-1});
    case 5:
      return Emit(Op::kDiagonal, {reg}, {Uniform(-1, 1), 0, 1});
    case 6:
      return Chance(30) ? Emit(Op::kUnfold, {reg}, {d, Uniform(1, size), Uniform(1, 2)}) : reg;
    case 7: {
      if (!Chance(40)) return reg;
      const auto room =
          static_cast<int>(self.storage().nbytes()) / static_cast<int>(self.element_size());
      const int rows = Uniform(1, 3);
      const int columns = Uniform(1, 4);
      const int stride = Uniform(0, 5);
      const int offset = Uniform(0, std::max(0, room - (rows - 1) * stride - columns));
      return Emit(Op::kAsStrided, {reg}, {rows, columns, stride, 1, offset});
    }
    default: {
      if (!Chance(20)) return reg;
      const auto to = self.element_size() == 2 ? Pick({at::kHalf, at::kBFloat16, at::kByte})
                                               : Pick({at::kByte, at::kChar, at::kInt, at::kFloat});
      return to == self.scalar_type() ? reg : Emit(Op::kViewDtype, {reg}, {}, 0, to);
    }
  }
}

// A destination of a name: most of the time in rows of its own.
int Generator::Destination(int name) {
  const int count = static_cast<int>(program_.targets.size());
  const int first = program_.num_sources();
  int reg = first + (Chance(70) ? name % count : Uniform(0, count - 1));
  const auto rows = static_cast<int>(At(reg).size(0));
  const int names = program_.num_sources();
  const int sharing = (names + count - 1) / count;
  if (sharing > 1 && rows >= sharing && Chance(90)) {
    const int share = rows / sharing;
    reg = Emit(Op::kNarrow, {reg}, {0, (name / count) * share, share});
  }
  return Views(reg, Pick({0, 0, 1, 1, 2}));
}

// Narrows both until their shapes agree (now and then `from` is broadcast).
std::pair<int, int> Generator::Match(int from, int to) {
  while (At(from).dim() != At(to).dim()) {
    int& larger = At(from).dim() > At(to).dim() ? from : to;
    const int d = Dim(larger);
    if (At(larger).size(d) == 0) return {from, to};
    larger = Emit(Op::kSelect, {larger}, {d, Uniform(0, static_cast<int>(At(larger).size(d)) - 1)});
  }
  for (int d = 0; d < static_cast<int>(At(to).dim()); ++d) {
    const int from_size = static_cast<int>(At(from).size(d));
    const int to_size = static_cast<int>(At(to).size(d));
    if (from_size > 0 && to_size > 0 && Chance(6)) {
      if (from_size > 1) from = Emit(Op::kNarrow, {from}, {d, Uniform(0, from_size - 1), 1});
    } else if (from_size > to_size) {
      from = Emit(Op::kNarrow, {from}, {d, Uniform(0, from_size - to_size), to_size});
    } else if (to_size > from_size) {
      to = Emit(Op::kNarrow, {to}, {d, Uniform(0, to_size - from_size), from_size});
    }
  }
  return {from, to};
}

int Generator::Arithmetic(int reg) {
  const at::ScalarType dtype = At(reg).scalar_type();
  const double bound = Bound(reg);
  if (!c10::isFloatingType(dtype) || dtype == at::kFloat8_e4m3fn || bound > 1e4) return reg;
  switch (Uniform(0, 4)) {
    case 0:
      return EmitNew(bound, Op::kNeg, {reg});
    case 1:
      return EmitNew(bound * 2, Op::kMulScalar, {reg}, {}, Pick({0.5, -1.0, 2.0, 1.7}));
    case 2:
      if (At(reg).dim() == 0) return reg;
      return EmitNew(bound * static_cast<double>(At(reg).numel()), Op::kSum, {reg}, {Dim(reg)});
    case 3:
      return bound > 9 ? reg : EmitNew(std::exp(bound), Op::kExp, {reg});
    default: {
      const int other = Uniform(0, static_cast<int>(registers_.size()) - 1);
      if (!At(other).defined() || Bound(other) > 1e4) return reg;
      if (!c10::isFloatingType(At(other).scalar_type())) return reg;
      const auto [a, b] = Match(reg, other);
      return EmitNew(bound + Bound(b), Op::kAdd, {a, b});
    }
  }
}

int Generator::Join(int reg) {
  int other = reg;
  for (int tries = 0; tries < 4; ++tries) {
    const int candidate = Uniform(0, static_cast<int>(registers_.size()) - 1);
    if (At(candidate).defined() && At(candidate).scalar_type() == At(reg).scalar_type() &&
        At(candidate).dim() == At(reg).dim()) {
      other = candidate;
    }
  }
  const double bound = std::max(Bound(reg), Bound(other));
  if (Chance(40) && At(other).sizes() == At(reg).sizes())
    return EmitNew(bound, Op::kStack, {reg, other}, {0});
  if (At(reg).dim() == 0) return reg;
  return EmitNew(bound, Op::kCat, {reg, other}, {Dim(reg)});
}

// A temporary that is filled in two parts.
int Generator::Piecewise(int reg) {
  if (At(reg).dim() == 0 || At(reg).numel() == 0) return reg;
  const bool real = Chance(30);
  const int whole =
      real ? EmitNew(BoundOf(at::kFloat), Op::kRealZeros, {reg}, {}, 0, At(reg).scalar_type())
           : EmitNew(Bound(reg), Op::kEmptyLike, {reg});
  if (whole == reg) return reg;
  const int d = Dim(reg);
  const std::int64_t size = At(reg).size(d);
  const std::int64_t half = Uniform(0, static_cast<int>(size));
  StorageBound(whole) = std::max(StorageBound(whole), Bound(reg));
  const bool flipped = half * 2 == size && Chance(50);
  for (int part = 0; part < 2; ++part) {
    const std::int64_t start = part == 0 ? 0 : half;
    const std::int64_t length = part == 0 ? half : size - half;
    const int from = Emit(Op::kNarrow, {reg}, {d, flipped ? half - start : start, length});
    const int to = Emit(Op::kNarrow, {whole}, {d, start, length});
    Emit(Op::kCopy, {to, from});
  }
  return whole;
}

int Generator::Transform(int reg) {
  const at::Tensor& self = At(reg);
  switch (Uniform(0, 14)) {
    case 10:
    case 11:
      return Moved(reg);
    case 12:
      return Chance(15) ? ByValue(reg) : reg;
    case 0:
      return EmitNew(Bound(reg), Op::kClone, {reg});
    case 1:
      return EmitNew(Bound(reg), Op::kContiguous, {reg});
    case 2:
    case 3: {
      const at::ScalarType to = PickDtype();
      const std::optional<double> bound = CastBound(Bound(reg), self.scalar_type(), to);
      return bound.has_value() ? EmitNew(*bound, Op::kTo, {reg}, {}, 0, to) : reg;
    }
    case 4:
    case 5:
      return Join(reg);
    case 6:
      return EmitNew(Bound(reg), Op::kReshape, {reg}, {-1});
    case 7:
      return Piecewise(reg);
    case 8: {
      if (self.dim() == 0) return reg;
      if (Chance(50)) return EmitNew(Bound(reg), Op::kFlip, {reg}, {Dim(reg)});
      const int d = Dim(reg);
      const auto size = static_cast<int>(self.size(d));
      if (size == 0) return reg;
      std::vector<std::int64_t> ints{d};
      for (int count = Uniform(1, 4); count > 0; --count) ints.push_back(Uniform(0, size - 1));
      return EmitNew(Bound(reg), Op::kIndexSelect, {reg}, ints);
    }
    case 9:
      InPlace(Chance(50) ? reg : EmitNew(Bound(reg), Op::kClone, {reg}));
      return reg;
    default:
      return Arithmetic(reg);
  }
}

void Generator::InPlace(int reg) {
  const double bound = Bound(reg);
  const at::ScalarType dtype = At(reg).scalar_type();
  if (TouchesTwice(At(reg)) || bound > 1000) return;
  const bool is_float = c10::isFloatingType(dtype) && dtype != at::kFloat8_e4m3fn;
  const int kind = Uniform(0, is_float ? 5 : 2);
  if (kind == 0) {
    Emit(Op::kZero, {reg});
  } else if (kind == 1) {
    Emit(Op::kFill, {reg}, {}, Pick({0.0, 1.0, 3.0, 7.0}));
  } else if (kind == 2) {
    const auto from = Chance(50) ? dtype : at::kFloat;
    if (dtype != at::kByte) Emit(Op::kCopyConstant, {reg}, {Uniform(0, 6)}, 0, from);
  } else if (kind == 3) {
    Emit(Op::kMulInPlace, {reg}, {}, Pick({0.5, 2.0, -1.0}));
    StorageBound(reg) = 2 * bound;
  } else if (kind == 4) {
    Emit(Op::kAddInPlace, {reg}, {}, Pick({1.0, -0.25}));
    StorageBound(reg) = bound + 1;
  } else {
    const int other = Uniform(0, program_.num_sources() - 1);
    if (!At(other).defined() || !c10::isFloatingType(At(other).scalar_type())) return;
    if (Bound(other) > 1000) return;
    const auto [from, to] = Match(other, reg);
    if (MayOverlap(At(to), At(from)) || TouchesTwice(At(to))) return;
    const double sum = bound + Bound(from);
    Emit(Op::kAddInPlace, {to, from});
    StorageBound(to) = std::max(StorageBound(to), sum);
  }
  if (reinterpreted_[static_cast<std::size_t>(reg)]) StorageBound(reg) = kAnything;
}

int Generator::Source(int name) {
  const int roll = Uniform(0, 99);
  if (roll < 82) return name;
  if (roll < 88)
    return program_.num_sources() + Uniform(0, static_cast<int>(program_.targets.size()) - 1);
  const int any = Uniform(0, static_cast<int>(registers_.size()) - 1);
  return At(any).defined() ? any : name;
}

void Generator::Block(int name) {
  if (!At(name).defined()) return;
  if (Chance(10)) InPlace(Destination(name));
  if (Chance(2)) {
    const int dest = Destination(name);
    const int item = Views(name, 1);
    const bool plain = At(item).scalar_type() == At(dest).scalar_type() &&
                       std::isfinite(Bound(item)) && !TouchesTwice(At(dest));
    if (At(item).numel() == 1 && plain) {
      Emit(Op::kFillItem, {dest, item});
      StorageBound(dest) = std::max(StorageBound(dest), Bound(item));
    }
  }
  int reg = Views(Source(name), Uniform(0, 3));
  for (int steps = Pick({0, 0, 0, 1, 1, 2, 3}); steps > 0; --steps)
    reg = Views(Transform(reg), Uniform(0, 1));
  const auto [from, to] = Match(reg, Destination(name));
  if (Chance(8) && MovedInto(to, from)) return;
  if (EmitCopy(to, from) && Chance(5)) InPlace(to);
}

Program GenerateProgram(std::mt19937& gen) { return Generator(gen).Run(); }

}  // namespace loadplan::testing
