// ReaderTable: who of several ranks reads which box of a file's tensors, so that each byte is read
// once.
#ifndef LOADPLAN_TRANSFER_READER_TABLE_H_
#define LOADPLAN_TRANSFER_READER_TABLE_H_

#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "geometry/export.h"
#include "transfer/geometry_table.h"
#include "transfer/schedule.h"

namespace loadplan {

// What each rank is to hold, made from what all of them need (`RankTables::needed`); pieces of all
// ranks, the same on each of them.
//
//   boxes that are contiguous in the file     read by the ranks that need them: in stripes where
//   and equal or disjoint (rows, experts)     several need a large one, in turns where it is small
//   all others (columns)                      together, in stripes of rows, by all that need some
//
// Nothing is in it that no rank needs, and nothing twice. Errors as Schedule::Make.
LOADPLAN_API absl::StatusOr<GeometryTable> ReaderTable(std::span<const RankTables> ranks);

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_READER_TABLE_H_
