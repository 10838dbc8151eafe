// TraceSession, the real tensors that are no targets and are written. See Note [Mirrors] in
// backend/mirrors.h.
#include <ATen/ops/equal.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "backend/convert.h"
#include "backend/inner_tensors.h"
#include "backend/loader_line.h"
#include "backend/mode.h"
#include "backend/trace_session.h"
#include "backend/trace_tensor.h"

namespace loadplan {
namespace {

bool ShowsTheSame(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && a.scalar_type() == b.scalar_type() &&
         a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() &&
         a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides();
}

}  // namespace

void TraceSession::NoteWrite(const at::Tensor& tensor, const std::string& op, bool runs) {
  if (IsWrapper(tensor)) {
    for (const at::Tensor& inner : InnerTensors(tensor)) NoteWrite(inner, op, runs);
    return;
  }
  if (IsTraceTensor(tensor) || !tensor.has_storage() || tensor.layout() != at::kStrided) return;
  const c10::Storage& storage = tensor.storage();
  bool keeps = runs && !storage.device().is_meta();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = real_.find(storage.unsafeGetStorageImpl());
    if (found != real_.end()) {
      const RealStorage& real = found->second;
      if (IsTarget(real.id) || (runs ? real.has_run : !real.traced_writer.empty())) return;
      keeps &= !real.before.defined();
    }
    keeps &= !IsBorn(storage);
  }
  std::string writer = absl::StrCat("`", op, "`");
  if (!runs) absl::StrAppend(&writer, AtLine(LoaderLine()));
  at::Tensor before;
  const ModeOff mode_off;
  if (keeps) before = CopyOf(storage);
  const std::lock_guard<std::mutex> lock(mutex_);
  RealStorage& real = RealOf(storage);
  SetWhat(real, tensor);
  std::string& known = runs ? real.writer : real.traced_writer;
  if (known.empty()) known = std::move(writer);
  if (runs) real.has_run = true;
  if (before.defined()) Keep(real, std::move(before));
}

void TraceSession::NoteExposure(const at::Tensor& tensor, const std::string& op) {
  if (IsWrapper(tensor) || IsTraceTensor(tensor) || !tensor.has_storage() ||
      tensor.layout() != at::kStrided)
    return;
  const c10::Storage& storage = tensor.storage();
  if (storage.device().is_meta()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = real_.find(storage.unsafeGetStorageImpl());
    if (IsBorn(storage) ||
        (found != real_.end() && (IsTarget(found->second.id) || found->second.before.defined()))) {
      return;
    }
  }
  const ModeOff mode_off;
  at::Tensor before = CopyOf(storage);
  const std::lock_guard<std::mutex> lock(mutex_);
  RealStorage& real = RealOf(storage);
  SetWhat(real, tensor);
  real.exposed = op;
  Keep(real, std::move(before));
}

void TraceSession::NoteReshape(const at::Tensor& tensor, const std::string& op) {
  if (IsWrapper(tensor) || IsTraceTensor(tensor) || !tensor.has_storage() ||
      tensor.layout() != at::kStrided)
    return;
  const c10::Storage& storage = tensor.storage();
  const ModeOff mode_off;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (IsBorn(storage) || reshaped_.contains(tensor.unsafeGetTensorImpl())) return;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weak(tensor.getIntrusivePtr());
  reshaped_.emplace(tensor.unsafeGetTensorImpl(),
                    Reshaped{std::move(weak), tensor.detach(), storage.nbytes(), op});
}

void TraceSession::NoteBirth(const at::Tensor& tensor) {
  if (IsWrapper(tensor)) {
    for (const at::Tensor& inner : InnerTensors(tensor)) NoteBirth(inner);
    return;
  }
  if (!tensor.defined() || IsTraceTensor(tensor) || !tensor.has_storage() ||
      tensor.layout() != at::kStrided) {
    return;
  }
  const c10::Storage& storage = tensor.storage();
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = real_.find(storage.unsafeGetStorageImpl());
  if (known != real_.end()) known->second.before.reset();
  born_.try_emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
  if (born_.size() < drop_born_at_) return;
  absl::erase_if(born_, [](const auto& entry) { return entry.second.expired(); });
  drop_born_at_ = std::max(drop_born_at_, 2 * born_.size());
}

bool TraceSession::IsBorn(const c10::Storage& storage) const {
  return born_.contains(storage.unsafeGetStorageImpl());
}

// A part of it may be traced already.
at::Tensor TraceSession::CopyOf(const c10::Storage& storage) {
  const StorageGuards::Lift lift(guards_, {storage.unsafeGetStorageImpl()});
  return BytesOfStorage(storage).clone();
}

// Holds the mutex.
void TraceSession::Keep(RealStorage& real, at::Tensor before) {
  kept_nbytes_ += before.nbytes();
  real.before = std::move(before);
  if (kept_nbytes_ > drop_at_nbytes_) DropDead();
}

// Holds the mutex.
void TraceSession::SetWhat(RealStorage& real, const at::Tensor& tensor) {
  if (!real.what.empty()) return;
  real.what = absl::StrCat("a tensor of shape [", absl::StrJoin(tensor.sizes(), ", "),
                           "] and dtype ", std::string(ToDType(tensor.scalar_type()).name));
}

void TraceSession::PutBack() {
  const ModeOff mode_off;
  const std::lock_guard<std::mutex> lock(mutex_);
  PutBackShapes();
  PutBackBytes();
}

void TraceSession::PutBackShapes() {
  for (auto& [key, reshaped] : reshaped_) {
    const at::Tensor tensor(reshaped.tensor.lock());
    if (!tensor.defined()) continue;
    const at::Tensor& was = reshaped.was;
    const c10::Storage& storage = was.storage();
    if (ShowsTheSame(tensor, was) && storage.nbytes() == reshaped.nbytes) continue;
    unplannable_ = absl::StrCat("`", reshaped.op, "` moves a tensor of shape [",
                                absl::StrJoin(was.sizes(), ", "),
                                "] that is no target and outlives load_weights");
    // What it grew by stays allocated; torch never shrinks memory either.
    if (storage.nbytes() > reshaped.nbytes) storage.set_nbytes(reshaped.nbytes);
    // As `set_data` does it, which asks kernels of what may be a trace tensor now.
    tensor.unsafeGetTensorImpl()->shallow_copy_from(was.getIntrusivePtr());
  }
  reshaped_.clear();
}

void TraceSession::PutBackBytes() {
  for (auto& [key, real] : real_) {
    const at::Tensor before = std::exchange(real.before, {});
    const auto storage = before.defined() ? real.storage.lock() : nullptr;
    if (storage == nullptr) continue;
    const auto nbytes = static_cast<int64_t>(std::min(storage->nbytes(), before.nbytes()));
    const at::Tensor now = BytesOfStorage(c10::Storage(storage)).narrow(0, 0, nbytes);
    const at::Tensor kept = before.narrow(0, 0, nbytes);
    if (!real.has_run) {
      if (at::equal(now, kept)) continue;
      unplannable_ =
          absl::StrCat("the loader writes ", real.what,
                       " that is no target and outlives load_weights through `", real.exposed, "`");
    }
    now.copy_(kept);
  }
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
                                    {},
                                    real.id >= 0,
                                    born_.contains(impl)});
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
