// Views that conjugate or negate when they are read: `w.conj()`, `z.conj().imag`. Their bit is in
// no layout, so that a copy record would lose it.
#ifndef LOADPLAN_BACKEND_LAZY_BITS_H_
#define LOADPLAN_BACKEND_LAZY_BITS_H_

#include <ATen/core/Tensor.h>

#include <initializer_list>

#include "backend/trace_session.h"

namespace loadplan {

inline bool IsLazy(const at::Tensor& tensor) { return tensor.is_conj() || tensor.is_neg(); }

// What `tensor`, which takes part in the pass, shows, in memory of its own: computed by operators
// that are recorded.
at::Tensor ResolveLazy(TraceSession& session, const at::Tensor& tensor);

// For an operator that writes a lazy tensor: the names behind `tensors` are fallbacks. Raises,
// except in a pass that explores, which goes on without the write.
void RefuseLazyWrite(TraceSession& session, const char* op,
                     std::initializer_list<at::Tensor> tensors);

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_LAZY_BITS_H_
