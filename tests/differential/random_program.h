// Random loaders: straight-line programs of tensor operations that move checkpoint tensors
// into live targets, as `load_weights` functions do.
//
// A program names no tensors but registers, so that the same one runs on real tensors and on
// trace tensors:
//
//   registers 0 .. S-1        checkpoint tensors, undefined until their turn in the loop
//   registers S .. S+T-1      live targets
//   register  S+T+i           what statement i returned; undefined where it was skipped
//
// A statement one of whose arguments is undefined is skipped (a loader that has not been given
// a name, or a statement that the shrinker dropped).
#ifndef LOADPLAN_TESTS_DIFFERENTIAL_RANDOM_PROGRAM_H_
#define LOADPLAN_TESTS_DIFFERENTIAL_RANDOM_PROGRAM_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace loadplan::testing {

enum class Op : std::uint8_t {
  // Views. Their numbers are in `ints`, in the order of torch's arguments.
  kNarrow,
  kSlice,
  kSelect,
  kTranspose,
  kPermute,
  kExpand,
  kUnsqueeze,
  kSqueeze,
  kView,
  kFlatten,
  kSplit,   // size, dim, which part
  kChunk,   // parts, dim, which part
  kUnbind,  // dim, which part
  kDiagonal,
  kUnfold,
  kAsStrided,  // sizes, then as many strides, then the offset
  kViewDtype,
  kDetach,
  // New tensors.
  kReshape,
  kClone,
  kContiguous,
  kTo,
  kCat,
  kStack,
  kEmptyLike,
  kRealZeros,  // a scratch tensor that is real in a trace too
  kFlip,
  kIndexSelect,  // dim, then the indices
  kIndex,        // rows of dimension 0, by an index tensor
  kGather,       // dim, then one index per element
  kWhere,        // (arg0, arg1); one bit per element
  kRoll,         // shift, dim
  kRepeat,       // repeat_interleave: how often, dim
  kNeg,
  kMulScalar,
  kAdd,
  kSum,
  kExp,
  kMulItem,  // arg0 * arg1.item(): reads a value
  kBranch,   // arg1.item() > scalar ? arg0 : arg2
  // Writes into argument 0.
  kCopy,
  kFill,
  kZero,
  kCopyConstant,  // from a real tensor made of `ints[0]`
  kMulInPlace,
  kAddInPlace,
  kIndexPut,    // arg0[rows] = arg1
  kMaskedFill,  // one bit per element
  kFillItem,    // fill_(arg1.item()): reads a value
};

struct Statement {
  Op op = Op::kDetach;
  int at = 0;  // runs when the loop is at this checkpoint tensor; S: after the loop
  std::vector<int> args;
  std::vector<std::int64_t> ints;
  double scalar = 0;
  at::ScalarType dtype = at::kFloat;
};

struct SourceSpec {
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
};

// A name over one of the target storages.
struct TargetSpec {
  int storage = 0;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  std::int64_t offset = 0;
};

struct StorageSpec {
  std::int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;
};

struct Program {
  std::vector<SourceSpec> sources;
  std::vector<StorageSpec> storages;
  std::vector<TargetSpec> targets;
  std::vector<Statement> statements;

  int num_sources() const { return static_cast<int>(sources.size()); }
  int first_statement_register() const { return static_cast<int>(sources.size() + targets.size()); }
};

// "t1.copy_(r7)": for people. FormatCode gives what a named test is written in.
std::string Format(const Program& program);
std::string FormatCode(const Program& program);

// What one statement does. `args` are defined.
at::Tensor Apply(const Statement& statement, const std::vector<at::Tensor>& args);
bool WritesFirstArgument(Op op);

// Runs the loader. `next` gives the checkpoint tensors in turn, as an iterator does: the
// number of the source and its tensor; it returns false at the end.
using NextTensor = std::function<bool(int& source, at::Tensor& tensor)>;
void RunLoader(const Program& program, const NextTensor& next,
               const std::vector<at::Tensor>& targets);

// Values of a plain kind: no infinities, no casts out of range.
at::Tensor RandomValues(std::mt19937& gen, at::IntArrayRef sizes, at::ScalarType dtype);
// The names of `program.targets` over storages (one flat tensor each).
std::vector<at::Tensor> TargetViews(const Program& program,
                                    const std::vector<at::Tensor>& storages);

// A program whose statements eager torch accepts and whose result does not depend on the
// order in which a kernel visits elements.
Program GenerateProgram(std::mt19937& gen);

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_DIFFERENTIAL_RANDOM_PROGRAM_H_
