// TraceSession: one pass. It knows every storage that takes part, keeps the log of
// what was written into which, and guards the live memory.
#ifndef LOADPLAN_BACKEND_TRACE_SESSION_H_
#define LOADPLAN_BACKEND_TRACE_SESSION_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "backend/mirrors.h"
#include "backend/operator_node.h"
#include "backend/stand_ins.h"
#include "backend/storage_guard.h"
#include "backend/target_set.h"
#include "backend/traced_plan.h"
#include "plan/records.h"

namespace loadplan {

// How an argument of an operator takes part in the pass.
enum class Touch : std::uint8_t {
  kPlain,  // not at all: a real tensor that the pass never wrote or derived from live bytes
  kKnown,  // a real tensor whose memory holds what the loader would read there, but whose
           // bytes have a history (live before the update, computed from live bytes)
  kStale,  // a real tensor whose memory does not hold what the loader would read
  kTrace,  // a trace tensor
};

struct TouchedStorage {
  Touch touch = Touch::kPlain;
  StorageId storage = -1;
  bool has_run = false;  // NoteWrite has been told of it
};

class TraceSession : public std::enable_shared_from_this<TraceSession> {
 public:
  explicit TraceSession(std::shared_ptr<const TargetSet> targets);
  ~TraceSession();

  // Reads of values get made-up answers instead of an error. Call before Begin.
  void Explore(std::shared_ptr<StandIns> stand_ins) { stand_ins_ = std::move(stand_ins); }
  StandIns* stand_ins() const { return stand_ins_.get(); }

  // The session of the calling thread's pass; nullptr outside a pass. A thread
  // whose pass has ended is switched off by this call.
  static TraceSession* Current();

  // Guards the targets and switches tracing on in the calling thread.
  absl::Status Begin();
  // Lets the calling thread take part until the session ends.
  void JoinThread();
  // Threads that have joined and not yet noticed the end: idle ones of a pool.
  long num_threads() const { return num_threads_.load(std::memory_order_acquire); }
  void LeftByThread() { num_threads_.fetch_sub(1, std::memory_order_acq_rel); }
  // Ends the pass for every thread and opens the guards.
  void End();
  bool active() const { return active_.load(std::memory_order_acquire); }

  TouchedStorage Find(const at::Tensor& tensor) const;
  // The same for a tensor that is only written: stale bytes are not looked for (kKnown).
  TouchedStorage FindWritten(const at::Tensor& tensor) const;
  // Takes in a real tensor that is about to be changed: from now on it has a history,
  // which begins with the bytes that it holds.
  TouchedStorage Adopt(const at::Tensor& tensor);
  // Where new tensors would be in an eager call: on the device of the first target.
  c10::Device home() const { return home_; }
  bool IsTarget(StorageId storage) const { return storage < num_targets_ && storage >= 0; }

  // A trace tensor for checkpoint tensor `source` of the plan.
  at::Tensor NewCheckpointTensor(std::int32_t source, const std::string& name,
                                 at::IntArrayRef sizes, at::ScalarType dtype);
  // A trace tensor over new memory that nothing has written.
  at::Tensor NewTemporary(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);
  // New memory of `nbytes` for the device's allocator.
  StorageId NewTemporaryStorage(Index nbytes);
  // A trace tensor that holds a captured value.
  at::Tensor NewConstantTensor(const at::Tensor& value);

  // `to` becomes a copy (a cast where dtypes differ) of `from`; both tensors have
  // equal sizes. Registers `to` where it is a real tensor the pass has not met. Live memory is not
  // written; `ran` says that the caller did write it for real.
  void RecordCopy(const at::Tensor& to, const at::Tensor& from, bool ran);
  // Parts of `to` become copies of bytes of other storages, all of one dtype.
  void RecordMoves(const at::Tensor& to, std::vector<std::pair<StorageId, StridedMap>> moves);
  // The same as RecordCopy from a captured value, broadcast to `to`.
  void RecordConstant(const at::Tensor& to, const at::Tensor& value);
  // Adds a node; returns for each result the storage of its value (in result order).
  std::vector<StorageId> RecordNode(NodeRecord node, std::shared_ptr<const OperatorNode> program);
  // `to` becomes result `value` of a node, which is laid out as `meta`.
  void RecordValue(const at::Tensor& to, StorageId value, const ResultMeta& meta, bool ran);
  at::Tensor NewValueTensor(StorageId value, const ResultMeta& meta);
  // Records that the bytes of `tensors` were asked for: the names behind them are fallbacks.
  // Without `where` the line of the loader is asked for.
  void RecordRefusal(const std::string& op, const std::string& reason,
                     const std::optional<std::string>& where,
                     const std::vector<at::Tensor>& tensors, bool may_concern_all = false);

  // Records that real bytes answered a read of `tensors` (live, unwritten): the trace
  // went on with what they said.
  void RecordAnswered(const std::vector<at::Tensor>& tensors);

  // Notes that the loader read a real tensor that the pass does not know.
  void NoteExternal(const at::Tensor& tensor);
  // Those that are still alive. Called after End.
  std::vector<ExternalTensor> LiveExternals() const;

