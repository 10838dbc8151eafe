// The watcher: sees every operator of a pass that is no view and has no kernel of
// its own here, and decides what happens to it.
#ifndef LOADPLAN_BACKEND_WATCHER_H_
#define LOADPLAN_BACKEND_WATCHER_H_

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <vector>

#include "backend/inner_tensors.h"
#include "backend/trace_session.h"

namespace loadplan {

// Note [What the watcher does]
//
//   torch.add(a, b)        real tensors that the pass does not know: runs
//   (param[e] != 1).any()  live bytes that the pass has not written: runs on them, and
//                          the result carries its history (live before the update)
//   idx + 1                constants on the trace device: runs on their values
//   w * 2, p.add_(1)       recorded as a node: shapes from meta tensors, nothing runs
//   w.item(), w.nonzero()  refused: the names behind w are fallbacks
//
// Boxed fallback of the mode key.
void WatchOperator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack);

// Boxed fallback of PrivateUse1: a trace tensor reached its backend in a thread that
// does not take part in the pass (an old pool thread): joins it and starts over.
void JoinAndCall(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Records that `op` needs values of `tensors` and raises the sentence that says so.
[[noreturn]] void RefuseValueRead(TraceSession& session, const std::string& op,
                                  const std::vector<at::Tensor>& tensors);

// Storages of tensors whose guards have to be lifted while an operator runs on them.
std::vector<c10::StorageImpl*> StoragesOf(const std::vector<at::Tensor>& tensors);

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_WATCHER_H_
