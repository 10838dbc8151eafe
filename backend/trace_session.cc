#include "backend/trace_session.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "backend/cast_bits.h"
#include "backend/constant_value.h"
#include "backend/convert.h"
#include "backend/loader_line.h"
#include "backend/map_sides.h"
#include "backend/mode.h"
#include "backend/thread_session.h"
#include "backend/trace_tensor.h"
#include "geometry/overlap.h"
#include "plan/resolve.h"

namespace loadplan {
namespace {

thread_local ThreadSession thread_session;

void LeaveThread() {
  c10::impl::tls_set_dispatch_key_included(kModeKey, false);
  thread_session.Set(nullptr);
}

const c10::StorageImpl* StorageOf(const at::Tensor& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  return impl->has_storage() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

// Without strides: row-major.
Index SpanNbytes(at::IntArrayRef sizes, at::IntArrayRef strides, Index itemsize) {
  if (strides.size() != sizes.size()) return c10::multiply_integers(sizes) * itemsize;
  Index last = 0;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return 0;
    last += (sizes[d] - 1) * strides[d];
  }
  return (last + 1) * itemsize;
}

constexpr char kComputed[] = "a tensor computed from checkpoint tensors";

}  // namespace

TraceSession::TraceSession(std::shared_ptr<const TargetSet> targets)
    : targets_(std::move(targets)) {
  const std::vector<at::Tensor>& storages = targets_->storages();
  if (!storages.empty() && !storages.front().is_meta()) home_ = storages.front().device();
}

TraceSession::~TraceSession() { guards_.ReleaseAll(); }

TraceSession* TraceSession::Current() {
  TraceSession* const session = thread_session.get();
  if (session != nullptr && !session->active()) {
    LeaveThread();
    return nullptr;
  }
  return session;
}

absl::Status TraceSession::Begin() {
  if (Current() != nullptr) {
    return absl::FailedPreconditionError("a trace pass is active in this thread already");
  }
  const std::vector<at::Tensor>& storages = targets_->storages();
  num_targets_ = static_cast<StorageId>(storages.size());
  for (StorageId id = 0; id < num_targets_; ++id) {
    const c10::Storage& storage = storages[static_cast<std::size_t>(id)].storage();
    log_.storages.push_back({StorageKind::kTarget, static_cast<Index>(storage.nbytes())});
    writes_into_.push_back(0);
    RealOf(storage).id = id;
    if (storage.device().is_meta()) continue;
    if (const auto status = guards_.ForbidWrites(storage, targets_->NameOf(id)); !status.ok()) {
      guards_.ReleaseAll();
      return status;
    }
  }
  active_.store(true, std::memory_order_release);
  JoinThread();
  return absl::OkStatus();
}

void TraceSession::JoinThread() {
  num_threads_.fetch_add(1, std::memory_order_acq_rel);
  thread_session.Set(shared_from_this());
  c10::impl::tls_set_dispatch_key_included(kModeKey, true);
}

void TraceSession::End() {
  if (thread_session.get() == this) LeaveThread();
  active_.store(false, std::memory_order_release);
  guards_.ReleaseAll();
  PutBack();
  const std::string reached = guards_.reached();
  if (!reached.empty())
    unplannable_ = absl::StrCat("the loader reaches target ", reached, " through a raw pointer");
}

TouchedStorage TraceSession::FindWritten(const at::Tensor& tensor) const {
  const c10::StorageImpl* const storage = StorageOf(tensor);
  if (storage == nullptr) return {};
  if (IsTraceTensor(tensor)) {
    const TraceContext* const context = ContextOf(storage);
    TORCH_CHECK(context != nullptr, "a tensor on device ", tensor.device(),
                " belongs to another backend and cannot take part in a trace");
    TORCH_CHECK(context->session.get() == this,
                "a trace tensor of an earlier pass is used: the loader kept it from one call of "
                "load_weights to the next; drop it when load_weights returns");
    return {Touch::kTrace, context->storage};
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = real_.find(storage);
  if (found == real_.end()) return {};
  const RealStorage& real = found->second;
  return {real.id < 0 ? Touch::kPlain : Touch::kKnown, real.id, real.has_run};
}

TouchedStorage TraceSession::Find(const at::Tensor& tensor) const {
  const TouchedStorage touched = FindWritten(tensor);
  if (touched.touch != Touch::kKnown) return touched;
  const std::lock_guard<std::mutex> lock(mutex_);
  const RealStorage& real = real_.find(StorageOf(tensor))->second;
  if (real.stale_copies.empty()) return touched;
  const StridedLayout layout = LayoutOf(tensor);
  for (const std::int32_t copy : real.stale_copies) {
    const StridedMap& map = log_.copies[static_cast<std::size_t>(copy)].map;
    if (MayShareBytes(layout, map.ToLayout())) return {Touch::kStale, real.id};
  }
  return touched;
}

TouchedStorage TraceSession::Adopt(const at::Tensor& tensor) {
  const ModeOff mode_off;
  const std::lock_guard<std::mutex> lock(mutex_);
  return {Touch::kKnown, Register(tensor)};
}

at::Tensor TraceSession::NewCheckpointTensor(std::int32_t source, const std::string& name,
                                             at::IntArrayRef sizes, at::ScalarType dtype) {
  Index nbytes = static_cast<Index>(c10::elementSize(dtype));
  for (const int64_t size : sizes) nbytes *= size;
  const StorageId id = AddStorage({StorageKind::kCheckpoint, nbytes, source});
  const std::lock_guard<std::mutex> lock(mutex_);
  if (source_names_.size() <= static_cast<std::size_t>(source))
    source_names_.resize(static_cast<std::size_t>(source) + 1);
  source_names_[static_cast<std::size_t>(source)] = name;
  return MakeTraceTensor(shared_from_this(), id, nbytes, "checkpoint tensor `" + name + "`", sizes,
                         {}, dtype);
}

at::Tensor TraceSession::NewTemporary(at::IntArrayRef sizes, at::IntArrayRef strides,
                                      at::ScalarType dtype) {
  const Index nbytes = SpanNbytes(sizes, strides, static_cast<Index>(c10::elementSize(dtype)));
  return MakeTraceTensor(shared_from_this(), NewTemporaryStorage(nbytes), nbytes, kComputed, sizes,
                         strides, dtype);
}

StorageId TraceSession::NewTemporaryStorage(Index nbytes) {
  return AddStorage({StorageKind::kTemporary, nbytes});
}

at::Tensor TraceSession::NewConstantTensor(const at::Tensor& value) {
  const ModeOff mode_off;
  // In the order of memory that an eager call gives it: `as_strided` and products depend on it.
  const at::Tensor copy = value.cpu().clone(at::MemoryFormat::Preserve);
  const auto nbytes = static_cast<Index>(copy.nbytes());
  StorageId id = -1;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    captured_.push_back(copy);
    log_.storages.push_back(
        {StorageKind::kConstant, nbytes, static_cast<std::int32_t>(captured_.size() - 1)});
    writes_into_.resize(log_.storages.size());
    id = static_cast<StorageId>(log_.storages.size() - 1);
  }
  return MakeTraceTensor(shared_from_this(), id, nbytes, "a constant on the trace device",
                         copy.sizes(), copy.strides(), copy.scalar_type());
}

at::Tensor TraceSession::NewValueTensor(StorageId value, const ResultMeta& meta) {
  const Index nbytes =
      SpanNbytes(meta.sizes, meta.strides, static_cast<Index>(c10::elementSize(meta.dtype)));
  return MakeTraceTensor(shared_from_this(), value, nbytes, kComputed, meta.sizes, meta.strides,
                         meta.dtype);
}

void TraceSession::RecordCopy(const at::Tensor& to, const at::Tensor& from, bool ran) {
  if (to.numel() == 0) return;
  const ModeOff mode_off;
  CopyRecord record;
  record.to_dtype = ToDType(to.scalar_type());
  record.from_dtype = ToDType(from.scalar_type());
  DimVector shape = ToDimVector(to.sizes());
  MapSide from_side = BroadcastSide(from, shape);
  record.map = StridedMap::Unchecked(std::move(shape), SideOf(to), std::move(from_side),
                                     /*is_cast=*/record.to_dtype != record.from_dtype);
  if (record.map.is_cast()) (void)CastIsMovable(to, from, &record.scattered);
  const std::lock_guard<std::mutex> lock(mutex_);
  record.from = Register(from);
  record.to = RegisterWritten(to);
  Push(to, std::move(record), ran);
}

void TraceSession::RecordMoves(const at::Tensor& to,
                               std::vector<std::pair<StorageId, StridedMap>> moves) {
  const ModeOff mode_off;
  const std::lock_guard<std::mutex> lock(mutex_);
  const StorageId to_storage = RegisterWritten(to);
  for (auto& [from, map] : moves) {
    CopyRecord record;
    record.to = to_storage;
    record.from = from;
    record.to_dtype = record.from_dtype = ToDType(to.scalar_type());
    record.map = std::move(map);
    Push(to, std::move(record), /*ran=*/false);
  }
}

void TraceSession::RecordConstant(const at::Tensor& to, const at::Tensor& value) {
  if (to.numel() == 0) return;
  RecordCopy(to, NewConstantTensor(value), /*ran=*/false);
}

std::vector<StorageId> TraceSession::RecordNode(NodeRecord node,
                                                std::shared_ptr<const OperatorNode> program) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto id = static_cast<std::int32_t>(log_.nodes.size());
  node.time = static_cast<Index>(log_.copies.size());
  std::int32_t output = 0;
  for (const ResultMeta& meta : program->results) {
    const Index nbytes =
        SpanNbytes(meta.sizes, meta.strides, static_cast<Index>(c10::elementSize(meta.dtype)));
    log_.storages.push_back({StorageKind::kValue, nbytes, id, output++});
    node.outputs.push_back(static_cast<StorageId>(log_.storages.size() - 1));
  }
  writes_into_.resize(log_.storages.size());
  std::vector<StorageId> outputs = node.outputs;
  log_.nodes.push_back(std::move(node));
  programs_.push_back(std::move(program));
  return outputs;
}

