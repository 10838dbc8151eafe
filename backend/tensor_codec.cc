// Captured tensors as bytes: see backend/operator_codec.h.
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "backend/convert.h"
#include "backend/mode.h"
#include "backend/operator_codec.h"
#include "plan/byte_codec.h"
#include "plan/plan_file_geometry.h"

namespace loadplan {

std::optional<DType> DTypeByName(std::string_view name) {
  if (name.empty()) return std::nullopt;
  for (int code = 0; code < static_cast<int>(at::ScalarType::NumOptions); ++code) {
    const auto type = static_cast<at::ScalarType>(code);
    if (type == at::ScalarType::Undefined) continue;
    if (const DType dtype = ToDType(type); dtype.name == name) return dtype;
  }
  return std::nullopt;
}

absl::StatusOr<std::string> EncodeTensor(const at::Tensor& tensor) {
  const ModeOff mode_off;
  ByteWriter out;
  out.Unsigned(tensor.defined() ? 1 : 0);
  if (!tensor.defined()) return out.Take();
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || !tensor.has_storage() ||
      tensor.is_meta()) {
    return absl::UnimplementedError(
        absl::StrCat("a captured tensor of shape [", absl::StrJoin(tensor.sizes(), ", "),
                     "] has no plain memory and cannot be put into a file"));
  }
  const at::Tensor host = tensor.detach().resolve_conj().resolve_neg().cpu();
  out.Unsigned(tensor.is_cpu() ? 1 : 0);
  out.Unsigned(tensor.unsafeGetTensorImpl()->is_wrapped_number() ? 1 : 0);
  out.String(ToDType(host.scalar_type()).name);
  out.Signed(0);
  out.Count(static_cast<std::size_t>(host.dim()));
  for (const int64_t size : host.sizes()) out.Signed(size);
  for (const int64_t stride : host.strides()) out.Signed(stride * host.element_size());
  out.Signed(host.element_size());
  const auto nbytes = static_cast<std::size_t>(NbytesOf(MetaOf(host)));
  out.String(nbytes == 0
                 ? std::string_view()
                 : std::string_view(static_cast<const char*>(host.const_data_ptr()), nbytes));
  return out.Take();
}

absl::StatusOr<at::Tensor> DecodeTensor(std::string_view bytes, at::Device device) {
  const ModeOff mode_off;
  ByteReader in(bytes, "a captured tensor");
  if (in.Bounded(1, "the flag of a tensor") == 0) {
    in.ExpectEnd();
    if (!in.ok()) return in.status();
    return at::Tensor();
  }
  const bool is_cpu = in.Bounded(1, "the flag of a device") == 1;
  const bool is_wrapped = in.Bounded(1, "the flag of a number") == 1;
  const std::optional<DType> dtype = DTypeByName(in.String());
  absl::StatusOr<StridedLayout> layout = ReadLayout(in);
  if (!layout.ok()) return layout.status();
  const std::string_view data = in.String();
  in.ExpectEnd();
  if (!in.ok()) return in.status();
  const auto fits = [&] {
    if (!dtype.has_value() || c10::isQIntType(ToScalarType(*dtype)) ||
        layout->itemsize() != dtype->itemsize || layout->byte_offset() != 0) {
      return false;
    }
    for (const Index stride : layout->byte_strides()) {
      if (stride % dtype->itemsize != 0) return false;
    }
    return layout->Span().nbytes() == static_cast<Index>(data.size());
  };
  if (!fits()) return absl::InvalidArgumentError("a captured tensor does not fit its bytes");
  const at::Tensor buffer =
      at::empty({static_cast<int64_t>(data.size())}, at::TensorOptions(at::kByte));
  if (!data.empty()) std::memcpy(buffer.mutable_data_ptr(), data.data(), data.size());
  DimVector strides = layout->byte_strides();
  for (Index& stride : strides) stride /= dtype->itemsize;
  at::Tensor tensor = at::empty({0}, at::TensorOptions(ToScalarType(*dtype)))
                          .set_(buffer.storage(), 0,
                                at::IntArrayRef(layout->shape().data(), layout->shape().size()),
                                at::IntArrayRef(strides.data(), strides.size()));
  if (!is_cpu) tensor = tensor.to(device);
  if (is_wrapped && tensor.dim() == 0) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

Index NbytesOf(const ResultMeta& meta) {
  Index last = 0;
  for (std::size_t d = 0; d < meta.sizes.size(); ++d) {
    if (meta.sizes[d] == 0) return 0;
    last += (meta.sizes[d] - 1) * meta.strides[d];
  }
  return (last + 1) * static_cast<Index>(c10::elementSize(meta.dtype));
}

}  // namespace loadplan
