// Plans as flat lists, the cheapest form in which they cross into a host language.
#ifndef LOADPLAN_OPS_ENCODE_H_
#define LOADPLAN_OPS_ENCODE_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "geometry/box.h"
#include "plan/landings.h"
#include "plan/load_plan.h"

namespace loadplan {

// Per box: its rank, then start and stop of each dimension.
std::vector<std::int64_t> EncodeBoxes(std::span<const Box> boxes);

// The copies that a name takes part in. `numbers` holds, per copy: rank, shape; offset and strides
// in the target, itemsize; offset and strides in the source, itemsize; the number of dtypes it
// is cast through and their codes. `targets` holds the first name of each written storage.
struct EncodedWrites {
  std::vector<std::int64_t> numbers;
  std::vector<std::string> targets;
};
EncodedWrites EncodeWrites(std::span<const WriteItem> items,
                           std::span<const std::string> storage_names);

// Per landing: target, kind of origin, its index, 1 where boxes are hulls plus 2 where transposed,
// 4 where reversed and 8 where repeated, the number of source
// boxes and of target boxes, then these boxes as EncodeBoxes does.
std::vector<std::int64_t> EncodeLandings(std::span<const Landing> landings);

// Names that the programs of `entry` need, sorted; empty where it feeds none.
std::vector<std::int64_t> InputNames(const LoadPlan& plan, std::int32_t entry);
// Of every entry: one pass over the programs.
std::vector<std::vector<std::int64_t>> InputNames(const LoadPlan& plan);

// Of every entry a digest of what the plan does with it, names and targets by name: entries of two
// plans with equal digests say the same.
std::vector<std::int64_t> EntryDigests(const LoadPlan& plan,
                                       std::span<const std::string> storage_names);

}  // namespace loadplan

#endif  // LOADPLAN_OPS_ENCODE_H_