void TraceSession::RecordValue(const at::Tensor& to, StorageId value, const ResultMeta& meta,
                               bool ran) {
  if (to.numel() == 0) return;
  const ModeOff mode_off;
  CopyRecord record;
  record.to_dtype = record.from_dtype = ToDType(meta.dtype);
  MapSide from_side{0, ToDimVector(meta.strides), static_cast<Index>(to.element_size())};
  for (Index& stride : from_side.byte_strides) stride *= from_side.itemsize;
  record.map = StridedMap::Unchecked(ToDimVector(to.sizes()), SideOf(to), std::move(from_side),
                                     /*is_cast=*/false);
  record.from = value;
  const std::lock_guard<std::mutex> lock(mutex_);
  record.to = RegisterWritten(to);
  Push(to, std::move(record), ran);
}

void TraceSession::RecordRefusal(const std::string& op, const std::string& reason,
                                 const std::optional<std::string>& where,
                                 const std::vector<at::Tensor>& tensors, bool may_concern_all) {
  RefusalRecord refusal{op, reason,     where.has_value() ? *where : LoaderLine(),
                        {}, /*time=*/0, may_concern_all};
  for (const at::Tensor& tensor : tensors) refusal.inputs.push_back(ReadOf(tensor));
  const std::lock_guard<std::mutex> lock(mutex_);
  refusal.time = static_cast<Index>(log_.copies.size());
  log_.refusals.push_back(std::move(refusal));
}

