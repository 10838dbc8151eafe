#include "lifecycle/placed_part.h"

#include "lifecycle/stream_copy.h"

namespace loadplan {

void PlacedPart::Write(const std::byte* from) const {
  for (const Copy& copy : copies) StreamInLoops(copy.map, copy.to, from);
}

}  // namespace loadplan
