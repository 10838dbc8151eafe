// OperatorCall: one call of an operator that has a tensor of the pass among its
// arguments. See Note [What the watcher does] in backend/watcher.h.
#ifndef LOADPLAN_BACKEND_OPERATOR_CALL_H_
#define LOADPLAN_BACKEND_OPERATOR_CALL_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/collective.h"
#include "backend/mode.h"
#include "backend/operator_node.h"
#include "backend/trace_session.h"

namespace loadplan {

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
  bool has_wrapper() const { return !wrappers_.empty(); }
  bool random() const { return random_; }

  void Run() {
    if (MakesTraceTensor()) return CallBelow();
    if (IsCollective(op_)) return RefuseExchange();
    if (RefusesRebinding()) return;
    NoteReshapes();
    if (op_.hasTag(at::Tag::inplace_view)) return CallBelow();  // `t_`: geometry, no bytes
    ResolveLazyArguments();
    if (RefusesOverlap()) return;
    const bool runs = CanRunForReal();
    NoteWrites(runs);
    if (runs) {
      AdoptChanged();
      return RunForReal();
    }
    if (RunOnConstants()) return;
    AdoptChanged();
    if (RecordMovement()) return;
    ZeroUninitialised();
    RecordNode();
  }
  void RunForReal();
  // Tells the session what the call is about to write; see Note [Mirrors].
  void NoteWrites(bool runs) const;
  void NoteReshapes() const;
  // After the call: memory of results that is no argument's is new.
  void NoteBirths() const;

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
  void RefuseExchange();
  void Return(std::vector<c10::IValue> returned);
  bool RefusesRebinding();
  bool RefusesOverlap();
  void ResolveLazyArguments();
  bool CanRunForReal() const;
  bool RunOnConstants();
  void RecordMutated(const at::Tensor& tensor, const at::Tensor& value);
  void AdoptChanged();
  bool RecordMovement();
  void ZeroUninitialised();
  bool RecordMoved(const at::Tensor& labels, const std::vector<at::Tensor>& data);
  void RecordNode();
  bool ResizeOutput(const at::Tensor& tensor, const at::Tensor& like);
  [[noreturn]] void Refuse(const std::string& does, const std::string& instead);
  bool RunOnMeta(std::vector<c10::IValue>& stack, NodeRecord& record);
  bool AnswerWithStandIns();
  bool AnswerWithStandIns(const std::string& reason);
  std::string ReadSite() const;
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
  std::vector<TensorArgument> wrappers_;
};

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_OPERATOR_CALL_H_
