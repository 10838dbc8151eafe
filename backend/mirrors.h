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
// What an operator of the first pass wrote into one for real is put back once it is known that the
// tensor was there before that pass: an attribute showed it, or another pass writes it as well. A
// tensor that `empty` made in the pass, or that one pass writes and the next does not (a table in
// an `lru_cache`), keeps what it was given. Where passes make a new tensor each time, names that
// are copied into it go through the loader.
struct Mirror {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  std::string what;                // "a tensor of shape [4] and dtype float32"
  std::string name;                // of an attribute that showed it before the pass; may be ""
  std::string writer;              // "`aten::copy_`"; with the loader's line where it was traced
  at::Tensor before;               // its bytes before the pass wrote it for real; may be undefined
  std::vector<ReadRecord> copies;  // what was recorded and not run on it
  bool has_history = false;        // the log knows it: not all that was written is a constant
};

// The mirrors of a trace, from pass to pass.
class MirrorBook {
 public:
  explicit MirrorBook(std::shared_ptr<const TargetSet> declared);

  // Of the next pass: the declared targets, then the mirrors that are known.
  const std::shared_ptr<const TargetSet>& targets() const { return targets_; }
  bool empty() const { return known_.empty(); }
  const std::string& first() const { return known_.front().target.name; }

  // After a pass of whatever kind.
  void PutBack(const std::vector<Mirror>& found);
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
    bool is_traced = false;  // its memory does not hold all that was written
    bool is_explored = false;
  };
  // The bytes before the first pass that wrote a tensor for real.
  struct Before {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    at::Tensor bytes;
    bool is_back = false;
  };

  bool TakeIn(std::vector<Mirror>& found, bool is_explored);
  void Rebuild();
  bool PutBack(Before& before);

  const std::shared_ptr<const TargetSet> declared_;
  std::shared_ptr<const TargetSet> targets_;
  std::vector<Known> known_;
  absl::flat_hash_map<const c10::StorageImpl*, Before> before_;
  bool takes_in_ = true;
  bool has_explored_ = false;
};

// All bytes of a storage.
at::Tensor BytesOfStorage(const c10::Storage& storage);

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_MIRRORS_H_
