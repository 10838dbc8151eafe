// What the statements of a random program do, and how they are printed.
#include <ATen/ATen.h>

#include <array>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/differential/random_program.h"

namespace loadplan::testing {
namespace {

struct OpName {
  const char* code;
  const char* torch;
};

constexpr std::array<OpName, 49> kOpNames = {{{"kNarrow", "narrow"},
                                              {"kSlice", "slice"},
                                              {"kSelect", "select"},
                                              {"kTranspose", "transpose"},
                                              {"kPermute", "permute"},
                                              {"kExpand", "expand"},
                                              {"kUnsqueeze", "unsqueeze"},
                                              {"kSqueeze", "squeeze"},
                                              {"kView", "view"},
                                              {"kFlatten", "flatten"},
                                              {"kSplit", "split"},
                                              {"kChunk", "chunk"},
                                              {"kUnbind", "unbind"},
                                              {"kDiagonal", "diagonal"},
                                              {"kUnfold", "unfold"},
                                              {"kAsStrided", "as_strided"},
                                              {"kViewDtype", "view"},
                                              {"kDetach", "detach"},
                                              {"kReshape", "reshape"},
                                              {"kClone", "clone"},
                                              {"kContiguous", "contiguous"},
                                              {"kTo", "to"},
                                              {"kCat", "cat"},
                                              {"kStack", "stack"},
                                              {"kEmptyLike", "empty_like"},
                                              {"kRealZeros", "real_zeros"},
                                              {"kFlip", "flip"},
                                              {"kIndexSelect", "index_select"},
                                              {"kIndex", "index"},
                                              {"kGather", "gather"},
                                              {"kWhere", "where"},
                                              {"kRoll", "roll"},
                                              {"kRepeat", "repeat_interleave"},
                                              {"kNeg", "neg"},
                                              {"kMulScalar", "mul"},
                                              {"kAdd", "add"},
                                              {"kSum", "sum"},
                                              {"kExp", "exp"},
                                              {"kMulItem", "mul_item"},
                                              {"kBranch", "branch"},
                                              {"kCopy", "copy_"},
                                              {"kFill", "fill_"},
                                              {"kZero", "zero_"},
                                              {"kCopyConstant", "copy_constant"},
                                              {"kMulInPlace", "mul_"},
                                              {"kAddInPlace", "add_"},
                                              {"kIndexPut", "index_put_"},
                                              {"kMaskedFill", "masked_fill_"},
                                              {"kFillItem", "fill_item"}}};

const OpName& NameOf(Op op) { return kOpNames[static_cast<std::size_t>(op)]; }

bool UsesDtype(Op op) {
  return op == Op::kTo || op == Op::kViewDtype || op == Op::kRealZeros || op == Op::kCopyConstant;
}
bool UsesScalar(Op op) {
  return op == Op::kMulScalar || op == Op::kMulInPlace || op == Op::kFill ||
         op == Op::kAddInPlace || op == Op::kBranch || op == Op::kMaskedFill;
}

at::Tensor AsStrided(const at::Tensor& self, const std::vector<std::int64_t>& ints) {
  const at::IntArrayRef all(ints);
  const std::size_t rank = ints.size() / 2;
  return self.as_strided(all.slice(0, rank), all.slice(rank, rank), ints.back());
}

at::Tensor Indices(at::IntArrayRef ints) { return at::tensor(ints.vec()); }

at::Tensor Mask(at::IntArrayRef bits, at::IntArrayRef sizes) {
  return Indices(bits).to(at::kBool).view(sizes);
}

at::Tensor ApplyView(const Statement& s, const at::Tensor& self) {
  const std::vector<std::int64_t>& i = s.ints;
  switch (s.op) {
    case Op::kNarrow:
      return self.narrow(i[0], i[1], i[2]);
    case Op::kSlice:
      return self.slice(i[0], i[1], i[2], i[3]);
    case Op::kSelect:
      return self.select(i[0], i[1]);
    case Op::kTranspose:
      return self.transpose(i[0], i[1]);
    case Op::kPermute:
      return self.permute(i);
    case Op::kExpand:
      return self.expand(i);
    case Op::kUnsqueeze:
      return self.unsqueeze(i[0]);
    case Op::kSqueeze:
      return self.squeeze();
    case Op::kView:
      return self.view(i);
    case Op::kFlatten:
      return self.flatten(i[0], i[1]);
    case Op::kSplit:
      return self.split(i[0], i[1]).at(static_cast<std::size_t>(i[2]));
    case Op::kChunk:
      return self.chunk(i[0], i[1]).at(static_cast<std::size_t>(i[2]));
    case Op::kUnbind:
      return self.unbind(i[0]).at(static_cast<std::size_t>(i[1]));
    case Op::kDiagonal:
      return self.diagonal(i[0], i[1], i[2]);
    case Op::kUnfold:
      return self.unfold(i[0], i[1], i[2]);
    case Op::kAsStrided:
      return AsStrided(self, i);
    case Op::kViewDtype:
      return self.view(s.dtype);
    default:
      return self.detach();
  }
}

at::Tensor ApplyNew(const Statement& s, const std::vector<at::Tensor>& args) {
  const std::vector<std::int64_t>& i = s.ints;
  switch (s.op) {
    case Op::kReshape:
      return args[0].reshape(i);
    case Op::kClone:
      return args[0].clone();
    case Op::kContiguous:
      return args[0].contiguous();
    case Op::kTo:
      return args[0].to(s.dtype);
    case Op::kCat:
      return at::cat(args, i[0]);
    case Op::kStack:
      return at::stack(args, i[0]);
    case Op::kEmptyLike:
      return at::empty_like(args[0]);
    case Op::kRealZeros:
      return at::zeros(args[0].sizes(), at::TensorOptions(s.dtype).device(at::kCPU));
    case Op::kFlip:
      return args[0].flip(i);
    case Op::kIndexSelect:
      return args[0].index_select(i[0], Indices(at::IntArrayRef(i).slice(1)));
    case Op::kIndex:
      return args[0].index({Indices(i)});
    case Op::kGather:
      return args[0].gather(i[0], Indices(at::IntArrayRef(i).slice(1)).view(args[0].sizes()));
    case Op::kWhere:
      return at::where(Mask(i, args[0].sizes()), args[0], args[1]);
    case Op::kRoll:
      return args[0].roll(i[0], i[1]);
    case Op::kRepeat:
      return args[0].repeat_interleave(i[0], i[1]);
    case Op::kMulItem:
      return args[0].mul(args[1].item());
    case Op::kBranch:
      return (args[1].item().toDouble() > s.scalar ? args[0] : args[2]).clone();
    case Op::kNeg:
      return args[0].neg();
    case Op::kMulScalar:
      return args[0].mul(s.scalar);
    case Op::kAdd:
      return args[0].add(args[1]);
    case Op::kSum:
      return args[0].sum(i);
    default:
      return args[0].exp();
  }
}

void ApplyWrite(const Statement& s, const std::vector<at::Tensor>& args) {
  at::Tensor self = args[0];
  switch (s.op) {
    case Op::kCopy:
      self.copy_(args[1]);
      return;
    case Op::kFill:
      self.fill_(s.scalar);
      return;
    case Op::kZero:
      self.zero_();
      return;
    case Op::kCopyConstant: {
      const at::Tensor values = at::arange(self.numel()).add_(s.ints[0]).remainder_(7);
      self.copy_(values.to(s.dtype).view(self.sizes()));
      return;
    }
    case Op::kMulInPlace:
      self.mul_(s.scalar);
      return;
    case Op::kAddInPlace:
      if (args.size() > 1) {
        self.add_(args[1]);
      } else {
        self.add_(s.scalar);
      }
      return;
    case Op::kIndexPut:
      self.index_put_({Indices(s.ints)}, args[1]);
      return;
    case Op::kMaskedFill:
      self.masked_fill_(Mask(s.ints, self.sizes()), s.scalar);
      return;
    default:
      self.fill_(args[1].item());
      return;
  }
}

std::string RegisterName(const Program& program, int reg) {
  if (reg < program.num_sources()) return absl::StrCat("w", reg);
  if (reg < program.first_statement_register())
    return absl::StrCat("t", reg - program.num_sources());
  return absl::StrCat("r", reg - program.first_statement_register());
}

template <typename T>
std::string Braced(const std::vector<T>& values) {
  return absl::StrCat("{", absl::StrJoin(values, ", "), "}");
}

}  // namespace

bool WritesFirstArgument(Op op) { return op >= Op::kCopy; }

at::Tensor Apply(const Statement& statement, const std::vector<at::Tensor>& args) {
  if (statement.op < Op::kReshape) return ApplyView(statement, args[0]);
  if (!WritesFirstArgument(statement.op)) return ApplyNew(statement, args);
  ApplyWrite(statement, args);
  return {};
}

void RunLoader(const Program& program, const NextTensor& next,
               const std::vector<at::Tensor>& targets) {
  std::vector<at::Tensor> registers(program.sources.size());
  registers.insert(registers.end(), targets.begin(), targets.end());
  registers.resize(registers.size() + program.statements.size());
  const auto run = [&](int at) {
    for (std::size_t i = 0; i < program.statements.size(); ++i) {
      const Statement& statement = program.statements[i];
      if (statement.at != at) continue;
      std::vector<at::Tensor> args;
      for (const int arg : statement.args) args.push_back(registers[static_cast<std::size_t>(arg)]);
      bool complete = true;
      for (const at::Tensor& arg : args) complete &= arg.defined();
      if (!complete) continue;
      registers[static_cast<std::size_t>(program.first_statement_register()) + i] =
          Apply(statement, args);
    }
  };
  int source = 0;
  at::Tensor tensor;
  while (next(source, tensor)) {
    registers[static_cast<std::size_t>(source)] = tensor;
    run(source);
  }
  tensor.reset();
  run(program.num_sources());
}

at::Tensor RandomValues(std::mt19937& gen, at::IntArrayRef sizes, at::ScalarType dtype) {
  at::Tensor values = at::empty(sizes, at::TensorOptions(at::kDouble));
  auto* const data = values.mutable_data_ptr<double>();
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    const double unit = static_cast<double>(gen()) / 4294967296.0;  // [0, 1)
    switch (dtype) {
      case at::kByte:
        data[i] = std::floor(unit * 200);
        break;
      case at::kChar:
        data[i] = std::floor(unit * 200) - 100;
        break;
      case at::kInt:
      case at::kLong:
        data[i] = std::floor(unit * 200000) - 100000;
        break;
      default:
        data[i] = unit * 16 - 8;
    }
  }
  return values.to(dtype);
}

