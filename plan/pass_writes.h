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
//
//   writes = [copy x, zero_]           the same writes in every pass, and yet p holds `x`
//   for write in reversed(writes) if a.item() > 0 else writes: write(p)     or zeros
//
// So the order counts as well, where writes share bytes: at the end of a pass a byte holds what
// was written there last. What overwrites a write of the plan in the plan's pass must
// overwrite it in the round too, and likewise for the call. Writes that share nothing come in any
// order: loaders walk their names as they like.
#ifndef LOADPLAN_PLAN_PASS_WRITES_H_
#define LOADPLAN_PLAN_PASS_WRITES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
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
  // Positions among the pass's writes of later ones that share bytes with it. Where the
  // geometry is too irregular to say (`is_order_known` false), empty.
  std::vector<std::int32_t> later;
  bool is_order_known = true;
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

// Where each content stands last among the writes of a pass: earlier writes of it change
// nothing at the end.
class LastWrites {
 public:
  explicit LastWrites(const std::vector<PassWrite>& writes) {
    positions_.reserve(writes.size());
    for (std::size_t i = 0; i < writes.size(); ++i)
      positions_[writes[i].content] = static_cast<std::int32_t>(i);
  }
  // -1 where the pass writes nothing that equals `write`.
  std::int32_t Of(const PassWrite& write) const {
    const auto found = positions_.find(write.content);
    return found == positions_.end() ? -1 : found->second;
  }

 private:
  absl::flat_hash_map<std::uint64_t, std::int32_t> positions_;
};

// Pairs of positions in `writes`, the second of which overwrites bytes of the first, while the
// pass behind `other` has the first and not the second after it. A write of unknown order that
// the other pass has: paired with itself.
//
// Example: [p <- x, p <- 0, q <- y] against [q <- y, p <- 0, p <- x] gives {(0, 1)}.
LOADPLAN_API std::vector<std::pair<std::int32_t, std::int32_t>> OtherwiseOrdered(
    const std::vector<PassWrite>& writes, const LastWrites& other);

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
