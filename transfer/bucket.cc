#include "transfer/bucket.h"

#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "geometry/checked_product.h"
#include "lifecycle/arrival.h"
#include "lifecycle/byte_copy.h"

namespace loadplan {
namespace {

absl::StatusOr<Index> NbytesIn(const BucketItem& item, Index buffer_nbytes) {
  const std::optional<Index> nbytes =
      CheckedProduct(static_cast<Index>(c10::elementSize(item.dtype)), item.shape);
  if (!nbytes.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("`", item.name, "` has a shape whose bytes cannot be counted: [",
                     absl::StrJoin(item.shape, ", "), "]; send it as declared"));
  }
  if (item.byte_offset < 0 || item.byte_offset > buffer_nbytes ||
      *nbytes > buffer_nbytes - item.byte_offset) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "`%s` has %d bytes at offset %d of a buffer of %d bytes; send the buffer that the offsets "
        "are for",
        item.name, *nbytes, item.byte_offset, buffer_nbytes));
  }
  return *nbytes;
}

// Why the bytes of `buffer` are not those of one piece of memory, with a verb; empty where they
// are.
std::string_view BufferProblem(const at::Tensor& buffer) {
  if (const std::string_view problem = KindProblem(buffer); !problem.empty()) return problem;
  if (buffer.is_meta()) return "is on meta, where it holds no data";
  // Its memory holds other values than it shows.
  if (buffer.is_neg() || buffer.is_conj()) return "is a lazily negated or conjugated view";
  return buffer.is_contiguous() ? "" : "is not contiguous";
}

}  // namespace

absl::Status DeliverBucket(ReloadSession& session, const at::Tensor& buffer,
                           std::span<const BucketItem> items) {
  if (const std::string_view problem = BufferProblem(buffer); !problem.empty()) {
    return session.FailWith(absl::InvalidArgumentError(
        absl::StrCat("the buffer of a bucket must be a contiguous tensor with memory; it ",
                     std::string(problem))));
  }
  const ByteSide from = ByteSide::OfElements(buffer);
  std::vector<Index> sizes;
  for (const BucketItem& item : items) {
    const absl::StatusOr<Index> nbytes = NbytesIn(item, static_cast<Index>(buffer.nbytes()));
    if (!nbytes.ok()) return session.FailWith(nbytes.status());
    sizes.push_back(*nbytes);
  }
  for (const BucketItem& item : items) {
    absl::Status status = session.BeginParts(item.name, item.shape, item.dtype);
    if (!status.ok()) return status;
  }
  session.BeginBatch();
  absl::Status status;
  for (std::size_t i = 0; status.ok() && i < items.size(); ++i) {
    const StridedMap held =
        StridedMap::Unchecked({}, {0, {}, sizes[i]}, {items[i].byte_offset, {}, sizes[i]}, false);
    if (sizes[i] > 0) status = session.DeliverPart(items[i].name, held, from);
    if (status.ok()) status = session.CompleteParts(items[i].name);
  }
  const absl::Status end = session.EndBatch();
  return status.ok() ? end : status;
}

}  // namespace loadplan
