#include "backend/copy_kernels.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/_pin_memory_ops.h>
#include <ATen/ops/_to_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/to_ops.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <initializer_list>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/call_watch.h"
#include "backend/cast_bits.h"
#include "backend/convert.h"
#include "backend/lazy_bits.h"
#include "backend/mode.h"
#include "backend/operator_call.h"
#include "backend/trace_session.h"
#include "backend/trace_tensor.h"
#include "backend/watcher.h"
#include "geometry/overlap.h"

namespace loadplan::kernels {
namespace {

bool IsKnown(const TouchedStorage& touched) {
  return touched.touch == Touch::kPlain || touched.touch == Touch::kKnown;
}

// What autograd and TensorIterator refuse when the copy is run. See Note [The mode key]: we are
// above them.
void CheckWritable(const at::Tensor& self, const char* op) {
  if (c10::GradMode::is_enabled() && self.requires_grad()) {
    TORCH_CHECK(!self.is_leaf(),
                "a leaf Variable that requires grad is being used in an in-place operation.");
    TORCH_CHECK(!self.is_view() || !self._base().is_leaf() || !self._base().requires_grad(),
                "a view of a leaf Variable that requires grad is being used in an in-place operation.");
  }
  TORCH_CHECK(self.layout() == at::kStrided && !self.is_quantized(), "`", op, "` into a sparse or quantised tensor cannot be traced");
  TORCH_CHECK(at::has_internal_overlap(self) != at::MemOverlap::Yes,
              "unsupported operation: more than one element of the written-to tensor refers to a single memory "
              "location. Please clone() the tensor before performing the operation.");
}

bool Broadcasts(at::IntArrayRef from, at::IntArrayRef to) {
  if (from.size() > to.size()) return false;
  const std::size_t skip = to.size() - from.size();
  for (std::size_t d = 0; d < from.size(); ++d) {
    if (from[d] != to[skip + d] && from[d] != 1) return false;
  }
  return true;
}

// The eager call's own words for shapes that do not fit.
void RaiseShapeError(const at::Tensor& self, const at::Tensor& src) {
  const ModeOff mode_off;
  at::empty(self.sizes(), at::TensorOptions(at::kMeta))
      .copy_(at::empty(src.sizes(), at::TensorOptions(at::kMeta)));
  TORCH_CHECK(false, "output with shape ", self.sizes(), " does not match the broadcast shape of ", src.sizes());
}

// Source and destination in one storage: equal is nothing to do; a partial overlap
// depends on the order of a kernel, so it is never planned.
bool CopiesOntoItself(TraceSession& session, const at::Tensor& self, const at::Tensor& src) {
  const StridedLayout to = LayoutOf(self);
  const StridedLayout from = LayoutOf(src);
  if (to == from && self.scalar_type() == src.scalar_type()) return true;
  const absl::StatusOr<bool> overlaps = Overlaps(to, from);
  if (overlaps.ok() && !*overlaps) return false;
  session.RecordRefusal("aten::copy_", "copies between overlapping parts of one tensor",
                        std::nullopt, {self, src});
  if (session.stand_ins() != nullptr) return true;
  TORCH_CHECK(false, "`aten::copy_` between overlapping parts of ", session.Describe(self),
              " depends on the order in which a kernel copies and cannot be planned; copy through clone()");
}

// The session of the thread's pass. Without one the operator runs; in a watched call it must
// not meet bytes of the plan.
TraceSession* SessionFor(const char* op, std::initializer_list<at::Tensor> tensors) {
  TraceSession* const session = TraceSession::Current();
  if (session != nullptr) return session;
  // An operator in place writes its first tensor.
  bool written = std::string_view(op).ends_with('_');
  for (const at::Tensor& tensor : tensors) CheckWatched(tensor, op, std::exchange(written, false));
  return nullptr;
}

// Whether `op`, which writes only `self`, runs: the pass knows nothing of what lies there.
bool RunsOnPlain(TraceSession& session, const at::Tensor& self, const char* op) {
  const TouchedStorage touched = session.FindWritten(self);
  const bool runs = touched.touch == Touch::kPlain;
  if (!touched.has_run && touched.touch != Touch::kTrace && !session.IsTarget(touched.storage))
    session.NoteWrite(self, op, runs);
  return runs;
}

// Its own dispatch writes what is inside.
bool WritesWrapper(TraceSession& session, const at::Tensor& self, const char* op) {
  if (!IsWrapper(self)) return false;
  session.NoteWrite(self, op, /*runs=*/true);
  return true;
}

// What a kernel of torch made while the mode was off.
at::Tensor Born(TraceSession& session, at::Tensor made) {
  session.NoteBirth(made);
  return made;
}

// A constant in the dtype of `like`, as `copy_` and `fill_` convert it.
at::Tensor ConstantLike(const at::Scalar& value, const at::Tensor& like) {
  return at::empty({}, at::TensorOptions(like.scalar_type())).fill_(value);
}

at::Tensor RecordedCopyOf(TraceSession& session, const at::Tensor& self, const at::Tensor& meta) {
  at::Tensor result = session.NewTemporary(meta.sizes(), meta.strides(), meta.scalar_type());
  session.RecordCopy(result, self, /*ran=*/false);
  ClaimDevice(result, ClaimedDevice(self));
  return result;
}

// A cast that cannot be moved to another place without leaving other bits for NaN.
at::Tensor RecordedProgram(TraceSession& session, const at::Tensor& self,
                           std::optional<at::ScalarType> dtype,
                           std::optional<at::MemoryFormat> memory_format) {
  static const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::_to_copy", "");
  const c10::IValue none;
  torch::jit::Stack stack{self, dtype, none, none, none, false, memory_format};
  OperatorCall(session, op, &stack).Run();
  return std::move(stack.back()).toTensor();
}

// `self.copy_(src)` whose NaN has bits that depend on where a row ends.
void RecordUnmovableCast(TraceSession& session, const at::Tensor& self, const at::Tensor& src) {
  if (self.sizes() == src.sizes() && self.strides() == src.strides() &&
      src.is_non_overlapping_and_dense()) {
    const at::Tensor converted = RecordedProgram(session, src, self.scalar_type(), std::nullopt);
    return session.RecordCopy(self, converted, /*ran=*/false);
  }
  constexpr char kWhy[] = "casts rows whose last items torch converts in a way of its own";
  session.RecordRefusal("aten::copy_", kWhy, std::nullopt, {src});
  if (session.stand_ins() != nullptr) return session.RecordCopy(self, src, /*ran=*/false);
  TORCH_CHECK(false, "`aten::copy_` into ", session.Describe(self), " ", kWhy,
              ", which cannot be planned; copy `.to(dtype)` of it");
}

// Live bytes that nothing wrote: runs, and the result remembers where it came from.
template <typename Run>
at::Tensor RunAndRecord(TraceSession& session, const at::Tensor& self, const Run& run) {
  at::Tensor result;
  {
    const ModeOff mode_off;
    const StorageGuards::Lift lift(session.guards(), StoragesOf({self}));
    result = Born(session, run());
  }
  session.RecordCopy(result, self, /*ran=*/true);
  return result;
}

}  // namespace

at::Tensor& copy_(c10::DispatchKeySet keys, at::Tensor& self, const at::Tensor& src,
                  bool non_blocking) {
  TraceSession* const session = SessionFor("aten::copy_", {self, src});
  const auto below = [&]() -> at::Tensor& {
    return at::_ops::copy_::redispatch(keys & kBelowMode, self, src, non_blocking);
  };
  if (session == nullptr || WritesWrapper(*session, self, "aten::copy_") || IsWrapper(src))
    return below();
  const TouchedStorage to = session->FindWritten(self);
  const TouchedStorage from = session->Find(src);
  if (from.touch == Touch::kPlain) session->NoteExternal(src);
  if (to.touch == Touch::kPlain && from.touch == Touch::kPlain) {
    if (!to.has_run) session->NoteWrite(self, "aten::copy_", /*runs=*/true);
    const ModeOff mode_off;
    return below();
  }
  CheckWritable(self, "copy_");
  if (!Broadcasts(src.sizes(), self.sizes())) RaiseShapeError(self, src);
  if (IsLazy(self)) {
    RefuseLazyWrite(*session, "aten::copy_", {self, src});
    return self;
  }
  if (IsLazy(src)) {
    return copy_(
        keys, self,
        from.touch == Touch::kPlain ? src.resolve_conj().resolve_neg() : ResolveLazy(*session, src),
        non_blocking);
  }
  const bool runs = to.touch == Touch::kPlain && from.touch == Touch::kKnown;
  if (to.touch != Touch::kTrace && !session->IsTarget(to.storage))
    session->NoteWrite(self, "aten::copy_", runs);
  if (from.touch == Touch::kPlain) {
    TORCH_CHECK(src.layout() == at::kStrided && !src.is_quantized(), "`copy_` from a sparse or quantised tensor cannot be traced");
    const ModeOff mode_off;
    session->RecordConstant(self, src.detach().to(self.scalar_type()));
    return self;
  }
  if (runs) {
    const StorageGuards::Lift lift(session->guards(), StoragesOf({src}));
    const ModeOff mode_off;
    below();
    session->RecordCopy(self, src, /*ran=*/true);
    return self;
  }
  if (to.storage == from.storage && CopiesOntoItself(*session, self, src)) return self;
  bool scattered = false;
  if (!self.is_cuda() && self.numel() > 0 && !CastIsMovable(self, src, &scattered)) {
    RecordUnmovableCast(*session, self, src);
    return self;
  }
  session->RecordCopy(self, src, /*ran=*/false);
  return self;
}

at::Tensor& fill_scalar(c10::DispatchKeySet keys, at::Tensor& self, const at::Scalar& value) {
  TraceSession* const session = SessionFor("aten::fill_", {self});
  const ModeOff mode_off;
  if (session == nullptr || WritesWrapper(*session, self, "aten::fill_") ||
      RunsOnPlain(*session, self, "aten::fill_")) {
    return at::_ops::fill__Scalar::redispatch(keys & kBelowMode, self, value);
  }
  CheckWritable(self, "fill_");
  if (IsLazy(self)) {
    RefuseLazyWrite(*session, "aten::fill_", {self});
    return self;
  }
  session->RecordConstant(self, ConstantLike(value, self));
  return self;
}

at::Tensor& fill_tensor(c10::DispatchKeySet keys, at::Tensor& self, const at::Tensor& value) {
  TraceSession* const session = SessionFor("aten::fill_", {self, value});
  if (session == nullptr || WritesWrapper(*session, self, "aten::fill_") || IsWrapper(value) ||
      (session->Find(value).touch == Touch::kPlain && RunsOnPlain(*session, self, "aten::fill_"))) {
    const ModeOff mode_off;
    return at::_ops::fill__Tensor::redispatch(keys & kBelowMode, self, value);
  }
  TORCH_CHECK(value.dim() == 0, "fill_ only supports 0-dimension value tensor but got tensor with ", value.dim(), " dimensions.");
  return copy_(keys, self, value, /*non_blocking=*/false);
}

at::Tensor& zero_(c10::DispatchKeySet keys, at::Tensor& self) {
  TraceSession* const session = SessionFor("aten::zero_", {self});
  const ModeOff mode_off;
  if (session == nullptr || WritesWrapper(*session, self, "aten::zero_") ||
      RunsOnPlain(*session, self, "aten::zero_")) {
    return at::_ops::zero_::redispatch(keys & kBelowMode, self);
  }
  CheckWritable(self, "zero_");
  if (IsLazy(self)) {
    RefuseLazyWrite(*session, "aten::zero_", {self});
    return self;
  }
  session->RecordConstant(self, ConstantLike(0, self));
  return self;
}

at::Tensor _to_copy(c10::DispatchKeySet keys, const at::Tensor& self,
                    std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                    std::optional<at::Device> device, std::optional<bool> pin_memory,
                    bool non_blocking, std::optional<at::MemoryFormat> memory_format) {
  TraceSession* const session = SessionFor("aten::_to_copy", {self});
  const auto below = [&](std::optional<at::Device> where) {
    return at::_ops::_to_copy::redispatch(keys & kBelowMode, self, dtype, layout, where, pin_memory,
                                          non_blocking, memory_format);
  };
  if (session == nullptr) return below(device);
  if (IsWrapper(self)) return Born(*session, below(device));
  const Touch touch = session->Find(self).touch;
  if (touch != Touch::kPlain && IsLazy(self)) {
    return _to_copy(keys, ResolveLazy(*session, self), dtype, layout, device, pin_memory,
                    non_blocking, memory_format);
  }
  const bool to_trace = device.has_value() && device->is_privateuseone();
  const CastBits bits = CastBitsOf(self.scalar_type(), dtype.value_or(self.scalar_type()));
  if (touch != Touch::kPlain && (bits == CastBits::kByPosition || bits == CastBits::kLastOfRow)) {
    return RecordedProgram(*session, self, dtype, memory_format);
  }
  if (touch == Touch::kPlain || (touch == Touch::kKnown && !to_trace)) {
    const ModeOff mode_off;
    if (touch == Touch::kKnown) return RunAndRecord(*session, self, [&] { return below(device); });
    // `idx.to(w.device)`: data on the trace device that is no checkpoint tensor's keeps its values.
    return to_trace ? session->NewConstantTensor(below(c10::Device(c10::kCPU)))
                    : Born(*session, below(device));
  }
  if (touch == Touch::kKnown && c10::isIntegralType(self.scalar_type(), /*includeBool=*/true)) {
    // So does an index or a mask made of live bytes (an expert map), which steers the trace.
    // Numbers are followed back to the live bytes instead.
    const ModeOff mode_off;
    const StorageGuards::Lift lift(session->guards(), StoragesOf({self}));
    session->RecordAnswered({self});
    return session->NewConstantTensor(below(c10::Device(c10::kCPU)));
  }
  const ModeOff mode_off;
  if (touch == Touch::kTrace && device.has_value() && !to_trace) {
    if (const std::optional<at::Tensor> value =
            session->ConstantValue(self, /*allow_uninitialised=*/false)) {
      return Born(*session,
                  value->to(at::TensorOptions(dtype.value_or(self.scalar_type())).device(device)));
    }
  }
  const at::Tensor meta =
      at::_to_copy(MetaLike(self), at::TensorOptions().dtype(dtype).layout(layout),
                   /*non_blocking=*/false, memory_format);
  at::Tensor result = RecordedCopyOf(*session, self, meta);
  if (device.has_value()) ClaimDevice(result, *device);
  return result;
}

namespace {

// Whether eager returns `self` itself. See Note [Claimed devices].
bool IsThere(const at::Tensor& self, std::optional<at::Device> device,
             std::optional<at::ScalarType> dtype, bool copy,
             std::optional<at::MemoryFormat> memory_format) {
  if (copy || !device.has_value() || !IsTraceTensor(self)) return false;
  const c10::Device claimed = ClaimedDevice(self);
  const bool same_index = device->index() == claimed.index() || !device->has_index();
  if (device->type() != claimed.type() || !(same_index || !claimed.has_index())) return false;
  if (dtype.value_or(self.scalar_type()) != self.scalar_type()) return false;
  const at::MemoryFormat format = memory_format.value_or(at::MemoryFormat::Preserve);
  return format == at::MemoryFormat::Preserve || self.suggest_memory_format() == format;
}

}  // namespace

at::Tensor to_device(c10::DispatchKeySet keys, const at::Tensor& self, at::Device device,
                     at::ScalarType dtype, bool non_blocking, bool copy,
                     std::optional<at::MemoryFormat> memory_format) {
  if (IsThere(self, device, dtype, copy, memory_format)) return self;
  return at::_ops::to_device::redispatch(keys & kBelowMode, self, device, dtype, non_blocking, copy,
                                         memory_format);
}

at::Tensor to_dtype_layout(c10::DispatchKeySet keys, const at::Tensor& self,
                           std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                           std::optional<at::Device> device, std::optional<bool> pin_memory,
                           bool non_blocking, bool copy,
                           std::optional<at::MemoryFormat> memory_format) {
  if (IsThere(self, device, dtype, copy, memory_format)) return self;
  return at::_ops::to_dtype_layout::redispatch(keys & kBelowMode, self, dtype, layout, device,
                                               pin_memory, non_blocking, copy, memory_format);
}

at::Tensor to_other(c10::DispatchKeySet keys, const at::Tensor& self, const at::Tensor& other,
                    bool non_blocking, bool copy, std::optional<at::MemoryFormat> memory_format) {
  if (IsThere(self, ClaimedDevice(other), other.scalar_type(), copy, memory_format)) return self;
  return at::_ops::to_other::redispatch(keys & kBelowMode, self, other, non_blocking, copy,
                                        memory_format);
}

at::Tensor clone(c10::DispatchKeySet keys, const at::Tensor& self,
                 std::optional<at::MemoryFormat> memory_format) {
  TraceSession* const session = SessionFor("aten::clone", {self});
  const auto below = [&] {
    return at::_ops::clone::redispatch(keys & kBelowMode, self, memory_format);
  };
  if (session == nullptr) return below();
  if (IsWrapper(self)) return Born(*session, below());
  const TouchedStorage touched = session->Find(self);
  if (touched.touch != Touch::kPlain && IsLazy(self))
    return clone(keys, ResolveLazy(*session, self), memory_format);
  if (touched.touch == Touch::kKnown) return RunAndRecord(*session, self, below);
  const ModeOff mode_off;
  if (IsKnown(touched)) return Born(*session, below());
  return RecordedCopyOf(*session, self, at::clone(MetaLike(self), memory_format));
}

namespace {

// `cat` and `stack`: shape and strides by meta, then one copy per part.
template <typename Below, typename OnMeta, typename Part>
at::Tensor Join(std::vector<at::Tensor> tensors, const Below& below, const OnMeta& on_meta,
                const Part& part) {
  TraceSession* const session = TraceSession::Current();
  bool touches = false;
  bool known = true;
  for (const at::Tensor& tensor : tensors) {
    if (session == nullptr) CheckWatched(tensor, "aten::cat", /*written=*/false);
  }
  for (at::Tensor& tensor : tensors) {
    if (session == nullptr || IsWrapper(tensor)) return below();
    const TouchedStorage touched = session->Find(tensor);
    touches |= touched.touch != Touch::kPlain;
    known &= IsKnown(touched);
    if (touched.touch != Touch::kPlain && IsLazy(tensor)) tensor = ResolveLazy(*session, tensor);
  }
  const ModeOff mode_off;
  if (!touches) return Born(*session, below());
  if (known) {
    const StorageGuards::Lift lift(session->guards(), StoragesOf(tensors));
    at::Tensor result = Born(*session, below());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor place = part(result, i);
      if (session->Find(tensors[i]).touch == Touch::kPlain) {
        session->NoteExternal(tensors[i]);  // already a part of what `result` holds
      } else {
        session->RecordCopy(place, tensors[i], /*ran=*/true);
      }
    }
    return result;
  }
  std::vector<at::Tensor> metas;
  for (const at::Tensor& tensor : tensors) metas.push_back(MetaLike(tensor));
  const at::Tensor meta = on_meta(metas);
  at::Tensor result = session->NewTemporary(meta.sizes(), meta.strides(), meta.scalar_type());
  ClaimDevice(result, ClaimedDevice(tensors.front()));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor place = part(result, i);
    if (session->Find(tensors[i]).touch == Touch::kPlain) {
      session->NoteExternal(tensors[i]);
      session->RecordConstant(place, tensors[i].detach().to(place.scalar_type()));
    } else {
      session->RecordCopy(place, tensors[i], /*ran=*/false);
    }
  }
  return result;
}

}  // namespace

