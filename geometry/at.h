// At: an element by a signed index, as ids of storages, names and programs are.
#ifndef LOADPLAN_GEOMETRY_AT_H_
#define LOADPLAN_GEOMETRY_AT_H_

#include <cstddef>

namespace loadplan {

// Not checked: ids come from the container that they index.
template <typename Vector, typename I>
auto& At(Vector& vector, I index) {
  return vector[static_cast<std::size_t>(index)];
}

}  // namespace loadplan

#endif  // LOADPLAN_GEOMETRY_AT_H_