std::vector<at::Tensor> TargetViews(const Program& program,
                                    const std::vector<at::Tensor>& storages) {
  std::vector<at::Tensor> views;
  for (const TargetSpec& target : program.targets) {
    const at::Tensor& base = storages[static_cast<std::size_t>(target.storage)];
    const at::Tensor typed = base.scalar_type() == target.dtype ? base : base.view(target.dtype);
    views.push_back(typed.as_strided(target.sizes, target.strides, target.offset));
  }
  return views;
}

std::string Format(const Program& program) {
  std::string text;
  for (int i = 0; i < program.num_sources(); ++i) {
    const SourceSpec& source = program.sources[static_cast<std::size_t>(i)];
    absl::StrAppend(&text, "  w", i, ": ", c10::toString(source.dtype), Braced(source.sizes), "\n");
  }
  for (std::size_t i = 0; i < program.targets.size(); ++i) {
    const TargetSpec& target = program.targets[i];
    absl::StrAppend(&text, "  t", i, ": ", c10::toString(target.dtype), Braced(target.sizes),
                    " strides ", Braced(target.strides), " offset ", target.offset, " of storage ",
                    target.storage, "\n");
  }
  for (std::size_t i = 0; i < program.statements.size(); ++i) {
    const Statement& s = program.statements[i];
    std::vector<std::string> args;
    for (const int arg : s.args) args.push_back(RegisterName(program, arg));
    absl::StrAppend(&text, "  [at w", s.at, "] r", i, " = ", NameOf(s.op).torch, "(",
                    absl::StrJoin(args, ", "), s.ints.empty() ? "" : "; ",
                    absl::StrJoin(s.ints, ", "));
    if (UsesScalar(s.op)) absl::StrAppend(&text, "; ", s.scalar);
    if (UsesDtype(s.op)) absl::StrAppend(&text, "; ", c10::toString(s.dtype));
    absl::StrAppend(&text, ")\n");
  }
  return text;
}

std::string FormatCode(const Program& program) {
  const auto dtype = [](at::ScalarType type) { return absl::StrCat("at::k", c10::toString(type)); };
  std::string text = "Program{{";
  for (const SourceSpec& s : program.sources)
    absl::StrAppend(&text, "{", Braced(s.sizes), ", ", dtype(s.dtype), "}, ");
  absl::StrAppend(&text, "}, {");
  for (const StorageSpec& s : program.storages)
    absl::StrAppend(&text, "{", s.numel, ", ", dtype(s.dtype), "}, ");
  absl::StrAppend(&text, "}, {");
  for (const TargetSpec& t : program.targets) {
    absl::StrAppend(&text, "{", t.storage, ", ", dtype(t.dtype), ", ", Braced(t.sizes), ", ",
                    Braced(t.strides), ", ", t.offset, "}, ");
  }
  absl::StrAppend(&text, "}, {\n");
  for (const Statement& s : program.statements) {
    absl::StrAppend(&text, "    {Op::", NameOf(s.op).code, ", ", s.at, ", ", Braced(s.args), ", ",
                    Braced(s.ints), ", ", s.scalar, ", ", dtype(s.dtype), "},\n");
  }
  return absl::StrCat(text, "}}");
}

}  // namespace loadplan::testing
