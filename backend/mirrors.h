// Mirrors: real tensors that are no targets, that the loader writes, and that outlive its call.
#ifndef LOADPLAN_BACKEND_MIRRORS_H_
#define LOADPLAN_BACKEND_MIRRORS_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "backend/target_set.h"
#include "plan/records.h"

namespace loadplan {

// Note [Mirrors]
//
//   self.kept.copy_(self.weight)    a part of what an eager call leaves, though nobody declared it
//   self.calls.add_(1)
//
// Only the end of a pass shows which tensors stay alive. The next pass has them as targets of its
// own kind: what is done to them is recorded, nothing runs on them, and the plan repeats it.
//
// What operators of a pass wrote for real into a tensor that is older than the pass is put back
// when the pass ends, of whatever kind it is and in whatever way it ends. A tensor is older unless
// the pass saw how it was made: by an operator, by `torch.tensor` or `from_numpy`, by `deepcopy`.
// So every pass meets what the first one met, but for tensors that an earlier pass has made (a
// table in an `lru_cache`), which keep what that pass gave them. Where passes make a new tensor
// each time, names that are copied into it go through the loader.
struct Mirror {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  std::string what;                // "a tensor of shape [4] and dtype float32"
  std::string name;                // of an attribute that showed it before the pass; may be ""
  std::string writer;              // "`aten::copy_`"; with the loader's line where it was traced
  std::vector<ReadRecord> copies;  // what was recorded and not run on it
  bool has_history = false;        // the log knows it: not all that was written is a constant
  bool is_born = false;            // the pass has made it
};

// The mirrors of a trace, from pass to pass.
class MirrorBook {
 public:
  explicit MirrorBook(std::shared_ptr<const TargetSet> declared);

  // Of the next pass: the declared targets, then the mirrors that are known.
  const std::shared_ptr<const TargetSet>& targets() const { return targets_; }
  bool empty() const { return known_.empty(); }
  const std::string& first() const { return known_.front().target.name; }

  // After a complete pass over targets(). `found` keeps those that the book does not take in.
  // Whether targets() are others now, so that the pass must be repeated. FailedPrecondition: the
  // loader keeps a tensor, made in one pass, whose bytes were only traced.
  absl::StatusOr<bool> Settle(const RecordLog& log, std::vector<Mirror>& found);
  // After a pass that explored, once: the same for what complete passes need not write.
  bool TakeInExplored(std::vector<Mirror>& found);

 private:
  struct Known {
    LiveTarget target;
    std::string writer;
    bool is_born = false;    // a pass made it
    bool is_traced = false;  // its memory does not hold all that was written
    bool is_explored = false;
  };

  bool TakeIn(std::vector<Mirror>& found, bool is_explored);
  void Rebuild();

  const std::shared_ptr<const TargetSet> declared_;
  std::shared_ptr<const TargetSet> targets_;
  std::vector<Known> known_;
  // Known once, and not written by every complete pass.
  absl::flat_hash_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> dropped_;
  bool takes_in_ = true;
  bool has_explored_ = false;
};

// All bytes of a storage.
at::Tensor BytesOfStorage(const c10::Storage& storage);

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_MIRRORS_H_
