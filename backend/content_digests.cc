#include "backend/content_digests.h"

#include <cstddef>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "backend/mode.h"

namespace loadplan {
namespace {

void AddText(ContentHash& hash, const std::string& text) {
  hash.AddBytes(text.data(), text.size());
}

void AddTensor(ContentHash& hash, const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  AddText(hash, c10::toString(tensor.scalar_type()));
  for (const int64_t size : tensor.sizes()) hash.Add(static_cast<std::uint64_t>(size));
  for (const int64_t stride : tensor.strides()) hash.Add(static_cast<std::uint64_t>(stride));
  if (tensor.layout() != at::kStrided) return;
  const at::Tensor dense = tensor.detach().cpu().contiguous();
  hash.AddBytes(dense.const_data_ptr(), dense.nbytes());
}

void AddValue(ContentHash& hash, const c10::IValue& value) {
  if (value.isTensor()) return AddTensor(hash, value.toTensor());
  if (value.isDouble()) {
    const double number = value.toDouble();
    hash.AddBytes(&number, sizeof(number));
    return;
  }
  if (value.isList()) {
    hash.Add(value.toListRef().size());
    for (const c10::IValue& item : value.toListRef()) AddValue(hash, item);
    return;
  }
  std::ostringstream text;
  text << value.tagKind() << ' ';
  if (!value.isGenerator()) text << value;
  AddText(hash, text.str());
}

std::uint64_t DigestOf(const OperatorNode& node) {
  ContentHash hash(static_cast<std::uint64_t>(node.default_dtype));
  for (const c10::IValue& argument : node.arguments) AddValue(hash, argument);
  for (const ResultMeta& result : node.results) {
    for (const int64_t stride : result.strides) hash.Add(static_cast<std::uint64_t>(stride));
  }
  return hash.value();
}

// Bytes that a map reads more than once are looked at once.
StridedMap WithoutRepeats(const StridedMap& map) {
  DimVector shape;
  MapSide from{map.from().byte_offset, {}, map.from().itemsize};
  for (std::size_t d = 0; d < map.shape().size(); ++d) {
    if (map.from().byte_strides[d] == 0) continue;
    shape.push_back(map.shape()[d]);
    from.byte_strides.push_back(map.from().byte_strides[d]);
  }
  MapSide to{0, DimVector(shape.size()), from.itemsize};
  Index stride = from.itemsize;
  for (std::size_t d = shape.size(); d-- > 0;) {
    to.byte_strides[d] = stride;
    stride *= shape[d];
  }
  return StridedMap::Unchecked(std::move(shape), std::move(to), std::move(from), /*is_cast=*/false);
}

}  // namespace

ContentDigests DigestsOf(const TraceSession& session) {
  const ModeOff mode_off;
  ContentDigests digests;
  digests.operators.reserve(session.log().nodes.size());
  for (std::size_t node = 0; node < session.log().nodes.size(); ++node)
    digests.operators.push_back(DigestOf(*session.program(static_cast<NodeId>(node))));
  digests.constant = [&session](StorageId storage, const StridedMap& map) {
    const ModeOff off;
    const StorageRecord& record = session.log().storages[static_cast<std::size_t>(storage)];
    const at::Tensor value = session.captured()[static_cast<std::size_t>(record.ref)].cpu();
    const auto* const bytes = static_cast<const char*>(value.const_data_ptr());
    ContentHash hash(0);
    ForEachRun(WithoutRepeats(map), [&](Index /*to*/, Index from, Index nbytes) {
      hash.AddBytes(bytes + from, static_cast<std::size_t>(nbytes));
    });
    return hash.value();
  };
  return digests;
}

}  // namespace loadplan
