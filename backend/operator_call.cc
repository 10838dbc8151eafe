#include "backend/operator_call.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/result_type.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "backend/captured_value.h"
#include "backend/collective.h"
#include "backend/lazy_bits.h"
#include "backend/loader_line.h"
#include "backend/movement.h"
#include "backend/native_meta.h"
#include "backend/result_layout.h"
#include "backend/trace_tensor.h"
#include "backend/watcher.h"

namespace loadplan {

void OperatorCall::Collect() {
  for (std::size_t i = 0; i < schema_.arguments().size(); ++i) {
    ForEachTensor(argument(i),
                  [&](int64_t element, const at::Tensor& tensor) { Add(i, element, tensor); });
  }
}

void OperatorCall::Add(std::size_t position, int64_t element, const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  const bool written = MayWrite(op_, position);
  if (IsWrapper(tensor)) {
    wrappers_.push_back({position, element, tensor, {}, written, false, std::nullopt});
    return;
  }
  TensorArgument found{position, element, tensor,      session_.Find(tensor),
                       false,    false,   std::nullopt};
  touches_ |= found.touched.touch != Touch::kPlain;
  if (found.touched.touch == Touch::kPlain) session_.NoteExternal(tensor);
  found.written = written;
  found.is_out = written && schema_.arguments()[position].is_out();
  tensors_.push_back(std::move(found));
}

std::vector<at::Tensor> OperatorCall::Symbolic() const {
  std::vector<at::Tensor> symbolic;
  for (const TensorArgument& arg : tensors_) {
    if (arg.touched.touch != Touch::kPlain && !arg.is_out) symbolic.push_back(arg.tensor);
  }
  return symbolic;
}

// `p.set_(w)`, `p.resize_(...)`: the address that a CUDA graph has recorded would move.
// Whether the call is done with: a tensor of that size already, or, in a pass that explores, one
// that stays where it is.
bool OperatorCall::RefusesRebinding() {
  const std::string& op = op_.operator_name().name;
  if (op != "aten::set_" && op != "aten::resize_" && op != "aten::set_data") return false;
  const TensorArgument& self = tensors_.front();
  if (self.touched.touch == Touch::kPlain && tensors_.size() < 2) return false;
  const bool stays =
      op == "aten::resize_" && self.tensor.sizes() == at::IntArrayRef(argument(1).toIntVector());
  if (!stays)
    session_.RecordRefusal(name(), "moves a live tensor to other memory", std::nullopt, Symbolic());
  if (stays || session_.stand_ins() != nullptr) {
    const at::Tensor tensor = self.tensor;
    stack_.resize(begin_);
    if (!schema_.returns().empty()) stack_.emplace_back(tensor);
    return true;
  }
  TORCH_CHECK(false, "`", name(), "` would move ", session_.Describe(self.tensor),
              " to other memory, which a load plan cannot follow; copy into it instead");
}

void OperatorCall::ResolveLazyArguments() {
  for (TensorArgument& arg : tensors_) {
    if (!IsLazy(arg.tensor)) continue;
    if (arg.written) {
      session_.RecordRefusal(name(), "writes through a lazily conjugated or negated view",
                             std::nullopt, Symbolic());
      TORCH_CHECK_NOT_IMPLEMENTED(false, "`", name(), "` writes through a lazily conjugated or negated view of ",
                                  session_.Describe(arg.tensor), ", which cannot be planned");
    }
    if (arg.touched.touch == Touch::kPlain) continue;
    arg.tensor = ResolveLazy(session_, arg.tensor);
    arg.touched = session_.Find(arg.tensor);
    SetArgument(argument(arg.position), arg.element, arg.tensor);
  }
}

namespace {

// Some that write their argument by the schema change what torch knows of it and no byte.
bool WritesBytes(const c10::OperatorHandle& op) {
  static constexpr std::string_view kMarks[] = {"aten::record_stream", "aten::rename_",
                                                "aten::requires_grad_", "aten::retain_grad",
                                                "aten::set_data"};
  return !op.hasTag(at::Tag::inplace_view) &&
         std::ranges::find(kMarks, op.operator_name().name) == std::end(kMarks);
}

}  // namespace

void OperatorCall::NoteWrites(bool runs) const {
  for (const TensorArgument& arg : tensors_) {
    if (!arg.written || (arg.touched.has_run && runs) || !WritesBytes(op_)) continue;
    session_.NoteWrite(arg.tensor, name(), runs);
  }
  for (const TensorArgument& arg : wrappers_) {
    if (arg.written && WritesBytes(op_)) session_.NoteWrite(arg.tensor, name(), runs);
  }
}

void OperatorCall::NoteReshapes() const {
  const bool reshapes = op_.hasTag(at::Tag::inplace_view);
  for (const TensorArgument& arg : tensors_) {
    if (arg.written && (reshapes || arg.is_out)) session_.NoteReshape(arg.tensor, name());
  }
}

void OperatorCall::NoteBirths() const {
  std::vector<at::Tensor> arguments;
  for (const TensorArgument& arg : tensors_) arguments.push_back(arg.tensor);
  for (const TensorArgument& arg : wrappers_) {
    for (const at::Tensor& inner : InnerTensors(arg.tensor)) arguments.push_back(inner);
  }
  const std::vector<c10::StorageImpl*> old = StoragesOf(arguments);
  const auto note = [&](const at::Tensor& result) {
    if (!result.defined()) return;
    for (const at::Tensor& inner : InnerTensors(result)) {
      const std::vector<c10::StorageImpl*> made = StoragesOf({inner});
      if (!made.empty() && std::ranges::find(old, made.front()) == old.end())
        session_.NoteBirth(inner);
    }
  };
  for (std::size_t i = begin_; i < stack_.size(); ++i) {
    if (stack_[i].isTensor()) note(stack_[i].toTensor());
    if (stack_[i].isTensorList()) {
      for (const at::Tensor& result : stack_[i].toTensorVector()) note(result);
    }
  }
}

// Memory holds what the loader would see, and no target would be written.
bool OperatorCall::CanRunForReal() const {
  for (const TensorArgument& arg : tensors_) {
    if (arg.touched.touch == Touch::kStale || arg.touched.touch == Touch::kTrace) return false;
    if (arg.written && session_.IsTarget(arg.touched.storage)) return false;
  }
  return true;
}

void OperatorCall::RunForReal() {
  NodeRecord record = MakeRecord();
  const std::shared_ptr<OperatorNode> program = CaptureProgram();
  std::vector<at::Tensor> mutated;
  std::vector<at::Tensor> all;
  for (const TensorArgument& arg : tensors_) {
    all.push_back(arg.tensor);
    if (arg.written) mutated.push_back(arg.tensor);
  }
  {
    const ModeOff mode_off;
    const StorageGuards::Lift lift(session_.guards(), StoragesOf(all));
    op_.callBoxed(&stack_);
  }
  NoteBirths();
  const std::span<const c10::IValue> returned(stack_.data() + begin_, stack_.size() - begin_);
  std::vector<at::Tensor> values = FreshOutputs(schema_, returned);
  values.insert(values.end(), mutated.begin(), mutated.end());
  std::vector<at::Tensor> strided;
  for (const at::Tensor& value : values) {
    if (value.defined() && value.layout() == at::kStrided && value.has_storage())
      strided.push_back(value);
  }
  if (strided.size() != values.size())
    record.not_replayable = absl::StrCat("`", name(), "` gives no strided tensor");
  if (strided.empty()) {
    if (!AnswersWithoutBytes(op_.operator_name())) session_.RecordAnswered(Symbolic());
    return;
  }
  for (const at::Tensor& value : strided) program->results.push_back(MetaOf(value));
  const std::vector<StorageId> outputs = session_.RecordNode(std::move(record), program);
  for (std::size_t i = 0; i < strided.size(); ++i) {
    session_.RecordValue(strided[i], outputs[i], program->results[i], /*ran=*/true);
  }
}

bool OperatorCall::RunOnConstants() {
  if (random_) return false;
  for (TensorArgument& arg : tensors_) {
    if (arg.touched.touch == Touch::kPlain) continue;
    if (arg.touched.touch != Touch::kKnown)
      arg.constant = session_.ConstantValue(arg.tensor, arg.written);
  }
  for (const TensorArgument& arg : tensors_) {
    if (arg.touched.touch != Touch::kPlain && !arg.constant.has_value()) return false;
  }
  const ModeOff mode_off;
  for (std::size_t i = 0; i < schema_.arguments().size(); ++i) {
    if (argument(i).isDevice()) argument(i) = c10::Device(c10::kCPU);
  }
  for (const TensorArgument& arg : tensors_) {
    const at::Tensor value = arg.constant.has_value() ? *arg.constant : arg.tensor.cpu();
    SetArgument(argument(arg.position), arg.element, value);
  }
  NoteWrites(/*runs=*/true);
  op_.callBoxed(&stack_);
  for (const TensorArgument& arg : tensors_) {
    if (arg.written && arg.constant.has_value()) RecordMutated(arg.tensor, *arg.constant);
  }
  std::vector<c10::IValue> returned(stack_.begin() + static_cast<std::ptrdiff_t>(begin_),
                                    stack_.end());
  std::vector<at::Tensor> fresh;
  for (const at::Tensor& output : FreshOutputs(schema_, returned))
    fresh.push_back(session_.NewConstantTensor(output));
  ReturnTraced(returned, fresh);
  return true;
}

// What an argument held before an in-place operator is an input of it, also where it is
// known: `p.fill_(3); p.add_(w)`.
void OperatorCall::AdoptChanged() {
  for (TensorArgument& arg : tensors_) {
    if (!arg.written || arg.is_out) continue;
    arg.constant.reset();
    if (arg.touched.touch == Touch::kPlain) arg.touched = session_.Adopt(arg.tensor);
  }
}

// `inv = torch.empty_like(perm); inv[perm] = torch.arange(8)`: what nobody wrote holds anything
// in an eager call, so zeroes will do.
void OperatorCall::ZeroUninitialised() {
  const ModeOff mode_off;
  for (const TensorArgument& arg : tensors_) {
    if (arg.written && !arg.is_out && session_.IsUninitialised(arg.tensor))
      session_.RecordConstant(arg.tensor, at::full({}, 0, arg.tensor.options().device(at::kCPU)));
  }
}

// Puts the returned values on the stack, tensors replaced by those of the pass.
void OperatorCall::ReturnTraced(std::vector<c10::IValue>& returned,
                                const std::vector<at::Tensor>& fresh) {
  std::size_t next = 0;
  std::size_t next_written = 0;
  std::vector<at::Tensor> written;
  for (const TensorArgument& arg : tensors_) {
    if (arg.written) written.push_back(arg.tensor);
  }
  for (std::size_t i = 0; i < returned.size(); ++i) {
    const c10::AliasInfo* const alias = schema_.returns()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      returned[i] = written[next_written++];
    } else if (returned[i].isTensor()) {
      returned[i] = fresh[next++];
    } else if (returned[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (std::size_t k = returned[i].toTensorVector().size(); k > 0; --k)
        list.push_back(fresh[next++]);
      returned[i] = list;
    }
  }
  Return(std::move(returned));
}

void OperatorCall::Return(std::vector<c10::IValue> returned) {
  stack_.resize(begin_);
  for (c10::IValue& value : returned) stack_.push_back(std::move(value));
}

// See Note [Movement by labels].
bool OperatorCall::RecordMovement() {
  const MovementRule* const rule = FindMovementRule(op_.operator_name());
  if (rule == nullptr) return false;
  const ModeOff mode_off;
  std::vector<c10::IValue> call(stack_.begin() + static_cast<std::ptrdiff_t>(begin_), stack_.end());
  std::vector<at::Tensor> data;  // by label
  std::vector<bool> labelled(call.size(), false);
  int64_t num_labels = 0;
  std::vector<at::Tensor> answered;
  for (const TensorArgument& arg : tensors_) {
    const std::string& argument_name = schema_.arguments()[arg.position].name();
    const bool moves =
        arg.element < 0 && std::ranges::find(rule->data, argument_name) != rule->data.end();
    const bool known = arg.touched.touch == Touch::kPlain || arg.constant.has_value();
    if (!moves) {
      // An index or a mask made of live bytes steers the trace, as in `_to_copy`.
      const bool steers = arg.touched.touch == Touch::kKnown &&
                          c10::isIntegralType(arg.tensor.scalar_type(), /*includeBool=*/true);
      if (!known && !steers) return false;
      if (!known) answered.push_back(arg.tensor);
      const StorageGuards::Lift lift(session_.guards(), StoragesOf({arg.tensor}));
      SetArgument(call[arg.position], arg.element,
                  arg.constant.has_value() ? *arg.constant : arg.tensor.cpu());
      continue;
    }
    num_labels += arg.tensor.numel();
    data.push_back(known && !arg.written
                       ? session_.NewConstantTensor(arg.constant.value_or(arg.tensor))
                       : arg.tensor);
    labelled[arg.position] = true;
    if (num_labels > kMaxLabels) return false;
    const at::Tensor labels = LabelsOf(data.back(), static_cast<int64_t>(data.size()) - 1);
    if (!labels.defined()) return false;
    SetArgument(call[arg.position], -1, labels);
  }
  const at::ScalarType dtype = data.front().scalar_type();
  for (std::size_t i = 0; i < call.size(); ++i) {
    const std::string& argument_name = schema_.arguments()[i].name();
    if (argument_name == rule->must_be_false && call[i].toBool()) return false;
    if (labelled[i] || std::ranges::find(rule->data, argument_name) == rule->data.end()) continue;
    // A scalar that moves in: a one-element constant, in the dtype it would be stored in.
    if (at::result_type(at::empty({1}, at::TensorOptions(dtype)), call[i].toScalar()) != dtype)
      return false;
    data.push_back(
        session_.NewConstantTensor(at::full({}, call[i].toScalar(), at::TensorOptions(dtype))));
    const at::Tensor label = LabelsOf(data.back(), static_cast<int64_t>(data.size()) - 1);
    call[i] = at::Scalar(label.item<int64_t>());
  }
  for (const at::Tensor& tensor : data) {
    if (tensor.scalar_type() != dtype) return false;
  }
  {
    const StorageGuards::Lift lift(session_.guards(), StoragesOf(answered));
    op_.callBoxed(&call);
  }
  if (!RecordMoved(call.front().toTensor(), data)) return false;
  session_.RecordAnswered(answered);
  return true;
}

// `labels` says for each element of the result which element of `data` it is.
bool OperatorCall::RecordMoved(const at::Tensor& labels, const std::vector<at::Tensor>& data) {
  const bool in_place = tensors_.front().written;
  const at::Tensor to = in_place ? tensors_.front().tensor
                                 : session_.NewTemporary(labels.sizes(), labels.strides(),
                                                         data.front().scalar_type());
  if (!in_place) ClaimDevice(to, ClaimedDevice(tensors_.front().tensor));
  auto moved = MovesOf(labels, to, in_place ? 0 : -1);
  if (!moved.has_value()) return false;
  std::vector<std::pair<StorageId, StridedMap>> moves;
  for (Move& move : *moved) {
    const at::Tensor& from = data[static_cast<std::size_t>(move.argument)];
    moves.emplace_back(session_.Find(from).storage, std::move(move.map));
  }
  session_.RecordMoves(to, std::move(moves));
  stack_.resize(begin_);
  stack_.emplace_back(to);
  return true;
}

NodeRecord OperatorCall::MakeRecord() const {
  NodeRecord record;
  record.op = name();
  for (const TensorArgument& arg : tensors_) {
    if (arg.touched.touch == Touch::kPlain || arg.is_out || arg.constant.has_value()) continue;
    record.inputs.push_back(session_.ReadOf(arg.tensor));
  }
  if (random_) {
    record.not_replayable =
        absl::StrCat("`", record.op, "` draws random numbers", AtLine(LoaderLine()));
  }
  return record;
}

std::shared_ptr<OperatorNode> OperatorCall::CaptureProgram() const {
  const ModeOff mode_off;
  auto program =
      std::make_shared<OperatorNode>(OperatorNode{op_, {}, {}, 0, {}, at::ScalarType::Float});
  program->default_dtype = at::get_default_dtype_as_scalartype();
  program->arguments.assign(stack_.begin() + static_cast<std::ptrdiff_t>(begin_), stack_.end());
  for (c10::IValue& value : program->arguments) {
    if (value.isDevice() && value.toDevice().is_privateuseone()) value = c10::Device(c10::kCPU);
  }
  for (const TensorArgument& arg : tensors_) {
    const bool symbolic = arg.touched.touch != Touch::kPlain && !arg.constant.has_value();
    if (symbolic || arg.written) {
      program->slots.push_back(
          {arg.position, arg.element, arg.is_out || !symbolic, MetaOf(arg.tensor)});
      if (!program->slots.back().is_output) ++program->num_inputs;
    }
    // A real tensor that takes part is captured by value: it may change before a replay.
    const at::Tensor value = symbolic || arg.written    ? at::Tensor()
                             : arg.constant.has_value() ? *arg.constant
                                                        : CapturedValue(arg.tensor);
    SetArgument(program->arguments[arg.position], arg.element, value);
  }
  return program;
}

std::vector<c10::IValue> OperatorCall::MetaArguments() const {
  std::vector<c10::IValue> arguments(stack_.begin() + static_cast<std::ptrdiff_t>(begin_),
                                     stack_.end());
  for (c10::IValue& value : arguments) {
    if (value.isDevice()) value = c10::Device(c10::kMeta);
  }
  for (const TensorArgument& arg : tensors_) {
    // Wrapped numbers and CPU scalars promote differently from tensors, so they stay.
    const bool scalar =
        arg.touched.touch == Touch::kPlain && arg.tensor.dim() == 0 && arg.tensor.is_cpu();
    if (scalar && !arg.written) continue;
    SetArgument(arguments[arg.position], arg.element, MetaLike(arg.tensor));
  }
  return arguments;
}

}  // namespace loadplan