void TraceSession::RecordAnswered(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    AnsweredRead answered{ReadOf(tensor), 0};
    const std::lock_guard<std::mutex> lock(mutex_);
    answered.time = static_cast<Index>(log_.copies.size());
    log_.answered.push_back(std::move(answered));
  }
}

void TraceSession::NoteExternal(const at::Tensor& tensor) {
  const c10::StorageImpl* const storage = StorageOf(tensor);
  // A number that Python wrapped dies with the call.
  if (storage == nullptr || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto [found, added] = externals_.try_emplace(
      storage,
      ExternalTensor{
          c10::weak_intrusive_ptr<c10::StorageImpl>(tensor.storage().getWeakStorageImpl()), ""});
  if (added) {
    found->second.what =
        absl::StrCat("a tensor of shape [", absl::StrJoin(tensor.sizes(), ", "), "] and dtype ",
                     std::string(ToDType(tensor.scalar_type()).name));
  }
}

std::vector<ExternalTensor> TraceSession::LiveExternals() const {
  std::vector<ExternalTensor> live;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [impl, external] : externals_) {
    const auto real = real_.find(impl);
    const bool is_known = real != real_.end() && real->second.id >= 0;
    if (!is_known && external.storage.lock() != nullptr) live.push_back(external);
  }
  return live;
}