at::Tensor cat(c10::DispatchKeySet keys, const at::ITensorListRef& tensors, int64_t dim) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors) parts.push_back(tensor);
  // torch skips empty one-dimensional tensors, whatever the rank of the others.
  const auto skipped = [](const at::Tensor& tensor) {
    return tensor.dim() == 1 && tensor.numel() == 0;
  };
  int64_t start = 0;
  return Join(
      parts, [&] { return at::_ops::cat::redispatch(keys & kBelowMode, tensors, dim); },
      [&](const std::vector<at::Tensor>& metas) { return at::cat(metas, dim); },
      [&](const at::Tensor& result, std::size_t i) {
        if (skipped(parts[i])) return result.flatten().narrow(0, 0, 0);
        const int64_t length = parts[i].size(dim);
        start += length;
        return result.narrow(dim, start - length, length);
      });
}

at::Tensor stack(c10::DispatchKeySet keys, at::TensorList tensors, int64_t dim) {
  return Join(
      tensors.vec(), [&] { return at::_ops::stack::redispatch(keys & kBelowMode, tensors, dim); },
      [&](const std::vector<at::Tensor>& metas) { return at::stack(metas, dim); },
      [&](const at::Tensor& result, std::size_t i) {
        return result.select(dim, static_cast<int64_t>(i));
      });
}

at::Tensor _pin_memory(c10::DispatchKeySet keys, const at::Tensor& self,
                       std::optional<at::Device> device) {
  TraceSession* const session = SessionFor("aten::_pin_memory", {self});
  if (session == nullptr || session->Find(self).touch == Touch::kPlain) {
    at::Tensor pinned = at::_ops::_pin_memory::redispatch(keys & kBelowMode, self, device);
    return session == nullptr ? pinned : Born(*session, std::move(pinned));
  }
  return clone(keys, self, at::MemoryFormat::Preserve);
}

}  // namespace loadplan::kernels
