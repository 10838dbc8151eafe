// OperatorCall, operators that do not run: shapes from meta tensors, values from a round that
// explores.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "backend/collective.h"
#include "backend/convert.h"
#include "backend/loader_line.h"
#include "backend/native_meta.h"
#include "backend/operator_call.h"
#include "backend/result_layout.h"
#include "backend/trace_tensor.h"
#include "backend/watcher.h"
#include "geometry/overlap.h"

namespace loadplan {
// `tensor`, on the trace device, holds `value` from now on. A factory makes an empty one first and
// lets its operator give it a size.
void OperatorCall::RecordMutated(const at::Tensor& tensor, const at::Tensor& value) {
  if (tensor.sizes() == value.sizes()) return session_.RecordConstant(tensor, value);
  TORCH_CHECK_NOT_IMPLEMENTED(IsTraceTensor(tensor), "`", name(), "` resizes its output, which cannot be traced");
  const at::Tensor resized = session_.NewConstantTensor(value);
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(resized.storage());
  impl->set_sizes_and_strides(resized.sizes(), resized.strides());
}

// The names behind the call go through the loader.
void OperatorCall::Refuse(const std::string& does, const std::string& instead) {
  session_.RecordRefusal(name(), absl::StrCat("`", name(), "` ", does), std::nullopt, Symbolic());
  TORCH_CHECK_NOT_IMPLEMENTED(false, "`", name(), "` ", does, ", which cannot be traced; ", instead);
}

namespace {

constexpr char kExchanges[] = "exchanges tensors with other processes";
constexpr char kWritesList[] = "writes a list of tensors";
constexpr char kResizes[] = "resizes a tensor that holds memory";
constexpr char kOverlaps[] = "writes bytes that it also reads elsewhere, in its kernel's own order";

}  // namespace

// A pass never communicates: what other processes send is known to a real call only, and they may
// need another number of passes. A pass that explores goes on as if they had sent made-up values.
void OperatorCall::RefuseExchange() {
  if (OnlyWaits(op_)) {
    const c10::ArrayRef<c10::IValue> arguments(stack_.data() + begin_, stack_.size() - begin_);
    return Return(ReturnsOfNoExchange(schema_, arguments));
  }
  StandIns* const stand_ins = session_.stand_ins();
  session_.RecordRefusal(name(), absl::StrCat("`", name(), "` ", kExchanges), std::nullopt,
                         Symbolic(), /*may_concern_all=*/true);
  TORCH_CHECK_NOT_IMPLEMENTED(stand_ins != nullptr, "`", name(), "` ", kExchanges,
                              ", which cannot be traced");
  const int choice = stand_ins->Choose(ReadSite());
  NoteWrites(/*runs=*/false);
  AdoptChanged();
  const ModeOff mode_off;
  std::vector<c10::IValue> returned;
  std::vector<at::Tensor> fresh;
  if (name().starts_with("c10d::")) {
    const c10::ArrayRef<c10::IValue> arguments(stack_.data() + begin_, stack_.size() - begin_);
    returned = ReturnsOfNoExchange(schema_, arguments);
  } else {
    returned = MetaArguments();
    NodeRecord unused;
    if (!RunOnMeta(returned, unused)) RefuseValueRead(session_, name(), Symbolic());
    for (const at::Tensor& output : FreshOutputs(schema_, returned))
      fresh.push_back(session_.NewConstantTensor(stand_ins->Make(output, choice)));
  }
  for (const TensorArgument& arg : tensors_) {
    if (arg.written) session_.RecordConstant(arg.tensor, stand_ins->Make(arg.tensor, choice));
  }
  if (name().starts_with("c10d::")) {
    Return(std::move(returned));
  } else {
    ReturnTraced(returned, fresh);
  }
}

// What it leaves depends on the order in which a kernel writes; run again on copies of its
// arguments it leaves something else.
bool OperatorCall::RefusesOverlap() {
  for (const TensorArgument& to : tensors_) {
    if (!to.written || !to.tensor.has_storage()) continue;
    for (const TensorArgument& from : tensors_) {
      if (&from == &to || !from.tensor.has_storage()) continue;
      if (from.tensor.storage().unsafeGetStorageImpl() !=
          to.tensor.storage().unsafeGetStorageImpl()) {
        continue;
      }
      const StridedLayout written = LayoutOf(to.tensor);
      const StridedLayout read = LayoutOf(from.tensor);
      if (written == read && to.tensor.scalar_type() == from.tensor.scalar_type()) continue;
      const absl::StatusOr<bool> overlaps = Overlaps(written, read);
      if (overlaps.ok() && !*overlaps) continue;
      if (AnswerWithStandIns(absl::StrCat("`", name(), "` ", kOverlaps))) return true;
      Refuse(kOverlaps, "call it on a clone()");
    }
  }
  return false;
}

// `torch.mul(w, 2, out=torch.empty(0))`: torch gives the empty tensor memory of the size. False
// where it has memory already.
bool OperatorCall::ResizeOutput(const at::Tensor& tensor, const at::Tensor& like) {
  const bool is_trace = IsTraceTensor(tensor);
  const bool is_new = tensor.storage().nbytes() == 0 &&
                      (is_trace ? tensor.storage().use_count() == 1
                                : session_.FindWritten(tensor).touch == Touch::kPlain);
  if (!is_new) return false;
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (is_trace) {
    const at::Tensor resized =
        session_.NewTemporary(like.sizes(), like.strides(), like.scalar_type());
    impl->set_storage_keep_dtype(resized.storage());
  } else {
    tensor.resize_(like.sizes());
  }
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  return true;
}

// What two reads that deserve one answer have in common.
std::string OperatorCall::ReadSite() const {
  std::string site = name();
  for (const TensorArgument& arg : tensors_) {
    if (arg.touched.touch == Touch::kPlain) continue;
    absl::StrAppend(&site, " ", c10::toString(arg.tensor.scalar_type()), " ",
                    session_.DescribeOrigin(arg.touched.storage));
  }
  return site;
}

// The operator runs on values made up: its result is a constant from then on, and a decision is
// taken as the round takes it. False where the pass does not explore.
bool OperatorCall::AnswerWithStandIns() {
  return AnswerWithStandIns(absl::StrCat("`", name(), "` reads its value"));
}

bool OperatorCall::AnswerWithStandIns(const std::string& reason) {
  StandIns* const stand_ins = session_.stand_ins();
  if (stand_ins == nullptr) return false;
  session_.RecordRefusal(name(), reason, std::nullopt, Symbolic());
  const int choice = stand_ins->Choose(ReadSite());
  const ModeOff mode_off;
  std::vector<c10::IValue> returned(stack_.begin() + static_cast<std::ptrdiff_t>(begin_),
                                    stack_.end());
  for (c10::IValue& value : returned) {
    if (value.isDevice()) value = c10::Device(c10::kCPU);
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> mutated;
  for (const TensorArgument& arg : tensors_) {
    at::Tensor value = arg.constant.has_value()             ? *arg.constant
                       : arg.touched.touch == Touch::kPlain ? arg.tensor.cpu()
                                                            : stand_ins->Make(arg.tensor, choice);
    if (arg.written) {
      value = value.clone(at::MemoryFormat::Contiguous);
      mutated.emplace_back(arg.tensor, value);
    }
    SetArgument(returned[arg.position], arg.element, value);
  }
  const at::AutoDispatchBelowAutograd no_autograd;
  op_.callBoxed(&returned);
  for (const auto& [tensor, value] : mutated) RecordMutated(tensor, value);
  for (c10::IValue& value : returned) {
    if (value.isBool()) value = choice % 2 != 0;
  }
  std::vector<at::Tensor> fresh;
  for (const at::Tensor& output : FreshOutputs(schema_, returned))
    fresh.push_back(session_.NewConstantTensor(output));
  ReturnTraced(returned, fresh);
  return true;
}

// False where only values could tell what comes of it.
bool OperatorCall::RunOnMeta(std::vector<c10::IValue>& stack, NodeRecord& record) {
  if (op_.hasTag(at::Tag::data_dependent_output)) return false;
  const at::AutoDispatchBelowAutograd no_autograd;
  try {
    if (RunNativeMeta(op_.operator_name(), stack)) return true;
    record.layout_is_unsure = !LayoutIsSure(op_, stack);
    op_.callBoxed(&stack);
    return true;
  } catch (const c10::NotImplementedError&) {
    // The operator has no meta kernel: its result depends on values.
  } catch (const std::exception& e) {
    // Anything that does not speak of meta tensors is the loader's own mistake, in
    // the words of the eager call.
    if (!SaysThatMetaHasNoValues(e.what())) throw;
  }
  return false;
}

void OperatorCall::RecordNode() {
  const ModeOff mode_off;
  NodeRecord record = MakeRecord();
  const std::shared_ptr<OperatorNode> program = CaptureProgram();
  std::vector<c10::IValue> returned = MetaArguments();
  std::vector<std::pair<at::Tensor, at::Tensor>> mutated;  // the argument and its meta twin
  for (const TensorArgument& arg : tensors_) {
    if (!arg.written) continue;
    if (arg.element >= 0) {
      if (AnswerWithStandIns(absl::StrCat("`", name(), "` ", kWritesList))) return;
      Refuse(kWritesList, "write them one by one");
    }
    mutated.emplace_back(arg.tensor, returned[arg.position].toTensor());
  }
  if (!RunOnMeta(returned, record)) {
    if (AnswerWithStandIns()) return;
    RefuseValueRead(session_, name(), Symbolic());
  }
  const std::vector<at::Tensor> fresh = FreshOutputs(schema_, returned);
  record.is_elementwise = IsElementwise(op_);
  record.layout_is_unsure &= !fresh.empty();  // what is written in place stays as it lies
  for (const at::Tensor& output : fresh) {
    if (output.layout() != at::kStrided)
      record.not_replayable = absl::StrCat("`", name(), "` gives no strided tensor");
    program->results.push_back(MetaOf(output));
  }
  for (const auto& [original, meta] : mutated) {
    if (original.sizes() != meta.sizes() && !ResizeOutput(original, meta)) {
      if (AnswerWithStandIns(absl::StrCat("`", name(), "` ", kResizes))) return;
      Refuse(kResizes, "give it one of the right size");
    }
    program->results.push_back(MetaOf(meta));
  }
  std::vector<at::Tensor> traced;
  if (!program->results.empty()) {
    const at::Tensor& first = tensors_.front().tensor;
    // `at::autocast::is_autocast_enabled` without its header, which includes all of ATen.
    if (!c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCPU) ||
        !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCUDA)) {
      record.not_replayable =
          absl::StrCat("`", record.op, "` runs under autocast", AtLine(LoaderLine()));
    }
    const std::vector<StorageId> values = session_.RecordNode(std::move(record), program);
    for (std::size_t i = 0; i < fresh.size(); ++i)
      traced.push_back(session_.NewValueTensor(values[i], program->results[i]));
    for (const at::Tensor& tensor : traced) ClaimDevice(tensor, ClaimedDevice(first));
    for (std::size_t i = 0; i < mutated.size(); ++i) {
      session_.RecordValue(mutated[i].first, values[fresh.size() + i],
                           program->results[fresh.size() + i], /*ran=*/false);
    }
  }
  ReturnTraced(returned, traced);
}

}  // namespace loadplan
