#include "backend/watcher.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "backend/mode.h"
#include "backend/operator_node.h"
#include "backend/trace_tensor.h"

namespace loadplan {
namespace {

constexpr c10::DispatchKeySet kWrapperKeys{
    c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize};

// A tensor among the arguments of a call.
struct TensorArgument {
  std::size_t position = 0;
  int64_t element = -1;
  at::Tensor tensor;
  TouchedStorage touched;
  bool written = false;
  bool is_out = false;
  std::optional<at::Tensor> constant;  // its value, where no checkpoint byte reaches it
};

// One call of an operator that has a tensor of the pass among its arguments.
class OperatorCall {
 public:
  OperatorCall(TraceSession& session, const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : session_(session),
        op_(op),
        stack_(*stack),
        schema_(op.schema()),
        begin_(stack->size() - op.schema().arguments().size()),
        random_(op.hasTag(at::Tag::nondeterministic_seeded)) {
    Collect();
  }

  bool touches() const { return touches_; }
  bool has_wrapper() const { return has_wrapper_; }
  bool random() const { return random_; }

  void Run() {
    if (MakesTraceTensor()) return CallBelow();
    CheckNoRebinding();
    if (CanRunForReal()) return RunForReal();
    if (RunOnConstants()) return;
    RecordNode();
  }
  void RunForReal();

 private:
  // `deepcopy` puts a trace tensor together from a storage of ours.
  bool MakesTraceTensor() const {
    return op_.operator_name().name == "aten::set_" && tensors_.size() == 1 &&
           tensors_.front().touched.touch == Touch::kTrace;
  }
  void CallBelow() {
    const ModeOff mode_off;
    op_.callBoxed(&stack_);
  }
  void Collect();
  void Add(std::size_t position, int64_t element, const at::Tensor& tensor);
  void CheckNoRebinding();
  bool CanRunForReal() const;
  bool RunOnConstants();
  void RecordNode();
  void RunOnMeta(std::vector<c10::IValue>& stack);
  std::vector<c10::IValue> MetaArguments() const;
  std::shared_ptr<OperatorNode> CaptureProgram() const;
  NodeRecord MakeRecord() const;
  void ReturnTraced(std::vector<c10::IValue>& returned, const std::vector<at::Tensor>& fresh);
  std::string name() const { return c10::toString(op_.operator_name()); }
  std::vector<at::Tensor> Symbolic() const;
  c10::IValue& argument(std::size_t position) { return stack_[begin_ + position]; }
  const c10::IValue& argument(std::size_t position) const { return stack_[begin_ + position]; }

  TraceSession& session_;
  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  const c10::FunctionSchema& schema_;
  const std::size_t begin_;
  const bool random_;
  std::vector<TensorArgument> tensors_;
  bool touches_ = false;
  bool has_wrapper_ = false;
};

void OperatorCall::Collect() {
  for (std::size_t i = 0; i < schema_.arguments().size(); ++i) {
    const c10::IValue& value = argument(i);
    if (value.isTensor()) {
      Add(i, -1, value.toTensor());
    } else if (value.isTensorList()) {
      const c10::List<at::Tensor> list = value.toTensorList();
      for (std::size_t k = 0; k < list.size(); ++k) Add(i, static_cast<int64_t>(k), list[k]);
    } else if (value.isOptionalTensorList()) {
      const auto list = value.toOptionalTensorList();
      for (std::size_t k = 0; k < list.size(); ++k) {
        const std::optional<at::Tensor> tensor = list[k];
        if (tensor.has_value()) Add(i, static_cast<int64_t>(k), *tensor);
      }
    }
  }
}

void OperatorCall::Add(std::size_t position, int64_t element, const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  if (IsWrapper(tensor)) {
    has_wrapper_ = true;
    return;
  }
  TensorArgument found{position, element, tensor,      session_.Find(tensor),
                       false,    false,   std::nullopt};
  touches_ |= found.touched.touch != Touch::kPlain;
  const c10::AliasInfo* const alias = schema_.arguments()[position].alias_info();
  found.written = alias != nullptr && alias->isWrite();
  found.is_out = found.written && schema_.arguments()[position].is_out();
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
void OperatorCall::CheckNoRebinding() {
  const std::string& op = op_.operator_name().name;
  if (op != "aten::set_" && op != "aten::resize_" && op != "aten::set_data") return;
  const TensorArgument& self = tensors_.front();
  if (self.touched.touch == Touch::kPlain && tensors_.size() < 2) return;
  if (op == "aten::resize_" && self.tensor.sizes() == at::IntArrayRef(argument(1).toIntVector()))
    return;
  session_.RecordRefusal(name(), "moves a live tensor to other memory", "", Symbolic());
  TORCH_CHECK(false, "`", name(), "` would move ", session_.Describe(self.tensor),
              " to other memory, which a load plan cannot follow; copy into it instead");
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
  if (strided.empty()) return;
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
  op_.callBoxed(&stack_);
  for (const TensorArgument& arg : tensors_) {
    if (arg.written && arg.constant.has_value()) session_.RecordConstant(arg.tensor, *arg.constant);
  }
  std::vector<c10::IValue> returned(stack_.begin() + static_cast<std::ptrdiff_t>(begin_),
                                    stack_.end());
  std::vector<at::Tensor> fresh;
  for (const at::Tensor& output : FreshOutputs(schema_, returned))
    fresh.push_back(session_.NewConstantTensor(output));
  ReturnTraced(returned, fresh);
  return true;
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
  stack_.resize(begin_);
  for (c10::IValue& value : returned) stack_.push_back(std::move(value));
}

NodeRecord OperatorCall::MakeRecord() const {
  NodeRecord record;
  record.op = name();
  for (const TensorArgument& arg : tensors_) {
    if (arg.touched.touch == Touch::kPlain || arg.is_out || arg.constant.has_value()) continue;
    record.inputs.push_back(session_.ReadOf(arg.tensor));
  }
  if (random_) record.not_replayable = absl::StrCat("`", record.op, "` draws random numbers");
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
                                                        : arg.tensor.detach().clone();
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

void OperatorCall::RunOnMeta(std::vector<c10::IValue>& stack) {
  if (op_.hasTag(at::Tag::data_dependent_output)) RefuseValueRead(session_, name(), Symbolic());
  const at::AutoDispatchBelowAutograd no_autograd;
  std::string error;
  try {
    op_.callBoxed(&stack);
    return;
  } catch (const c10::NotImplementedError& e) {
    error = e.what_without_backtrace();
  } catch (const c10::Error& e) {
    error = e.what_without_backtrace();
    // Anything else is the loader's own mistake, in the words of the eager call.
    if (error.find("meta") == std::string::npos && error.find("Meta") == std::string::npos) throw;
  }
  RefuseValueRead(session_, name(), Symbolic());
}

void OperatorCall::RecordNode() {
  for (const TensorArgument& arg : tensors_) {
    TORCH_CHECK_NOT_IMPLEMENTED(!arg.tensor.is_conj() && !arg.tensor.is_neg(), "`", name(), "` on a lazily conjugated ",
                                session_.Describe(arg.tensor), " cannot be traced; call resolve_conj() first");
  }
  const ModeOff mode_off;
  NodeRecord record = MakeRecord();
  const std::shared_ptr<OperatorNode> program = CaptureProgram();
  std::vector<c10::IValue> returned = MetaArguments();
  std::vector<std::pair<at::Tensor, at::Tensor>> mutated;  // the argument and its meta twin
  for (const TensorArgument& arg : tensors_) {
    if (!arg.written) continue;
    TORCH_CHECK_NOT_IMPLEMENTED(arg.element < 0, "`", name(), "` writes a list of tensors, which cannot be traced");
    mutated.emplace_back(arg.tensor, returned[arg.position].toTensor());
  }
  RunOnMeta(returned);
  const std::vector<at::Tensor> fresh = FreshOutputs(schema_, returned);
  for (const at::Tensor& output : fresh) program->results.push_back(MetaOf(output));
  for (const auto& [original, meta] : mutated) {
    TORCH_CHECK_NOT_IMPLEMENTED(original.sizes() == meta.sizes(), "`", name(), "` resizes its output, which cannot be traced");
    program->results.push_back(MetaOf(meta));
  }
  std::vector<at::Tensor> traced;
  if (!program->results.empty()) {
    if (at::autocast::is_autocast_enabled(at::kCPU) ||
        at::autocast::is_autocast_enabled(at::kCUDA)) {
      record.not_replayable = absl::StrCat("`", record.op, "` runs under autocast");
    }
    const std::vector<StorageId> values = session_.RecordNode(std::move(record), program);
    for (std::size_t i = 0; i < fresh.size(); ++i)
      traced.push_back(session_.NewValueTensor(values[i], program->results[i]));
    for (std::size_t i = 0; i < mutated.size(); ++i) {
      session_.RecordValue(mutated[i].first, values[fresh.size() + i],
                           program->results[fresh.size() + i], /*ran=*/false);
    }
  }
  ReturnTraced(returned, traced);
}

}  // namespace

bool IsWrapper(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has_any(kWrapperKeys);
}

std::vector<c10::StorageImpl*> StoragesOf(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::StorageImpl*> storages;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.has_storage())
      storages.push_back(tensor.storage().unsafeGetStorageImpl());
  }
  return storages;
}

void RefuseValueRead(TraceSession& session, const std::string& op,
                     const std::vector<at::Tensor>& tensors) {
  session.RecordRefusal(op, absl::StrCat("`", op, "` reads its value"), "", tensors);
  std::string what;
  for (const at::Tensor& tensor : tensors) {
    if (session.Find(tensor).touch == Touch::kTrace || what.empty())
      what = session.Describe(tensor);
  }
  TORCH_CHECK(false, "`", op, "` needs the value of ", what, ", which holds no data while it is traced");
}

void WatchOperator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  TraceSession* const session = TraceSession::Current();
  if (session == nullptr) {
    op.redispatchBoxed(keys & kBelowMode, stack);
    return;
  }
  OperatorCall call(*session, op, stack);
  if (call.has_wrapper()) {
    op.redispatchBoxed(keys & kBelowMode, stack);
  } else if (call.touches()) {
    call.Run();
  } else if (call.random()) {
    call.RunForReal();
  } else if (op.operator_name().name.starts_with("aten::")) {
    const ModeOff mode_off;
    op.redispatchBoxed(keys & kBelowMode, stack);
  } else {
    // A custom operator may be Python that closes over live tensors: stay on inside it.
    op.redispatchBoxed(keys & kBelowMode, stack);
  }
}

void JoinAndCall(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::shared_ptr<TraceSession> session;
  const std::size_t count = op.schema().arguments().size();
  const auto look = [&session](const at::Tensor& tensor) {
    if (session != nullptr || !tensor.defined() || !IsTraceTensor(tensor) || !tensor.has_storage())
      return;
    if (const TraceContext* const context = ContextOf(tensor.storage().unsafeGetStorageImpl()))
      session = context->session;
  };
  for (const c10::IValue& value : c10::ArrayRef<c10::IValue>(*stack).slice(stack->size() - count)) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) look(tensor);
    }
  }
  TORCH_CHECK(session != nullptr, "`", op.operator_name(), "` is not available on the trace device");
  TORCH_CHECK(session->active(), "`", op.operator_name(),
              "` is called on a trace tensor whose pass has ended; trace tensors hold no data and live only as long as "
              "the pass that made them");
  TORCH_CHECK(TraceSession::Current() != session.get(), "`", op.operator_name(), "` is not available on the trace device");
  session->JoinThread();
  op.callBoxed(stack);
}

}  // namespace loadplan
