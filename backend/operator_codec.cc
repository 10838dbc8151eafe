#include "backend/operator_codec.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "backend/convert.h"
#include "plan/byte_codec.h"
#include "plan/plan_file_geometry.h"

namespace loadplan {
namespace {

// Kinds of values, and of the elements of lists.
enum Tag : int { kNone, kTensor, kBool, kInt, kDouble, kComplex, kString, kDevice, kList };
enum ElementTag : int { kTensors, kOptionalTensors, kBools, kInts, kDoubles, kComplexes, kStrings };

absl::Status CannotSave(std::string_view what) {
  return absl::UnimplementedError(absl::StrCat(std::string(what), " cannot be put into a file"));
}

std::optional<ElementTag> ElementTagOf(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      return kTensors;
    case c10::TypeKind::OptionalType:
      if (type.containedType(0)->kind() != c10::TypeKind::TensorType) return std::nullopt;
      return kOptionalTensors;
    case c10::TypeKind::BoolType:
      return kBools;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return kInts;
    case c10::TypeKind::FloatType:
      return kDoubles;
    case c10::TypeKind::ComplexType:
      return kComplexes;
    case c10::TypeKind::StringType:
      return kStrings;
    default:
      return std::nullopt;
  }
}

absl::Status Write(ByteWriter& out, const c10::IValue& value);

absl::Status WriteList(ByteWriter& out, const c10::List<c10::IValue>& list) {
  const std::optional<ElementTag> tag = ElementTagOf(*list.elementType());
  if (!tag.has_value()) return CannotSave(absl::StrCat("a list of ", list.elementType()->str()));
  out.Unsigned(kList);
  out.Unsigned(*tag);
  out.Count(list.size());
  for (std::size_t k = 0; k < list.size(); ++k) {
    if (absl::Status status = Write(out, list.get(k)); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Write(ByteWriter& out, const c10::IValue& value) {
  if (value.isNone()) {
    out.Unsigned(kNone);
  } else if (value.isTensor()) {
    absl::StatusOr<std::string> tensor = EncodeTensor(value.toTensor());
    if (!tensor.ok()) return tensor.status();
    out.Unsigned(kTensor);
    out.String(*tensor);
  } else if (value.isBool()) {
    out.Unsigned(kBool);
    out.Unsigned(value.toBool() ? 1 : 0);
  } else if (value.isInt()) {
    out.Unsigned(kInt);
    out.Signed(value.toInt());
  } else if (value.isDouble()) {
    out.Unsigned(kDouble);
    out.Double(value.toDouble());
  } else if (value.isComplexDouble()) {
    out.Unsigned(kComplex);
    out.Double(value.toComplexDouble().real());
    out.Double(value.toComplexDouble().imag());
  } else if (value.isString()) {
    out.Unsigned(kString);
    out.String(value.toStringView());
  } else if (value.isDevice()) {
    out.Unsigned(kDevice);
    out.Unsigned(value.toDevice().is_cpu() ? 1 : 0);
  } else if (value.isList()) {
    return WriteList(out, value.toList());
  } else {
    return CannotSave(absl::StrCat("a ", value.tagKind()));
  }
  return absl::OkStatus();
}

void WriteMeta(ByteWriter& out, const ResultMeta& meta) {
  out.String(ToDType(meta.dtype).name);
  out.Count(meta.sizes.size());
  for (const int64_t size : meta.sizes) out.Signed(size);
  for (const int64_t stride : meta.strides) out.Signed(stride);
}

class OperatorReader {
 public:
  OperatorReader(std::string_view bytes, at::Device device)
      : in_(bytes, "an operator of the plan file"), device_(device) {}

  absl::StatusOr<std::shared_ptr<const OperatorNode>> Read() {
    const std::string name(in_.String());
    const std::string overload(in_.String());
    if (!in_.ok()) return in_.status();
    const std::optional<c10::OperatorHandle> op =
        c10::Dispatcher::singleton().findSchema({name, overload});
    if (!op.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "this torch has no operator `", c10::toString(c10::OperatorName(name, overload)),
          "`; load the library that defines it, or plan again"));
    }
    OperatorNode node{*op, {}, {}, 0, {}, at::ScalarType::Float};
    if (op->hasTag(at::Tag::nondeterministic_seeded)) in_.Fail("it draws random numbers");
    Arguments(node);
    Slots(node);
    for (std::size_t left = in_.Count(2); left > 0 && in_.ok(); --left) {
      node.results.push_back(Meta());
    }
    node.default_dtype = ScalarType();
    if (in_.ok() && !c10::isFloatingType(node.default_dtype)) in_.Fail("its default dtype");
    in_.ExpectEnd();
    if (!in_.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("`", name, "`: ", std::string(in_.status().message())));
    }
    return std::make_shared<const OperatorNode>(std::move(node));
  }

 private:
  at::ScalarType ScalarType() {
    const std::optional<DType> dtype = DTypeByName(in_.String());
    if (dtype.has_value()) return ToScalarType(*dtype);
    in_.Fail("it names a dtype that this torch lacks");
    return at::ScalarType::Byte;
  }

  ResultMeta Meta() {
    ResultMeta meta;
    meta.dtype = ScalarType();
    const DimVector sizes = ReadShape(in_);
    DimVector strides(sizes.size());
    DimVector byte_strides(sizes.size());
    const auto itemsize = static_cast<Index>(c10::elementSize(meta.dtype));
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      strides[d] = in_.Signed();
      const std::optional<Index> nbytes = CheckedMultiply(strides[d], itemsize);
      if (!nbytes.has_value()) in_.Fail("a stride is larger than any tensor");
      byte_strides[d] = nbytes.value_or(0);
    }
    if (!StridedLayout::Create(0, sizes, byte_strides, itemsize).ok()) {
      in_.Fail("a result is laid out as no tensor is");
      return {};
    }
    meta.sizes.assign(sizes.begin(), sizes.end());
    meta.strides.assign(strides.begin(), strides.end());
    return meta;
  }

