// What one pass writes into targets, in a form in which two passes can be compared.
//
// Note [Exploring]
//
//   if "a" in seen: p.copy_(torch.cat([seen["a"], b]))   nothing, in a pass without `a`
//
// A plan is made of the last pass, which some names were left out of. What the loader does
// to the others when those names are there is explored in passes with all names, whose value
// reads are answered with made-up values (backend/stand_ins.h). Every write of such a
// pass must be one of the plan, or one of the loader's call with the fallback names,
// explored in the same way; where it is neither, the names behind it join the fallbacks.
// More than one round, with different values and decisions, shows what depends on them.
#ifndef LOADPLAN_PLAN_PASS_WRITES_H_
#define LOADPLAN_PLAN_PASS_WRITES_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "geometry/export.h"
#include "plan/node_table.h"
#include "plan/records.h"
#include "plan/resolve.h"

namespace loadplan {

// Parts of a log's meaning that the log itself does not hold.
struct ContentDigests {
  // Per node: the operator and its arguments that are no inputs. Empty: not known.
  std::vector<std::uint64_t> operators;
  // Of the bytes `map.from()` of a constant or scratch storage. Null: by their number.
  std::function<std::uint64_t(StorageId, const StridedMap&)> constant;
};

// One copy record into a target.
struct PassWrite {
  Index time = 0;
  // Digest of where it writes and of what; equal for equal writes of two passes over the
  // same targets and names. Where the bytes could not be followed (`is_exact` false), of what
  // is known.
  std::uint64_t content = 0;
  bool is_exact = true;
  std::vector<std::int32_t> names;  // sources behind it, sorted
};

// By time.
LOADPLAN_API std::vector<PassWrite> WritesOfPass(const RecordLog& log, const SymbolicMemory& memory,
                                                 NodeTable& nodes, const ContentDigests& digests);
LOADPLAN_API std::vector<PassWrite> WritesOfPass(const RecordLog& log,
                                                 const ContentDigests& digests);

// A bag of writes: each stands for one equal write of another pass.
class WriteBag {
 public:
  WriteBag() = default;
  explicit WriteBag(const std::vector<PassWrite>& writes) {
    for (const PassWrite& write : writes) Add(write);
  }
  void Add(const PassWrite& write) { ++counts_[write.content]; }
  // Takes one that equals `write` out; false where there is none.
  bool Take(const PassWrite& write) {
    const auto found = counts_.find(write.content);
    return found != counts_.end() && found->second-- > 0;
  }

 private:
  absl::flat_hash_map<std::uint64_t, int> counts_;
};

// A digest that depends on the order of what goes in.
class ContentHash {
 public:
  explicit ContentHash(std::uint64_t seed) { Add(seed); }
  ContentHash& Add(std::uint64_t value) {
    hash_ = (hash_ ^ value) * 0x9E3779B97F4A7C15ULL;
    hash_ ^= hash_ >> 32;
    return *this;
  }
  ContentHash& AddBytes(const void* data, std::size_t nbytes);
  std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 0x2545F4914F6CDD1DULL;
};

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_PASS_WRITES_H_
