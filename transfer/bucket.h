// Buckets: many tensors in one flat buffer, as trainers send them.
#ifndef LOADPLAN_TRANSFER_BUCKET_H_
#define LOADPLAN_TRANSFER_BUCKET_H_

#include <ATen/core/Tensor.h>

#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "geometry/export.h"
#include "geometry/index.h"
#include "lifecycle/reload_session.h"

namespace loadplan {

struct BucketItem {
  std::string name;
  std::vector<std::int64_t> shape;
  at::ScalarType dtype = at::ScalarType::Byte;
  Index byte_offset = 0;  // of its first byte in the buffer; any
};

// Lands every item, row-major, out of the memory of `buffer`, a contiguous tensor on any device.
// `session` has begun. Bytes go from the buffer to where the plan puts them, once; items that are
// cast and not aligned are copied to where they are first.
//
// InvalidArgument, with nothing of the bucket written: a buffer that is not contiguous, an item
// that reaches outside of it, and what ReloadSession says of a bad arrival. Any error fails the
// session.
LOADPLAN_API absl::Status DeliverBucket(ReloadSession& session, const at::Tensor& buffer,
                                        std::span<const BucketItem> items);

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_BUCKET_H_