  void Arguments(OperatorNode& node) {
    const std::vector<c10::Argument>& declared = node.op.schema().arguments();
    if (in_.Count(1) != declared.size()) in_.Fail("it has another number of arguments");
    for (std::size_t i = 0; i < declared.size() && in_.ok(); ++i) {
      node.arguments.push_back(Value());
      if (in_.ok() && !Fits(node.arguments.back(), *declared[i].type())) {
        in_.Fail(absl::StrCat("argument `", declared[i].name(), "` is of another type"));
      }
    }
  }

  static bool Fits(const c10::IValue& value, const c10::Type& type) {
    if (!value.isTensor()) return value.type()->isSubtypeOf(type);
    const c10::Type& inner =
        type.kind() == c10::TypeKind::OptionalType ? *type.containedType(0) : type;
    return inner.kind() == c10::TypeKind::TensorType;
  }

  void Slots(OperatorNode& node) {
    for (std::size_t left = in_.Count(5); left > 0 && in_.ok(); --left) {
      ArgumentSlot& slot = node.slots.emplace_back();
      slot.position = in_.Unsigned();
      slot.element = in_.Signed();
      slot.is_output = in_.Bounded(1, "the flag of an output") == 1;
      slot.meta = Meta();
      if (!slot.is_output) ++node.num_inputs;
      if (in_.ok() && !IsPlace(node, slot)) in_.Fail("a tensor goes where none belongs");
    }
    // Also what keeps a file from naming operators that do things beside tensors.
    if (node.slots.empty()) in_.Fail("nothing of the plan goes into it");
  }

  static bool IsPlace(const OperatorNode& node, const ArgumentSlot& slot) {
    if (slot.position >= node.arguments.size() || slot.element < -1) return false;
    const c10::IValue& argument = node.arguments[slot.position];
    if (slot.element < 0) return argument.isTensor() && !argument.toTensor().defined();
    if (!argument.isTensorList() && !argument.isOptionalTensorList()) return false;
    return static_cast<std::size_t>(slot.element) < argument.toListRef().size();
  }

