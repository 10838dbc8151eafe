#include "backend/storage_guard.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <utility>

#include "backend/loader_line.h"

#if __has_include(<c10/core/StorageMaterializer.h>)
#define LOADPLAN_HAS_STORAGE_SWITCHES 1
#else
#define LOADPLAN_HAS_STORAGE_SWITCHES 0
#endif

namespace loadplan {
namespace {

// Which storages any pass of this process guards, under which name, and where it is noted that
// one was reached through a pointer.
struct Registry {
  struct Entry {
    std::string name;
    std::shared_ptr<std::string> reached;
  };
  std::mutex mutex;
  absl::flat_hash_map<const c10::StorageImpl*, Entry> entries;
};
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

#if LOADPLAN_HAS_STORAGE_SWITCHES
void RaiseOnWrite(c10::StorageImpl* impl) {
  std::string name;
  const std::string line = AtLine(LoaderLine());
  {
    Registry& all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.entries.find(impl);
    if (found != all.entries.end()) {
      name = found->second.name;
      if (found->second.reached->empty()) *found->second.reached = "`" + name + "`" + line;
    }
  }
  TORCH_CHECK(false, "`", name,
              "` is being traced: its memory cannot be reached through a raw pointer (numpy, "
              "data_ptr, a custom kernel) until the pass ends; use tensor operators in the loader");
}
#endif

#if !LOADPLAN_HAS_STORAGE_SWITCHES
// FNV-1a over eight bytes at a time: position-sensitive, and no more than a guard needs.
std::uint64_t Digest(const c10::StorageImpl* impl) {
  if (!impl->device().is_cpu()) return 0;
  const auto* data = static_cast<const unsigned char*>(impl->data());
  std::uint64_t hash = 1469598103934665603ULL;
  const std::size_t nbytes = impl->nbytes();
  std::size_t at = 0;
  for (; at + 8 <= nbytes; at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + at, 8);
    hash = (hash ^ word) * 1099511628211ULL;
  }
  for (; at < nbytes; ++at) hash = (hash ^ data[at]) * 1099511628211ULL;
  return hash;
}
#endif

}  // namespace

absl::Status StorageGuards::ForbidWrites(const c10::Storage& storage, const std::string& name) {
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  {
    Registry& all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (!all.entries.emplace(impl, Registry::Entry{name, reached_}).second) {
      return absl::FailedPreconditionError(
          "`" + name + "` is being traced by another pass; wait until that pass ends");
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  Guarded guarded(storage);
  guarded.forbid_writes = true;
  guarded.name = name;
#if LOADPLAN_HAS_STORAGE_SWITCHES
  // A copy-on-write storage has a materializer already: let it make its own copy first.
  if (impl->has_materializer()) impl->mutable_data();
#else
  guarded.digest = Digest(impl);
#endif
  Apply(impl, guarded);
  guarded_.emplace(impl, std::move(guarded));
  return absl::OkStatus();
}

void StorageGuards::ForbidReads(const c10::Storage& storage, const std::string& message) {
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  const std::lock_guard<std::mutex> lock(mutex_);
  auto found = guarded_.find(impl);
  if (found == guarded_.end()) {
    found = guarded_.emplace(impl, Guarded(storage)).first;
  }
  Guarded& guarded = found->second;
  if (guarded.forbid_reads) return;
  guarded.forbid_reads = true;
  guarded.message = message;
  if (guarded.lifted == 0) Apply(impl, guarded);
}

std::string StorageGuards::FindChanged() const {
#if !LOADPLAN_HAS_STORAGE_SWITCHES
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [impl, guarded] : guarded_) {
    if (guarded.forbid_writes && Digest(impl) != guarded.digest) return guarded.name;
  }
#endif
  return "";
}

std::string StorageGuards::reached() const {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  return *reached_;
}

void StorageGuards::ReleaseAll() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [impl, guarded] : guarded_) {
    if (guarded.forbid_writes) {
      Registry& all = registry();
      const std::lock_guard<std::mutex> all_lock(all.mutex);
      all.entries.erase(impl);
    }
    // A scratch tensor may be gone; the weak reference only keeps its address from being reused.
    if (const auto strong = guarded.storage.lock()) Remove(impl, guarded);
  }
  guarded_.clear();
}

void StorageGuards::Apply(c10::StorageImpl* impl, const Guarded& guarded) {
#if LOADPLAN_HAS_STORAGE_SWITCHES
  if (guarded.forbid_writes && !impl->has_materializer()) impl->set_materializer(&RaiseOnWrite);
  if (guarded.forbid_reads)
    impl->release_data_and_set_meta_custom_data_ptr_error_msg_(guarded.message);
#else
  static_cast<void>(impl);
  static_cast<void>(guarded);
#endif
}

void StorageGuards::Remove(c10::StorageImpl* impl, const Guarded& guarded) {
#if LOADPLAN_HAS_STORAGE_SWITCHES
  if (guarded.forbid_writes) impl->clear_materializer();
  if (guarded.forbid_reads) impl->clear_data_ptr_access_error_msg_();
#else
  static_cast<void>(impl);
  static_cast<void>(guarded);
#endif
}

StorageGuards::Lift::Lift(StorageGuards& guards, std::vector<c10::StorageImpl*> storages)
    : guards_(guards), storages_(std::move(storages)) {
  const std::lock_guard<std::mutex> lock(guards_.mutex_);
  for (c10::StorageImpl* impl : storages_) {
    const auto found = guards_.guarded_.find(impl);
    if (found != guards_.guarded_.end() && found->second.lifted++ == 0) Remove(impl, found->second);
  }
}

StorageGuards::Lift::~Lift() {
  const std::lock_guard<std::mutex> lock(guards_.mutex_);
  for (c10::StorageImpl* impl : storages_) {
    const auto found = guards_.guarded_.find(impl);
    if (found != guards_.guarded_.end() && --found->second.lifted == 0) Apply(impl, found->second);
  }
}

}  // namespace loadplan
