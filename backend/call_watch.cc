#include "backend/call_watch.h"

#include <c10/util/Exception.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "backend/collective.h"
#include "backend/convert.h"
#include "backend/mode.h"
#include "backend/operator_node.h"
#include "backend/watcher.h"
#include "geometry/overlap.h"

namespace loadplan {
namespace {

thread_local std::shared_ptr<CallWatch> thread_watch;

}  // namespace

CallWatch::CallWatch(const LoadPlan& plan, std::shared_ptr<const TargetSet> targets)
    : plan_(plan),
      targets_(std::move(targets)),
      planned_(targets_->storages().size()),
      met_(targets_->storages().size(), false) {
  const auto add = [this](const WriteItem& write, std::int32_t name) {
    planned_[static_cast<std::size_t>(write.target)].push_back({write.map.ToLayout(), name});
  };
  for (std::size_t n = 0; n < plan.entries().size(); ++n) {
    const auto name = static_cast<std::int32_t>(n);
    for (const WriteItem& write : plan.writes_of(name)) add(write, name);
  }
  for (const WriteItem& write : plan.constants()) add(write, -1);
  for (const WriteItem& write : plan.live_copies()) add(write, -1);
  for (const WriteItem& write : plan.value_writes()) add(write, -1);
}

CallWatch* CallWatch::Current() {
  CallWatch* const watch = thread_watch.get();
  if (watch != nullptr && !watch->active_.load(std::memory_order_acquire)) {
    c10::impl::tls_set_dispatch_key_included(kModeKey, false);
    thread_watch.reset();
    return nullptr;
  }
  return watch;
}

void CallWatch::JoinThread() {
  thread_watch = shared_from_this();
  c10::impl::tls_set_dispatch_key_included(kModeKey, true);
}

absl::Status CallWatch::End() {
  active_.store(false, std::memory_order_release);
  static_cast<void>(Current());  // switches this thread off
  const std::lock_guard<std::mutex> lock(mutex_);
  return violation_.empty() ? absl::OkStatus() : absl::FailedPreconditionError(violation_);
}

std::vector<StorageId> CallWatch::met() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<StorageId> met;
  for (std::size_t s = 0; s < met_.size(); ++s) {
    if (met_[s]) met.push_back(static_cast<StorageId>(s));
  }
  return met;
}

std::vector<TargetRegion> CallWatch::TakeWritten() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::move(written_);
}

void CallWatch::Check(const at::Tensor& tensor, const std::string& op, bool written) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.layout() != at::kStrided) return;
  if (IsWrapper(tensor)) return;  // its memory is that of the tensors inside
  const StorageId storage = targets_->Find(tensor.storage().unsafeGetStorageImpl());
  if (storage < 0) {
    if (!written || !keep_) return;
    const ModeOff mode_off;
    const absl::Status status = keep_(tensor);
    TORCH_CHECK(status.ok(), std::string(status.message()));
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    met_[static_cast<std::size_t>(storage)] = true;
  }
  const StridedLayout layout = LayoutOf(tensor);
  for (const Planned& planned : planned_[static_cast<std::size_t>(storage)]) {
    if (!MayShareBytes(layout, planned.layout)) continue;
    const std::string from =
        planned.name < 0
            ? ""
            : absl::StrCat(" from `", plan_.sources()[static_cast<std::size_t>(planned.name)].name,
                           "`");
    const std::string message =
        absl::StrCat("load_weights, called with the fallback names only, touches bytes of `",
                     targets_->NameOf(storage), "` (`", op, "`) that the plan writes", from,
                     "; plan again, or keep the two apart in the loader");
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (violation_.empty()) violation_ = message;
    }
    TORCH_CHECK(false, message);
  }
  if (!written) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (written_.empty() || written_.back().storage != storage || written_.back().layout != layout) {
    written_.push_back({storage, layout});
  }
}

void CallWatch::Check(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (AnswersWithoutBytes(op.operator_name())) return;
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  const auto values = c10::ArrayRef<c10::IValue>(stack).slice(stack.size() - arguments.size());
  const std::string& name = op.operator_name().name;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const bool written = MayWrite(op, i);
    ForEachTensor(values[i], [&](int64_t /*element*/, const at::Tensor& tensor) {
      Check(tensor, name, written);
    });
  }
}

}  // namespace loadplan
