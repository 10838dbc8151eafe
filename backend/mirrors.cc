#include "backend/mirrors.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "backend/mode.h"

namespace loadplan {
namespace {

// Of a known mirror's storage: by its tensor, and by the one that a TargetSet makes of it.
constexpr std::size_t kOwnReferences = 2;

bool IsWritten(const RecordLog& log, StorageId storage) {
  return std::ranges::any_of(log.copies,
                             [&](const CopyRecord& copy) { return copy.to == storage; });
}

}  // namespace

at::Tensor BytesOfStorage(const c10::Storage& storage) {
  const ModeOff mode_off;
  return at::empty({0}, at::TensorOptions().dtype(at::kByte).device(storage.device()))
      .set_(storage, 0, {static_cast<int64_t>(storage.nbytes())}, {1});
}

MirrorBook::MirrorBook(std::shared_ptr<const TargetSet> declared)
    : declared_(std::move(declared)), targets_(declared_) {
  // What is staged layer by layer has no place for them.
  takes_in_ = std::ranges::none_of(declared_->storages(),
                                   [](const at::Tensor& storage) { return storage.is_meta(); });
}

absl::StatusOr<bool> MirrorBook::Settle(const RecordLog& log, std::vector<Mirror>& found) {
  bool changed = false;
  std::vector<Known> kept;
  auto id = static_cast<StorageId>(declared_->storages().size());
  for (Known& known : known_) {
    const c10::Storage& storage = known.target.tensor.storage();
    if (!IsWritten(log, id++) && !known.is_explored) {
      if (known.is_born && known.is_traced && storage.use_count() > kOwnReferences) {
        return absl::FailedPreconditionError(
            absl::StrCat("the loader writes ", known.target.name, " (", known.writer,
                         ") in one call and keeps it for the next ones, which a load plan cannot "
                         "follow; make it a buffer of the model, or write it in every call"));
      }
      changed = true;
      // Made in one pass, as one may be made in each; or written in the turn of a name that was
      // left out, which a pass that explores shows.
      if (known.is_born)
        takes_in_ = false;
      else
        dropped_.emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
      continue;
    }
    kept.push_back(std::move(known));
  }
  known_ = std::move(kept);
  changed |= TakeIn(found, /*is_explored=*/false);
  if (changed) Rebuild();
  return changed;
}

bool MirrorBook::TakeInExplored(std::vector<Mirror>& found) {
  if (std::exchange(has_explored_, true) || !TakeIn(found, /*is_explored=*/true)) return false;
  Rebuild();
  return true;
}

bool MirrorBook::TakeIn(std::vector<Mirror>& found, bool is_explored) {
  if (!takes_in_) return false;
  const std::size_t erased = std::erase_if(found, [&](const Mirror& mirror) {
    const auto storage = mirror.storage.lock();
    if (storage == nullptr || storage->device().is_meta()) return false;
    if (!is_explored && dropped_.contains(storage.get())) return false;
    known_.push_back({{mirror.name.empty() ? mirror.what : mirror.name,
                       BytesOfStorage(c10::Storage(storage)), /*is_mirror=*/true},
                      mirror.writer,
                      mirror.is_born,
                      !mirror.copies.empty(),
                      is_explored});
    return true;
  });
  return erased > 0;
}

void MirrorBook::Rebuild() {
  std::vector<LiveTarget> all = declared_->targets();
  absl::flat_hash_set<std::string> names;
  for (const LiveTarget& target : all) names.insert(target.name);
  for (Known& known : known_) {
    const std::string base = known.target.name;
    for (int copy = 2; !names.insert(known.target.name).second; ++copy)
      known.target.name = absl::StrCat(base, " (", copy, ")");
    all.push_back(known.target);
  }
  auto targets = TargetSet::Create(std::move(all));
  TORCH_INTERNAL_ASSERT(targets.ok(), std::string(targets.status().message()));
  targets_ = std::make_shared<const TargetSet>(*std::move(targets));
}

}  // namespace loadplan
