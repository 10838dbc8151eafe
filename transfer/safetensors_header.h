// The header of a safetensors file: which tensors it holds, and where.
//
//   8 bytes   n, little-endian
//   n bytes   JSON: {"w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}
//   the rest  data; offsets count from its first byte
//
// No torch and no file here: bytes in, a list or an error out. What comes in may be hostile.
#ifndef LOADPLAN_TRANSFER_SAFETENSORS_HEADER_H_
#define LOADPLAN_TRANSFER_SAFETENSORS_HEADER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "geometry/export.h"
#include "geometry/index.h"

namespace loadplan {

// Bytes before the JSON.
inline constexpr Index kSafetensorsPrefix = 8;
// The format's own limit of n.
inline constexpr Index kMaxSafetensorsHeader = 100'000'000;

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // as the file spells it: "BF16"
  DimVector shape;    // in elements of that dtype
  ByteRange bytes;    // of the data
};

// n, out of the first 8 bytes of a file of `file_nbytes`. InvalidArgument where no such header can
// be in it.
LOADPLAN_API absl::StatusOr<Index> SafetensorsHeaderNbytes(std::string_view prefix,
                                                           Index file_nbytes);

// The tensors, in the order of their data. `data_nbytes`: how many bytes follow the header.
//
// InvalidArgument, naming the tensor where it is about one: no JSON object, a name or key that
// comes twice, a dtype that the format does not know, extents or offsets that are negative or too
// large, a range that does not hold exactly the elements, ranges that overlap, leave a hole, or
// leave bytes of the data to nobody.
LOADPLAN_API absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensorsHeader(
    std::string_view json, Index data_nbytes);

// Bits of one element; nullopt for a dtype that the format does not know.
LOADPLAN_API std::optional<Index> SafetensorsDTypeBits(std::string_view dtype);

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_SAFETENSORS_HEADER_H_
