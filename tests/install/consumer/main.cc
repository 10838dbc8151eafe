// What a C++ host does: include a header of the installed tree, link one library.
#include <ATen/core/dispatch/Dispatcher.h>
#include <cstdio>

#include "geometry/index.h"

int main() {
  if (loadplan::CheckedAdd(40, 2) != 42) return 1;
  std::puts("ok");
  return 0;
}
