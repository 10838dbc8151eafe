// Keeps live bytes as they are while a pass runs.
//
// Dispatch sees operators; it does not see `numpy()`, `data_ptr()` or a custom
// kernel that takes a pointer. Two switches of StorageImpl close that hole in
// every thread: a materializer that raises when a target is about to be written
// through a pointer, and a data-pointer error on storages whose real bytes are no
// longer what the loader would read there. Operators that the watcher runs for
// real lift both for their own length.
#ifndef LOADPLAN_BACKEND_STORAGE_GUARD_H_
#define LOADPLAN_BACKEND_STORAGE_GUARD_H_

#include <c10/core/Storage.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"

namespace loadplan {

class StorageGuards {
 public:
  StorageGuards() = default;
  ~StorageGuards() { ReleaseAll(); }
  StorageGuards(const StorageGuards&) = delete;
  StorageGuards& operator=(const StorageGuards&) = delete;

  // Writes through a pointer into `storage` raise from now on. FailedPrecondition,
  // naming the storage: another pass guards it.
  absl::Status ForbidWrites(const c10::Storage& storage, const std::string& name);
  // Reads raise as well, with `message`.
  void ForbidReads(const c10::Storage& storage, const std::string& message);
  // Whether a torch without these switches changed a byte of a target (then the
  // name of one that differs), else "". Always "" where the switches exist.
  std::string FindChanged() const;
  // Where a write through a pointer was refused, also where the loader caught the error:
  // "`w` at model.py:12", the first one, or "". Valid after ReleaseAll as well.
  std::string reached() const;
  void ReleaseAll();

  // Opens the given storages for the length of one operator. Nests, also across threads.
  class Lift {
   public:
    Lift(StorageGuards& guards, std::vector<c10::StorageImpl*> storages);
    ~Lift();
    Lift(const Lift&) = delete;
    Lift& operator=(const Lift&) = delete;

   private:
    StorageGuards& guards_;
    std::vector<c10::StorageImpl*> storages_;
  };

 private:
  struct Guarded {
    explicit Guarded(const c10::Storage& of) : storage(of.getWeakStorageImpl()) {}

    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    bool forbid_writes = false;
    bool forbid_reads = false;
    int lifted = 0;
    std::string message;
    std::uint64_t digest = 0;  // only where the switches are missing
    std::string name;
  };
  static void Apply(c10::StorageImpl* impl, const Guarded& guarded);
  static void Remove(c10::StorageImpl* impl, const Guarded& guarded);

  mutable std::mutex mutex_;
  absl::flat_hash_map<c10::StorageImpl*, Guarded> guarded_;
  // Guarded by the registry's mutex.
  const std::shared_ptr<std::string> reached_ = std::make_shared<std::string>();
};

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_STORAGE_GUARD_H_
