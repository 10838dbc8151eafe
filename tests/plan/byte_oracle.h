// ByteOracle: what a log means, byte by byte, in program order: the eager truth that
// plans are compared with. It knows nothing of geometry beyond walking coordinates.
#ifndef LOADPLAN_TESTS_PLAN_BYTE_ORACLE_H_
#define LOADPLAN_TESTS_PLAN_BYTE_ORACLE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/load_plan_builder.h"
#include "plan/records.h"

namespace loadplan::testing {

// A set of names, as bits.
using NameMask = std::uint64_t;

struct OracleByte {
  std::uint8_t value = 0;
  NameMask names = 0;             // checkpoint tensors behind it
  NameMask copy_names = 0;        // behind all that the same copy wrote
  NameMask ever_copied = 0;       // behind all copies that ever wrote this byte
  bool is_uninitialised = false;  // a byte that a temporary was born with
  bool is_garbage = false;        // depends on such a byte, or on the order inside one copy
  bool is_computed = false;       // went through a cast or an operator
  bool is_lost = false;           // went through an operator that cannot run again
  bool is_written = false;        // by a copy of the log
  std::int64_t live_origin = -1;  // a live-before byte as it was: storage * 2^32 + offset
};

// Calls `f(to byte, from byte)` for each item of `map`, first bytes of it, in order.
void ForEachItem(const StridedMap& map, const std::function<void(Index, Index)>& f);
// Offsets of the items of `layout`, in order.
std::vector<Index> ItemOffsets(const StridedLayout& layout);

// A made-up conversion, different for every pair of dtypes, of one item.
void CastItem(const DType& from, const DType& to, const std::uint8_t* in, std::uint8_t* out);
// The made-up operator of node `id`: mixes all bytes of its inputs.
std::vector<std::uint8_t> RunNode(NodeId id, size_t nbytes,
                                  const std::vector<std::vector<std::uint8_t>>& inputs);

class ByteOracle {
 public:
  // `initial`: bytes of every storage before the pass (values of nodes ignored).
  ByteOracle(const BuildInput& input, const std::vector<std::vector<std::uint8_t>>& initial);

  // Bytes of `storage` after the pass.
  const std::vector<OracleByte>& bytes(StorageId storage) const {
    return storages_[static_cast<size_t>(storage)];
  }
  // Names that a refusal stopped, and whether one had no name behind it.
  NameMask refused() const { return refused_; }
  bool has_nameless_refusal() const { return has_nameless_refusal_; }
  // Shared bytes of names per (smaller, greater name, storage), by the overlap rule.
  const std::map<std::tuple<int, int, StorageId>, Index>& overlaps() const { return overlaps_; }
  bool has_repeated_write() const { return has_repeated_write_; }

 private:
  void RunCopy(const CopyRecord& copy);
  void RunNodesAt(Index time);
  void Store(const CopyRecord& copy, Index offset, const OracleByte& byte);
  std::vector<OracleByte> ReadItems(const ReadRecord& read) const;

  const BuildInput& input_;
  std::vector<std::vector<OracleByte>> storages_;
  // Per target byte the names of every write so far.
  std::vector<std::vector<std::vector<NameMask>>> history_;
  std::map<std::tuple<int, int, StorageId>, Index> overlaps_;
  NameMask refused_ = 0;
  bool has_nameless_refusal_ = false;
  bool has_repeated_write_ = false;
  size_t next_node_ = 0;
  size_t next_refusal_ = 0;
};

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_PLAN_BYTE_ORACLE_H_