  // What a message calls `tensor`: "checkpoint tensor `x`", "target `w`", ...
  std::string Describe(const at::Tensor& tensor) const;
  ReadRecord ReadOf(const at::Tensor& tensor) const;
  // What computed the bytes of a storage, without names: "aten::gt.Scalar of checkpoint".
  std::string DescribeOrigin(StorageId storage) const;
  // Whether `tensor` shows trace memory that nothing was written into.
  bool IsUninitialised(const at::Tensor& tensor) const;
  // The value of a tensor all of whose bytes are captured constants (or nobody's,
  // where `allow_uninitialised`); nullopt where a byte is not.
  std::optional<at::Tensor> ConstantValue(const at::Tensor& tensor, bool allow_uninitialised);

  // `op` is about to write `tensor`: if that is real memory and no target, its bytes are kept
  // where it `runs`, until End puts them back. See Note [Mirrors] in backend/mirrors.h. Call it
  // without a lock.
  void NoteWrite(const at::Tensor& tensor, const std::string& op, bool runs);
  // `op` is about to give `tensor` other sizes or other memory; End undoes it as well.
  void NoteReshape(const at::Tensor& tensor, const std::string& op);
  // `op` gives a pointer to the memory of `tensor`: End looks whether it was written through that.
  void NoteExposure(const at::Tensor& tensor, const std::string& op);
  // The pass has made the memory of `tensor`.
  void NoteBirth(const at::Tensor& tensor);
  // After End: what the pass did to tensors that are older than it and no targets, and no plan can
  // repeat; "" where there is nothing.
  const std::string& unplannable() const { return unplannable_; }
  // Real memory that is no target, was written in the pass and is still alive.
  std::vector<Mirror> LiveMirrors() const;
  // An attribute `name` showed the memory before the pass.
  void NameMirror(const c10::StorageImpl* storage, const std::string& name);

  // What has been copied so far, for curious people: `target <- checkpoint tensor`, shapes and
  // dtypes.
  std::vector<std::string> DescribeCopies() const;

  StorageGuards& guards() { return guards_; }
  const RecordLog& log() const { return log_; }
  const TargetSet& targets() const { return *targets_; }
  const std::vector<at::Tensor>& captured() const { return captured_; }
  const std::shared_ptr<const OperatorNode>& program(NodeId node) const {
    return programs_[static_cast<std::size_t>(node)];
  }

 private:
  struct RealStorage {
    StorageId id = -1;                                  // -1: not in the log
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // keeps the address from being reused
    std::vector<std::int32_t> stale_copies;             // records that were not run on the memory
    // Of what is no target: see Mirror.
    bool has_run = false;  // an operator wrote it for real
    at::Tensor before;     // its bytes, where it is older than the pass and has run or is exposed
    std::string exposed;   // the operator that gave a pointer to it
    std::string what;
    std::string name;
    std::string writer;
    std::string traced_writer;
  };

  // A tensor before an operator gave it other sizes or other memory.
  struct Reshaped {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    at::Tensor was;  // shows what it showed
    std::size_t nbytes = 0;
    std::string op;
  };

  StorageId AddStorage(StorageRecord record);
  std::string DescribeStorage(StorageId storage) const;
  // The id of the storage behind `tensor`, registering a real one. Holds the mutex.
  StorageId Register(const at::Tensor& tensor);
  StorageId RegisterWritten(const at::Tensor& tensor);
  void Push(const at::Tensor& to, CopyRecord record, bool ran);
  at::Tensor CopyOf(const c10::Storage& storage);
  void Keep(RealStorage& real, at::Tensor before);
  static void SetWhat(RealStorage& real, const at::Tensor& tensor);
  void DropDead();
  // Whether the pass has made it. Holds the mutex.
  bool IsBorn(const c10::Storage& storage) const;
  void PutBack();
  void PutBackShapes();
  void PutBackBytes();
  // Entered where it is new. Holds the mutex.
  RealStorage& RealOf(const c10::Storage& storage);

  const std::shared_ptr<const TargetSet> targets_;
  c10::Device home_ = c10::Device(c10::kCPU);
  std::atomic<long> num_threads_{0};
  StorageId num_targets_ = 0;
  std::atomic<bool> active_{false};
  mutable std::mutex mutex_;
  RecordLog log_;
  std::vector<std::int32_t> writes_into_;  // copy records per storage
  absl::flat_hash_map<const c10::StorageImpl*, RealStorage> real_;
  absl::flat_hash_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> born_;
  std::size_t drop_born_at_ = 4096;
  absl::flat_hash_map<const c10::TensorImpl*, Reshaped> reshaped_;
  std::string unplannable_;
  std::size_t kept_nbytes_ = 0;  // of RealStorage::before
  std::size_t drop_at_nbytes_ = std::size_t{64} << 20;
  std::vector<at::Tensor> captured_;
  std::vector<std::shared_ptr<const OperatorNode>> programs_;
  std::vector<std::string> source_names_;
  absl::flat_hash_map<const c10::StorageImpl*, ExternalTensor> externals_;
  StorageGuards guards_;
  std::shared_ptr<StandIns> stand_ins_;  // nullptr: the pass does not explore
};

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_TRACE_SESSION_H_
