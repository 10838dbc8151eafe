// The mode key: how operators are seen before autograd and before any backend.
#ifndef LOADPLAN_BACKEND_MODE_H_
#define LOADPLAN_BACKEND_MODE_H_

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace loadplan {

// Note [The mode key]
//
//   p.copy_(w.narrow(0, 4, 4))       narrow: falls through; copy_: ours
//   torch.add(a, b)                  boxed fallback: nothing of ours, so it runs
//
// Included in the thread's dispatch state for the length of a pass. DeferredInit
// lies above autograd and above every backend (the Meta key would otherwise win
// over PrivateUse1), and nothing in torch itself uses it. Views fall through, so
// that the hot path pays nothing; everything else is seen once.
inline constexpr c10::DispatchKey kModeKey = c10::DispatchKey::DeferredInit;

// The keys below the mode key, for redispatching an operator that is not ours.
inline constexpr c10::DispatchKeySet kBelowMode{c10::DispatchKeySet::FULL_AFTER, kModeKey};

// While it lives, this thread's operators are not seen by the mode.
class ModeOff {
 public:
  ModeOff() : guard_(kModeKey) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_MODE_H_
