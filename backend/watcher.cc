#include "backend/watcher.h"

#include <c10/util/Exception.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "backend/call_watch.h"
#include "backend/collective.h"
#include "backend/mode.h"
#include "backend/operator_call.h"
#include "backend/trace_tensor.h"

namespace loadplan {
std::vector<c10::StorageImpl*> StoragesOf(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::StorageImpl*> storages;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.has_storage())
      storages.push_back(tensor.storage().unsafeGetStorageImpl());
  }
  return storages;
}

void RefuseValueRead(TraceSession& session, const std::string& op,
                     const std::vector<at::Tensor>& tensors) {
  session.RecordRefusal(op, absl::StrCat("`", op, "` reads its value"), std::nullopt, tensors);
  std::string what;
  for (const at::Tensor& tensor : tensors) {
    if (session.Find(tensor).touch == Touch::kTrace || what.empty())
      what = session.Describe(tensor);
  }
  TORCH_CHECK(false, "`", op, "` needs the value of ", what, ", which holds no data while it is traced");
}

void WatchOperator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  TraceSession* const session = TraceSession::Current();
  if (session == nullptr) {
    if (CallWatch* const watch = CallWatch::Current()) watch->Check(op, *stack);
    op.redispatchBoxed(keys & kBelowMode, stack);
    return;
  }
  OperatorCall call(*session, op, stack);
  if (call.has_wrapper()) {
    call.NoteWrites(/*runs=*/true);
    op.redispatchBoxed(keys & kBelowMode, stack);
    return call.NoteBirths();
  }
  if (call.touches() || IsCollective(op)) return call.Run();
  call.NoteWrites(/*runs=*/true);
  call.NoteReshapes();
  if (call.random()) {
    call.RunForReal();
  } else if (op.operator_name().name.starts_with("aten::")) {
    const ModeOff mode_off;
    op.redispatchBoxed(keys & kBelowMode, stack);
    call.NoteBirths();
  } else {
    // A custom operator may be Python that closes over live tensors: stay on inside it.
    op.redispatchBoxed(keys & kBelowMode, stack);
  }
}

namespace {

// `torch.tril_indices(2, 2, device=w.device)`: data of no checkpoint tensor keeps its values.
void MakeConstant(TraceSession& session, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const ModeOff mode_off;
  const std::size_t begin = stack->size() - op.schema().arguments().size();
  for (std::size_t i = begin; i < stack->size(); ++i) {
    if ((*stack)[i].isDevice()) (*stack)[i] = c10::Device(c10::kCPU);
  }
  op.callBoxed(stack);
  for (std::size_t i = begin; i < stack->size(); ++i) {
    if ((*stack)[i].isTensor()) (*stack)[i] = session.NewConstantTensor((*stack)[i].toTensor());
  }
}

}  // namespace

void JoinAndCall(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::shared_ptr<TraceSession> session;
  bool is_factory = !op.hasTag(at::Tag::nondeterministic_seeded);
  const std::size_t count = op.schema().arguments().size();
  const auto look = [&](const at::Tensor& tensor) {
    is_factory = false;
    if (session != nullptr || !tensor.defined() || !IsTraceTensor(tensor) || !tensor.has_storage())
      return;
    if (const TraceContext* const context = ContextOf(tensor.storage().unsafeGetStorageImpl()))
      session = context->session;
  };
  for (const c10::IValue& value : c10::ArrayRef<c10::IValue>(*stack).slice(stack->size() - count)) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isDevice() && value.toDevice().is_privateuseone() && session == nullptr) {
      if (TraceSession* const current = TraceSession::Current())
        session = current->shared_from_this();
    }
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) look(tensor);
    }
  }
  TORCH_CHECK(session != nullptr, "`", op.operator_name(), "` is not available on the trace device");
  TORCH_CHECK(session->active(), "`", op.operator_name(),
              "` is called on a trace tensor whose pass has ended; trace tensors hold no data and live only as long as "
              "the pass that made them");
  if (is_factory) return MakeConstant(*session, op, stack);
  // `torch.tensor(values, device=trace)` switches every mode off for a while, ours too.
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  static thread_local int depth = 0;
  TORCH_CHECK(depth < 4, "`", op.operator_name(), "` is not available on the trace device");
  struct Depth {
    Depth() { ++depth; }
    ~Depth() { --depth; }
  } const inside;
  if (TraceSession::Current() != session.get()) session->JoinThread();
  keys.excluded_ = keys.excluded_.remove(kModeKey);
  keys.included_ = keys.included_.add(kModeKey);
  const c10::impl::ForceDispatchKeyGuard on(keys);
  op.callBoxed(stack);
}

}  // namespace loadplan
