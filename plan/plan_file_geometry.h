// Shapes, layouts and maps out of a plan file. See Note [Plan files] in plan/plan_file.h.
#ifndef LOADPLAN_PLAN_PLAN_FILE_GEOMETRY_H_
#define LOADPLAN_PLAN_PLAN_FILE_GEOMETRY_H_

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "geometry/strided_layout.h"
#include "geometry/strided_map.h"
#include "plan/byte_codec.h"
#include "plan/dtype.h"

namespace loadplan {

// Torch itself has no kernels for more dimensions.
inline constexpr Index kMaxSavedRank = 64;

// The bytes of a tensor; nullopt where they, or those of its extents without a 0, do not fit.
std::optional<Index> NbytesOf(const DimVector& shape, Index itemsize);

// Fails in the reader where an extent is negative or there are too many.
DimVector ReadShape(ByteReader& in);

// InvalidArgument as StridedLayout::Create, or where the reader failed.
absl::StatusOr<StridedLayout> ReadLayout(ByteReader& in);

// A map without its two offsets, and what its items are cast through. Names that differ in
// nothing else share it.
class MapRow {
 public:
  // Fails in the reader where the numbers are no map: a byte would be written twice, the sides
  // have items of different sizes without a cast, or the sizes do not fit in an Index.
  static MapRow Read(ByteReader& in, const std::vector<DType>& dtypes);

  // The map at these offsets; nullopt where a side does not lie in its `limit` bytes.
  std::optional<StridedMap> At(Index to_offset, Index to_limit, Index from_offset,
                               Index from_limit) const;
  const std::vector<CastStep>& casts() const { return casts_; }

 private:
  bool Check(ByteReader& in);

  StridedMap map_;  // both offsets 0
  std::vector<CastStep> casts_;
  ByteRange to_span_;  // relative to the offset
  ByteRange from_span_;
};

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_PLAN_FILE_GEOMETRY_H_
