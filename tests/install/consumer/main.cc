// A C++ host: it includes the installed headers and links one library.
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdio>

#include "geometry/strided_layout.h"

int main() {
  const auto layout = loadplan::StridedLayout::Contiguous(24, {2, 3}, 4);
  if (!layout.ok()) return 1;
  std::printf("%s\n", loadplan::ToString(*layout).c_str());
  if (loadplan::ToString(*layout) != "24 + (2, 3):(12, 4) x 4") return 2;

  // Linking is enough: the library registers the trace device when it is loaded.
  const auto view = c10::Dispatcher::singleton().findSchema({"aten::view", ""});
  if (!view || !view->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
    std::puts("the trace device is not registered");
    return 3;
  }
  return 0;
}
