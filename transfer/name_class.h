// NameClass: tensors that have the same geometry on every rank, see Note [Schedule].
#ifndef LOADPLAN_TRANSFER_NAME_CLASS_H_
#define LOADPLAN_TRANSFER_NAME_CLASS_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "geometry/box.h"
#include "geometry/index.h"
#include "transfer/geometry_table.h"

namespace loadplan {

// What one receiver gets out of one shard.
struct ScheduleItem {
  std::int32_t receiver = 0;
  Box box;
  Index nbytes = 0;
  // The name that comes k-th in the class is sent by senders[k % senders.size()].
  std::vector<std::int32_t> senders;
  std::int32_t first_chunk = 0;  // into NameClass::chunks
  std::int32_t num_chunks = 0;

  std::int32_t SenderOf(std::int32_t ordinal) const {
    return senders[static_cast<std::size_t>(ordinal) % senders.size()];
  }
};

struct ScheduleChunk {
  std::int32_t item = 0;
  Box box;
  Index nbytes = 0;
};

struct NameClass {
  DimVector shape;
  DType dtype;
  std::int32_t count = 0;  // of names
  std::int32_t num_receivers = 0;
  std::vector<ScheduleItem> items;  // by receiver, then by box
  std::vector<ScheduleChunk> chunks;

  Index nbytes() const { return TensorGeometry{shape, dtype, {}}.nbytes(); }
};

// What one table says of a name. `ranks`: whose table it is; pieces of other ranks do not count.
struct TableStatement {
  const TensorGeometry* geometry = nullptr;
  const std::vector<std::int32_t>* ranks = nullptr;
  bool is_held = false;
};

// What has to be held of a tensor.
struct HoldRules {
  bool whole = true;   // all of it, where some of it is
  bool needed = true;  // some of it, where some rank needs it
};

// The items of a class; chunks are not cut yet, and `senders` are all ranks that hold the box.
// Errors as Schedule::Make. `name` is one of the class, for messages.
absl::StatusOr<NameClass> MakeNameClass(const std::string& name,
                                        std::span<const TableStatement> statements,
                                        const HoldRules& rules);

// Cuts `box` into boxes of `max_nbytes` at most (one element at least), in row-major order, each
// contiguous in a row-major copy of `box`.
std::vector<Box> SplitBox(const Box& box, Index itemsize, Index max_nbytes);

// `box` in `count` parts along its first dimension of more than one element; fewer where it has
// fewer elements there.
std::vector<Box> Stripes(const Box& box, Index count);

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_NAME_CLASS_H_