// Holds the mutex.
std::string TraceSession::DescribeStorage(StorageId storage) const {
  if (IsTarget(storage)) return absl::StrCat("target `", targets_->NameOf(storage), "`");
  const StorageRecord& record = log_.storages[static_cast<std::size_t>(storage)];
  switch (record.kind) {
    case StorageKind::kCheckpoint:
      return absl::StrCat("`", source_names_[static_cast<std::size_t>(record.ref)], "`");
    case StorageKind::kConstant:
      return "a constant";
    case StorageKind::kValue:
      return absl::StrCat("`", log_.nodes[static_cast<std::size_t>(record.ref)].op, "`");
    case StorageKind::kTarget:
    case StorageKind::kTemporary:
    case StorageKind::kScratch:
      break;
  }
  return absl::StrCat("temporary ", storage);
}

std::vector<std::string> TraceSession::DescribeCopies() const {
  std::vector<std::string> lines;
  const std::lock_guard<std::mutex> lock(mutex_);
  lines.reserve(log_.copies.size());
  for (const CopyRecord& copy : log_.copies) {
    std::string dtypes(copy.from_dtype.name);
    if (copy.map.is_cast()) absl::StrAppend(&dtypes, " to ", std::string(copy.to_dtype.name));
    lines.push_back(absl::StrCat(DescribeStorage(copy.to), " <- ", DescribeStorage(copy.from), " [",
                                 absl::StrJoin(copy.map.shape(), ", "), "] ", dtypes));
  }
  return lines;
}

std::string TraceSession::Describe(const at::Tensor& tensor) const {
  const TouchedStorage touched = Find(tensor);
  if (touched.storage < 0) return "a real tensor";
  const std::lock_guard<std::mutex> lock(mutex_);
  if (IsTarget(touched.storage))
    return absl::StrCat("target `", targets_->NameOf(touched.storage), "`");
  const StorageRecord& record = log_.storages[static_cast<std::size_t>(touched.storage)];
  if (record.kind == StorageKind::kCheckpoint) {
    return absl::StrCat("checkpoint tensor `", source_names_[static_cast<std::size_t>(record.ref)],
                        "`");
  }
  const SymbolicMemory memory(log_);
  const auto names = memory.NamesBehind(touched.storage, LayoutOf(tensor).Span(),
                                        static_cast<Index>(log_.copies.size()));
  if (names.empty()) return "a tensor on the trace device";
  return absl::StrCat("a tensor computed from checkpoint tensor `",
                      source_names_[static_cast<std::size_t>(names.front())], "`",
                      names.size() > 1 ? " and others" : "");
}

std::string TraceSession::DescribeOrigin(StorageId storage) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string origin;
  for (int depth = 0; depth < 4 && storage >= 0; ++depth) {
    const StorageRecord& record = log_.storages[static_cast<std::size_t>(storage)];
    if (record.kind != StorageKind::kValue)
      return origin + (record.kind == StorageKind::kCheckpoint ? "checkpoint" : "memory");
    const NodeRecord& node = log_.nodes[static_cast<std::size_t>(record.ref)];
    absl::StrAppend(&origin, node.op, " of ");
    storage = node.inputs.empty() ? -1 : node.inputs.front().storage;
  }
  return origin;
}

ReadRecord TraceSession::ReadOf(const at::Tensor& tensor) const {
  return {Find(tensor).storage, LayoutOf(tensor), ToDType(tensor.scalar_type())};
}

bool TraceSession::IsUninitialised(const at::Tensor& tensor) const {
  const TouchedStorage touched = Find(tensor);
  if (touched.touch != Touch::kTrace) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto storage = static_cast<std::size_t>(touched.storage);
  return log_.storages[storage].kind == StorageKind::kTemporary && writes_into_[storage] == 0;
}