  c10::IValue Value() {
    switch (in_.Bounded(kList, "the kind of a value")) {
      case kNone:
        return {};
      case kTensor:
        return Tensor();
      case kBool:
        return in_.Bounded(1, "a truth value") == 1;
      case kInt:
        return static_cast<int64_t>(in_.Signed());
      case kDouble:
        return in_.Double();
      case kComplex: {
        const double real = in_.Double();
        return c10::complex<double>(real, in_.Double());
      }
      case kString:
        return std::string(in_.String());
      case kDevice:
        return in_.Bounded(1, "the flag of a device") == 1 ? at::Device(at::kCPU) : device_;
      default:
        return List();
    }
  }

  at::Tensor Tensor() {
    absl::StatusOr<at::Tensor> tensor = DecodeTensor(in_.String(), device_);
    if (tensor.ok()) return *std::move(tensor);
    in_.Fail(std::string(tensor.status().message()));
    return {};
  }

  // The elements of a list; a failure where one is not as `is` says.
  template <typename T, typename Is, typename To>
  c10::IValue ListOf(Is is, To to) {
    c10::List<T> list;
    for (std::size_t left = in_.Count(1); left > 0 && in_.ok(); --left) {
      const c10::IValue value = Scalar();
      if (!in_.ok() || !(value.*is)()) {
        in_.Fail("an element of a list is of another type");
        break;
      }
      list.push_back(to(value));
    }
    return list;
  }

  // No lists of lists.
  c10::IValue Scalar() {
    c10::IValue value = Value();
    if (value.isList()) in_.Fail("a list in a list");
    return value;
  }

  c10::IValue List() {
    if (++depth_ > 1) {
      in_.Fail("a list in a list");
      return {};
    }
    c10::IValue list = ListBelow();
    --depth_;
    return list;
  }

  c10::IValue ListBelow() {
    using V = c10::IValue;
    switch (in_.Bounded(kStrings, "the kind of a list")) {
      case kTensors:
        return ListOf<at::Tensor>(&V::isTensor, [](const V& v) { return v.toTensor(); });
      case kOptionalTensors: {
        c10::List<std::optional<at::Tensor>> list;
        for (std::size_t left = in_.Count(1); left > 0 && in_.ok(); --left) {
          const V value = Scalar();
          if (!value.isNone() && !value.isTensor()) in_.Fail("an element of a list is no tensor");
          list.push_back(value.isTensor() ? std::optional(value.toTensor()) : std::nullopt);
        }
        return list;
      }
      case kBools:
        return ListOf<bool>(&V::isBool, [](const V& v) { return v.toBool(); });
      case kInts:
        return ListOf<int64_t>(&V::isInt, [](const V& v) { return v.toInt(); });
      case kDoubles:
        return ListOf<double>(&V::isDouble, [](const V& v) { return v.toDouble(); });
      case kComplexes:
        return ListOf<c10::complex<double>>(&V::isComplexDouble,
                                            [](const V& v) { return v.toComplexDouble(); });
      default:
        return ListOf<std::string>(&V::isString, [](const V& v) { return v.toStringRef(); });
    }
  }

  ByteReader in_;
  const at::Device device_;
  int depth_ = 0;
};

}  // namespace

absl::StatusOr<std::string> EncodeOperator(const OperatorNode& node) {
  ByteWriter out;
  const c10::OperatorName& name = node.op.operator_name();
  out.String(name.name);
  out.String(name.overload_name);
  out.Count(node.arguments.size());
  for (std::size_t i = 0; i < node.arguments.size(); ++i) {
    if (const absl::Status status = Write(out, node.arguments[i]); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat("argument ", i, " of `", c10::toString(name),
                                                      "`: ", std::string(status.message())));
    }
  }
  out.Count(node.slots.size());
  for (const ArgumentSlot& slot : node.slots) {
    out.Count(slot.position);
    out.Signed(slot.element);
    out.Unsigned(slot.is_output ? 1 : 0);
    WriteMeta(out, slot.meta);
  }
  out.Count(node.results.size());
  for (const ResultMeta& meta : node.results) WriteMeta(out, meta);
  out.String(ToDType(node.default_dtype).name);
  return out.Take();
}

absl::StatusOr<std::shared_ptr<const OperatorNode>> DecodeOperator(std::string_view bytes,
                                                                   at::Device device) {
  return OperatorReader(bytes, device).Read();
}

}  // namespace loadplan
