// TraceSession, the real tensors that are no targets and are written. See Note [Mirrors] in
// backend/mirrors.h.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "backend/convert.h"
#include "backend/loader_line.h"
#include "backend/mode.h"
#include "backend/trace_session.h"
#include "backend/trace_tensor.h"

namespace loadplan {

void TraceSession::NoteWrite(const at::Tensor& tensor, const std::string& op, bool runs) {
  if (IsTraceTensor(tensor) || !tensor.has_storage() || tensor.layout() != at::kStrided) return;
  const c10::Storage& storage = tensor.storage();
  bool is_born = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = real_.find(storage.unsafeGetStorageImpl());
    if (found != real_.end()) {
      const RealStorage& real = found->second;
      if (IsTarget(real.id) || (runs ? real.has_run : !real.traced_writer.empty())) return;
      is_born = real.is_born;
    }
  }
  std::string writer = absl::StrCat("`", op, "`");
  if (!runs) absl::StrAppend(&writer, AtLine(LoaderLine()));
  at::Tensor before;
  const ModeOff mode_off;
  if (runs && !is_born && !storage.device().is_meta()) before = BytesOfStorage(storage).clone();
  const std::lock_guard<std::mutex> lock(mutex_);
  RealStorage& real = RealOf(storage);
  if (real.what.empty()) {
    real.what = absl::StrCat("a tensor of shape [", absl::StrJoin(tensor.sizes(), ", "),
                             "] and dtype ", std::string(ToDType(tensor.scalar_type()).name));
  }
  std::string& known = runs ? real.writer : real.traced_writer;
  if (known.empty()) known = std::move(writer);
  if (!runs || std::exchange(real.has_run, true) || !before.defined()) return;
  real.before = std::move(before);
  kept_nbytes_ += storage.nbytes();
  if (kept_nbytes_ > drop_at_nbytes_) DropDead();
}

void TraceSession::NoteBirth(const at::Tensor& tensor) {
  if (!tensor.has_storage() || IsTraceTensor(tensor)) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  RealOf(tensor.storage()).is_born = true;
}

TraceSession::RealStorage& TraceSession::RealOf(const c10::Storage& storage) {
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  const auto found = real_.find(impl);
  if (found != real_.end()) return found->second;
  c10::weak_intrusive_ptr<c10::StorageImpl> weak(storage.getWeakStorageImpl());
  return real_.emplace(impl, RealStorage{.storage = std::move(weak)}).first->second;
}

// What has died is no mirror. Holds the mutex.
void TraceSession::DropDead() {
  kept_nbytes_ = 0;
  for (auto& [impl, real] : real_) {
    if (!real.before.defined()) continue;
    if (real.storage.expired()) {
      // Defined all the same: nobody asks for it again.
      real.before = at::Tensor();
    } else {
      kept_nbytes_ += real.before.nbytes();
    }
  }
  drop_at_nbytes_ = std::max(drop_at_nbytes_, 2 * kept_nbytes_);
}

std::vector<Mirror> TraceSession::LiveMirrors() const {
  std::vector<Mirror> mirrors;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [impl, real] : real_) {
    if (IsTarget(real.id) || (real.stale_copies.empty() && !real.has_run)) continue;
    const auto strong = real.storage.lock();
    if (strong == nullptr || strong.use_count() == 1) continue;
    Mirror& mirror =
        mirrors.emplace_back(Mirror{real.storage,
                                    real.what,
                                    real.name,
                                    real.traced_writer.empty() ? real.writer : real.traced_writer,
                                    real.before,
                                    {},
                                    real.id >= 0});
    for (const std::int32_t copy : real.stale_copies) {
      const CopyRecord& record = log_.copies[static_cast<std::size_t>(copy)];
      mirror.copies.push_back({real.id, record.map.ToLayout(), record.to_dtype});
    }
  }
  return mirrors;
}

void TraceSession::NameMirror(const c10::StorageImpl* storage, const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = real_.find(storage);
  if (found != real_.end()) found->second.name = name;
}

}  // namespace loadplan