std::optional<at::Tensor> TraceSession::ConstantValue(const at::Tensor& tensor,
                                                      bool allow_uninitialised) {
  const ModeOff mode_off;
  const TouchedStorage touched = Find(tensor);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto storage = static_cast<std::size_t>(touched.storage);
  const StorageRecord& record = log_.storages[storage];
  if (writes_into_[storage] == 0) {
    if (record.kind == StorageKind::kConstant) {
      return at::empty({0}, at::TensorOptions().dtype(tensor.scalar_type()))
          .set_(captured_[static_cast<std::size_t>(record.ref)].storage(), tensor.storage_offset(),
                tensor.sizes(), tensor.strides())
          .clone();
    }
    if (record.kind != StorageKind::kTemporary || !allow_uninitialised) return std::nullopt;
  }
  return GatherConstant(log_, captured_, touched.storage, tensor, allow_uninitialised);
}

StorageId TraceSession::AddStorage(StorageRecord record) {
  const std::lock_guard<std::mutex> lock(mutex_);
  log_.storages.push_back(record);
  writes_into_.push_back(0);
  return static_cast<StorageId>(log_.storages.size() - 1);
}

StorageId TraceSession::Register(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  if (IsTraceTensor(tensor)) return ContextOf(impl)->storage;
  RealStorage& real = RealOf(storage);
  if (real.id >= 0) return real.id;
  const auto nbytes = static_cast<Index>(storage.nbytes());
  StorageRecord record{StorageKind::kScratch, nbytes};
  if (storage.device().is_meta()) {
    record.kind = StorageKind::kTemporary;
  } else {
    captured_.push_back(BytesOfStorage(storage).clone());
    record.ref = static_cast<std::int32_t>(captured_.size() - 1);
  }
  log_.storages.push_back(record);
  writes_into_.push_back(0);
  real.id = static_cast<StorageId>(log_.storages.size() - 1);
  return real.id;
}

// An operator's output never changes: a tensor of it that is written moves to a copy first.
StorageId TraceSession::RegisterWritten(const at::Tensor& tensor) {
  const StorageId id = Register(tensor);
  const StorageRecord value = log_.storages[static_cast<std::size_t>(id)];
  if (value.kind != StorageKind::kValue) return id;
  const auto& program = *programs_[static_cast<std::size_t>(value.ref)];
  CopyRecord record;
  record.from = id;
  record.to = static_cast<StorageId>(log_.storages.size());
  record.to_dtype = record.from_dtype =
      ToDType(program.results[static_cast<std::size_t>(value.output)].dtype);
  const Index itemsize = record.to_dtype.itemsize;
  record.map = StridedMap::Identity(
      StridedLayout::Unchecked(0, {value.nbytes / itemsize}, {itemsize}, itemsize));
  log_.storages.push_back({StorageKind::kTemporary, value.nbytes});
  writes_into_.push_back(0);
  const StorageId copy = record.to;
  Push(tensor, std::move(record), /*ran=*/false);
  ContextOf(tensor.storage().unsafeGetStorageImpl())->storage = copy;
  return copy;
}

void TraceSession::Push(const at::Tensor& to, CopyRecord record, bool ran) {
  ++writes_into_[static_cast<std::size_t>(record.to)];
  const auto copy = static_cast<std::int32_t>(log_.copies.size());
  log_.copies.push_back(std::move(record));
  if (ran || IsTraceTensor(to)) return;
  const c10::Storage& storage = to.storage();
  RealStorage& real = real_.find(storage.unsafeGetStorageImpl())->second;
  const bool first = real.stale_copies.empty();
  real.stale_copies.push_back(copy);
  if (!first || storage.device().is_meta()) return;
  guards_.ForbidReads(
      storage,
      absl::StrCat(
          IsTarget(real.id) ? "`" + targets_->NameOf(real.id) + "`" : std::string("a tensor"),
          " holds bytes of a checkpoint tensor that is only traced: its memory cannot be "
          "read through a raw pointer until the pass ends"));
}

}  // namespace loadplan
