#include "transfer/landing.h"

#include <algorithm>

#include "backend/convert.h"
#include "geometry/strided_map.h"
#include "transfer/shard_set.h"

namespace loadplan {
namespace {

absl::Status BeginName(ReloadSession& session, const std::string& name, const DimVector& shape,
                       const DType& dtype) {
  return session.BeginParts(name, at::IntArrayRef(shape.data(), shape.size()), ToScalarType(dtype));
}

}  // namespace

std::vector<std::int32_t> EntriesWithoutParts(const Schedule& schedule, std::int32_t rank,
                                              const LoadPlan& plan) {
  std::vector<bool> has_parts(plan.sources().size(), false);
  const std::vector<std::int32_t> num_parts = schedule.NumPartsTo(rank);
  for (std::size_t i = 0; i < num_parts.size(); ++i) {
    if (num_parts[i] == 0) continue;
    if (const auto entry = plan.Find(schedule.names()[i])) {
      has_parts[static_cast<std::size_t>(*entry)] = true;
    }
  }
  std::vector<std::int32_t> entries;
  for (std::size_t i = 0; i < has_parts.size(); ++i) {
    const auto entry = static_cast<std::int32_t>(i);
    if (has_parts[i] || plan.entries()[i].kind == EntryKind::kUnneeded) continue;
    // What is read and has no parts is left to other calls.
    const std::vector<Box> reads = plan.Reads(entry);
    if (std::ranges::all_of(reads, [](const Box& box) { return box.num_elements() == 0; })) {
      entries.push_back(entry);
    }
  }
  return entries;
}

absl::Status Landing::Begin(const LoadPlan& plan, const std::vector<std::int32_t>& empty) {
  for (const std::int32_t entry : empty) {
    const SourceTensor& source = plan.sources()[static_cast<std::size_t>(entry)];
    absl::Status status = BeginName(session_, source.name, source.shape, source.dtype);
    if (status.ok()) status = session_.CompleteParts(source.name);
    if (!status.ok()) return status;
  }
  const std::vector<std::string>& names = schedule_.names();
  for (std::size_t i = 0; !plan.overlaps().empty() && i < plan.sources().size(); ++i) {
    if (plan.entries()[i].kind != EntryKind::kFallback) continue;
    const auto found = std::ranges::lower_bound(names, plan.sources()[i].name);
    if (found == names.end() || *found != plan.sources()[i].name) continue;
    const auto name = static_cast<std::int32_t>(found - names.begin());
    if (missing_[static_cast<std::size_t>(name)] == 0) continue;
    if (absl::Status status = Open(name); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Landing::Open(std::int32_t name) {
  if (is_open_[static_cast<std::size_t>(name)]) return absl::OkStatus();
  is_open_[static_cast<std::size_t>(name)] = true;
  const NameClass& name_class = schedule_.ClassOf(name);
  return BeginName(session_, NameOf(name), name_class.shape, name_class.dtype);
}

absl::Status Landing::CountPart(std::int32_t name) {
  if (--missing_[static_cast<std::size_t>(name)] > 0) return absl::OkStatus();
  return session_.CompleteParts(NameOf(name));
}

StridedLayout Landing::InTensor(const MessagePart& part) const {
  const NameClass& name_class = schedule_.ClassOf(part.name);
  return LayoutOfBox(schedule_.ChunkOf(part).box, name_class.shape, name_class.dtype.itemsize);
}

absl::Status Landing::Land(const MessagePart& part, const StridedLayout& layout,
                           const ByteSide& from) {
  if (absl::Status status = Open(part.name); !status.ok()) return status;
  const StridedLayout in_tensor = InTensor(part);
  const StridedMap held = Coalesce(StridedMap::Unchecked(
      in_tensor.shape(), {in_tensor.byte_offset(), in_tensor.byte_strides(), in_tensor.itemsize()},
      {layout.byte_offset(), layout.byte_strides(), layout.itemsize()}, /*is_cast=*/false));
  absl::Status status = session_.DeliverPart(NameOf(part.name), held, from);
  return status.ok() ? CountPart(part.name) : status;
}

absl::StatusOr<std::optional<ByteSide>> Landing::InPlace(const MessagePart& part) {
  if (absl::Status status = Open(part.name); !status.ok()) return status;
  const StridedLayout in_tensor = InTensor(part);
  if (!IsContiguous(in_tensor)) return std::nullopt;
  return session_.InPlace(NameOf(part.name), in_tensor.Span());
}

absl::Status Landing::LandedInPlace(const MessagePart& part) {
  absl::Status status = session_.DeliveredInPlace(NameOf(part.name), InTensor(part).Span());
  return status.ok() ? CountPart(part.name) : status;
}

}  // namespace loadplan
