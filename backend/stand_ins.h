// StandIns: made-up answers to reads that only real bytes could answer, in passes that
// explore. See Note [Exploring] in plan/pass_writes.h.
#ifndef LOADPLAN_BACKEND_STAND_INS_H_
#define LOADPLAN_BACKEND_STAND_INS_H_

#include <ATen/core/Tensor.h>

#include <mutex>
#include <string>

#include "absl/container/flat_hash_map.h"

namespace loadplan {

// Rounds differ in values and take every decision the other way. Where the loader refuses a
// value (`assert scale > 0`), the last read before that gets another one and the round
// is run again. Equal sites of one round get equal answers. Thread-safe.
class StandIns {
 public:
  static constexpr int kNumRounds = 2;

  explicit StandIns(int round) : round_(round) {}

  // Before each pass.
  void Rewind();
  // Which answer a read at `site` gets: 0, 1, ... The site says what is read and how, as far
  // as two calls have that in common.
  int Choose(const std::string& site);
  bool Decide(const std::string& site) { return Choose(site) % 2 != 0; }
  // Gives the last site of the pass another answer; false where there was none.
  bool Turn();
  int num_answers() const;

  // A CPU tensor of one value in the shape of `like`; every element is the same memory.
  at::Tensor Make(const at::Tensor& like, int choice) const;

 private:
  const int round_;
  mutable std::mutex mutex_;
  absl::flat_hash_map<std::string, int> turns_;
  std::string last_;
  int num_answers_ = 0;
};

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_STAND_INS_H_
