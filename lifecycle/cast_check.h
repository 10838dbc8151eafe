// CastsAsTorch: whether batches of a device may make a cast.
#ifndef LOADPLAN_LIFECYCLE_CAST_CHECK_H_
#define LOADPLAN_LIFECYCLE_CAST_CHECK_H_

#include "geometry/copy_job.h"
#include "geometry/export.h"
#include "lifecycle/copy_device.h"

namespace loadplan {

// Whether the engine of `device`, which has this cast, leaves every bit that `copy_` leaves there:
// see Note [Casts as torch makes them] in cuda/cast_tile.h. Both convert the same numbers, in rows
// and scattered: all there are of 1 and 2 bytes; of larger ones every sign and exponent with the
// first bits of the mantissa, each with the rest around every place at which a target rounds.
//
// Asked once in a process for each engine, device and pair, which waits for the device; not while
// its stream is being captured. False, and asked again, where it could not be found out (no
// memory).
LOADPLAN_API bool CastsAsTorch(const CopyDevice& device, CopyCast cast);

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_CAST_CHECK_H_
