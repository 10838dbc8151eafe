// Tracer: runs the passes of a trace and turns the last one into a plan.
//
// The caller owns the loop, because loaders are Python (or C++) functions:
//
//   auto tracer = Tracer::Create(metas, targets).value();
//   for (;;) {
//     tracer->BeginPass();                      // tracing is on in this thread
//     std::string error;                        // "" unless the loader raised
//     try { load_weights(names and tensors of tracer->pass()); } catch (...) { ... }
//     auto verdict = tracer->EndPass(error);    // tracing is off again
//     if (verdict.kind == PassVerdict::kDone) break;
//     if (verdict.kind == PassVerdict::kRefuse) return verdict.message;
//   }                                           // kRepeat: once more without some names
//   while (tracer->WantsExploring()) {          // only where names were left out
//     tracer->BeginExploring();                 // as above, with all names
//     ...
//     if (tracer->EndExploring(error)) ...      // begin anew
//   }
//   auto plan = tracer->BuildPlan(OverlapPolicy::kFallback);
#ifndef LOADPLAN_BACKEND_TRACER_H_
#define LOADPLAN_BACKEND_TRACER_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "backend/target_set.h"
#include "backend/traced_plan.h"
#include "geometry/export.h"

namespace loadplan {

class TraceSession;

// A checkpoint tensor as declared (`ParamMeta` in Python).
struct SourceMeta {
  std::string name;
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::ScalarType::Float;
  // Where it will be when an eager call gets it; without: on the device of the first target.
  std::optional<at::Device> device;
};

// What a pass gives the loader: names by index into the metas, each with a trace tensor.
struct PassTensor {
  int32_t source = -1;
  at::Tensor tensor;
};

struct PassVerdict {
  enum Kind { kDone, kRepeat, kRefuse };
  Kind kind = kDone;
  std::string message;  // kRefuse: the error, with the current name and the loader's own words
};

class LOADPLAN_API Tracer {
 public:
  // InvalidArgument: a name declared twice, a negative extent, a dtype without a size.
  static absl::StatusOr<std::unique_ptr<Tracer>> Create(std::vector<SourceMeta> metas,
                                                        std::shared_ptr<const TargetSet> targets);
  ~Tracer();

  // Starts a pass on the calling thread. FailedPrecondition: a pass is active in
  // this thread or over one of the target storages (names it), or another backend
  // owns the PrivateUse1 slot.
  absl::Status BeginPass();
  // The tensors of the current pass, in declared order, without the names that earlier passes gave
  // up.
  const std::vector<PassTensor>& pass() const;
  // The same, given away, so that only what the loader keeps stays alive.
  std::vector<PassTensor> TakePass();
  // After a pass: whether a trace tensor of it is still alive.
  bool HasLiveTensors() const;
  // Names whose storage is still alive, ascending.
  std::vector<int32_t> LiveNames() const;
  // Tells which name the loader was given last; for error messages only.
  void SetCurrent(int32_t source);
  // Records that `op` needed the value of a trace tensor (for reads that torch
  // refuses before any kernel of ours: `numpy()`), or that it is put where it stays (`m.x = ...`).
  void Refuse(const at::Tensor& tensor, const std::string& op, const std::string& where);
  // For reads that reach no operator (`numpy`, `tolist`): what the loader reads in `tensor`, on
  // the CPU, noted as what steers the trace. Undefined where torch can read `tensor` itself, or
  // where nobody can.
  at::Tensor ReadableCopy(const at::Tensor& tensor);
  // Whether the memory of `tensor` does not hold what the loader would read there.
  bool IsSymbolic(const at::Tensor& tensor) const;
  // Storages of real tensors that are no targets, were written in the current pass and are still
  // alive. NameMirror: an attribute showed one of them before the pass. See Note [Mirrors] in
  // backend/mirrors.h.
  std::vector<const c10::StorageImpl*> Mirrors() const;
  void NameMirror(const c10::StorageImpl* mirror, const std::string& name);
  // `op` gives the loader a pointer to `tensor`: a write through it is put back and noticed when
  // the pass ends, where `tensor` is no target.
  void NoteExposure(const at::Tensor& tensor, const std::string& op);
  // `op` gives `tensor` other memory, which is undone when the pass ends.
  void NoteReshape(const at::Tensor& tensor, const std::string& op);
  // The pass has made the memory of `tensor`, by other means than operators.
  void NoteBirth(const at::Tensor& tensor);
  // Lets another thread take part in the pass, until the pass ends.
  void JoinThread();
  // Ends the pass; `error` is what the loader raised, "" if it returned.
  PassVerdict EndPass(const std::string& error);
  // Ends the pass without a verdict (a context manager that repeats nothing).
  void AbandonPass();

  // One line for each copy of the current pass, or of the last one: `target `p` <- `w` [4, 4]
  // float32`.
  std::vector<std::string> DescribeCopies() const;
  int num_passes() const;

  // Whether the loader has to be run (once more) with all names, as some were left out of the
  // last pass. Reads of values get made-up answers. See Note [Exploring] in plan/pass_writes.h.
  // EndExploring takes the place of EndPass. True: the loader writes more than was known, and
  // everything begins anew with BeginPass.
  bool WantsExploring() const;
  absl::Status BeginExploring();
  bool EndExploring(const std::string& error);
  // In a pass that explores: a real tensor to read instead of `tensor`, whose names become
  // fallbacks; undefined in any other pass.
  at::Tensor StandIn(const at::Tensor& tensor, const std::string& op, const std::string& where);
  // How many reads of values were answered so far, and what a decision at `site` that depends on
  // one comes to.
  int64_t num_answers() const;
  bool Decide(const std::string& site);

  // Starts a pass in which the loader gets only the fallback names of `plan`, maybe none: what it
  // does then is what the fallback call of an update does beside the plan. To be called for
  // each `round` of exploring. EndFallbackPass takes the place of EndPass. See Note
  // [Fallback calls] in plan/fallback.h.
  int num_rounds() const;
  absl::Status BeginFallbackPass(const LoadPlan& plan, int round);
  void EndFallbackPass(const std::string& error);

  // Gives a name up, or kEveryName; one of the current pass is left out of the next one.
  static constexpr int32_t kEveryName = -1;
  void MarkFallback(int32_t source, const std::string& reason);
  // For a pass that `error` ended and EndPass would not repeat: whether the loader may only lack
  // names that were left out. Then all names are fallbacks, which go through one call of it.
  bool FallBackAsAWhole(const std::string& error);

  // The plan of the last pass; names that it refused are fallbacks. Errors as BuildLoadPlan.
  absl::StatusOr<std::shared_ptr<const TracedPlan>> BuildPlan(OverlapPolicy overlaps);

  const std::vector<SourceMeta>& metas() const;
  // Of the plan: those declared, then its mirrors.
  const std::shared_ptr<const TargetSet>& targets() const;

 private:
  Tracer();
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_TRACER_H_
