// Generator: draws the statements of a random program, each tried on real tensors.
#ifndef LOADPLAN_TESTS_DIFFERENTIAL_GENERATOR_H_
#define LOADPLAN_TESTS_DIFFERENTIAL_GENERATOR_H_

#include <ATen/ATen.h>

#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/differential/random_program.h"

namespace loadplan::testing {

class Generator {
 public:
  explicit Generator(std::mt19937& gen) : gen_(gen) {}

  Program Run() {
    MakeSources();
    MakeTargets();
    for (int n = 0; n < program_.num_sources(); ++n) {
      at_ = n;
      registers_[static_cast<std::size_t>(n)] = sources_[static_cast<std::size_t>(n)];
      if (Chance(8)) continue;  // a skipped name
      for (int blocks = Uniform(1, 3); blocks > 0; --blocks) Block(n);
    }
    at_ = program_.num_sources();
    if (Chance(25)) Block(Uniform(0, program_.num_sources() - 1));
    return std::move(program_);
  }

 private:
  int Uniform(int low, int high) {
    return low + static_cast<int>(gen_() % static_cast<std::uint32_t>(high - low + 1));
  }
  bool Chance(int percent) { return Uniform(0, 99) < percent; }
  template <typename T>
  T Pick(std::initializer_list<T> values) {
    return values.begin()[Uniform(0, static_cast<int>(values.size()) - 1)];
  }
  at::ScalarType PickDtype() {
    return Pick({at::kFloat, at::kFloat, at::kBFloat16, at::kBFloat16, at::kHalf, at::kChar,
                 at::kByte, at::kInt, at::kLong, at::kFloat8_e4m3fn});
  }
  std::vector<std::int64_t> PickSizes() {
    std::vector<std::int64_t> sizes;
    for (int rank = Pick({0, 1, 1, 2, 2, 2, 2, 3, 3}); rank > 0; --rank)
      sizes.push_back(Uniform(1, 6));
    return sizes;
  }

  void MakeSources();
  void MakeTargets();
  void AddTarget(int storage, at::ScalarType dtype, std::int64_t numel);

  const at::Tensor& At(int reg) const { return registers_[static_cast<std::size_t>(reg)]; }
  double& StorageBound(int reg) { return bounds_[At(reg).storage().unsafeGetStorageImpl()]; }
  double Bound(int reg);
  // Appends a statement that torch accepts; its register, or `args[0]` where torch does not.
  int Emit(Op op, std::vector<int> args, std::vector<std::int64_t> ints = {}, double scalar = 0,
           at::ScalarType dtype = at::kFloat);
  int EmitNew(double bound, Op op, std::vector<int> args, std::vector<std::int64_t> ints = {},
              double scalar = 0, at::ScalarType dtype = at::kFloat);
  bool EmitCopy(int to, int from);

  int Dim(int reg) { return Uniform(0, static_cast<int>(At(reg).dim()) - 1); }
  int View(int reg);
  int RankChangingView(int reg);
  int Views(int reg, int count) {
    while (count-- > 0) reg = View(reg);
    return reg;
  }
  int Transform(int reg);
  int Arithmetic(int reg);
  int Join(int reg);
  int Moved(int reg);
  int ByValue(int reg);
  bool MovedInto(int to, int from);
  int Piecewise(int reg);
  int Destination(int name);
  std::pair<int, int> Match(int from, int to);
  void Block(int name);
  void InPlace(int reg);
  int Source(int name);

  std::mt19937& gen_;
  Program program_;
  int at_ = 0;
  std::vector<at::Tensor> sources_;
  std::vector<at::Tensor> registers_;
  std::vector<bool> reinterpreted_;
  std::unordered_map<const c10::StorageImpl*, double> bounds_;
};

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_DIFFERENTIAL_GENERATOR_H_
