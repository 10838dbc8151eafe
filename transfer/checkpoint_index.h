// `model.safetensors.index.json`: which file of a folder holds which tensor.
#ifndef LOADPLAN_TRANSFER_CHECKPOINT_INDEX_H_
#define LOADPLAN_TRANSFER_CHECKPOINT_INDEX_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "geometry/export.h"

namespace loadplan {

struct IndexedFile {
  std::string file;  // relative to the folder of the index
  std::vector<std::string> names;
};

// The `weight_map`, by file, both in order of appearance. InvalidArgument: no JSON object with one,
// a name that comes twice, a file outside the folder (absolute, or with `..`). The text may be
// hostile; no torch, no file.
LOADPLAN_API absl::StatusOr<std::vector<IndexedFile>> ParseCheckpointIndex(std::string_view json);

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_CHECKPOINT_INDEX_H_
