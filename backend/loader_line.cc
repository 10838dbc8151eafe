#include "backend/loader_line.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "backend/mode.h"

namespace loadplan {

std::string LoaderLine() {
  const auto op = c10::Dispatcher::singleton().findOp({"loadplan::loader_line", ""});
  if (!op.has_value() ||
      !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) {
    return "";
  }
  const ModeOff mode_off;
  torch::jit::Stack stack;
  op->callBoxed(&stack);
  return stack.back().toStringRef();
}

}  // namespace loadplan
