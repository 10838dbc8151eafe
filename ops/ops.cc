// TORCH_LIBRARY(loadplan): what host processes see. Thin: takes lists apart, calls the layer
// below, and turns Status into an exception. Nothing else raises.
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/call_watch.h"
#include "backend/convert.h"
#include "backend/target_set.h"
#include "backend/tracer.h"
#include "lifecycle/reload_session.h"
#include "loadplan_built_for.h"
#include "ops/encode.h"
#include "ops/file_load_class.h"
#include "ops/raise.h"
#include "ops/shard_classes.h"

namespace loadplan {
namespace {

using Ints = std::vector<std::int64_t>;
using Strings = std::vector<std::string>;
using Tensors = std::vector<at::Tensor>;

std::vector<LiveTarget> LiveTargets(Strings names, Tensors tensors) {
  TORCH_CHECK_VALUE(names.size() == tensors.size(), "as many names as target tensors are needed");
  std::vector<LiveTarget> targets;
  targets.reserve(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    targets.push_back({std::move(names[i]), std::move(tensors[i])});
  }
  return targets;
}

class LoadPlanClass : public torch::CustomClassHolder {
 public:
  explicit LoadPlanClass(std::shared_ptr<const BoundPlan> bound) : bound_(std::move(bound)) {
    for (std::size_t i = 0; i < bound_->targets->storages().size(); ++i) {
      storage_names_.push_back(bound_->targets->NameOf(static_cast<StorageId>(i)));
    }
  }

  const std::shared_ptr<const BoundPlan>& bound() const { return bound_; }
  const LoadPlan& plan() const { return bound_->plan(); }

  Strings names() const {
    Strings names;
    names.reserve(plan().sources().size());
    for (const SourceTensor& source : plan().sources()) names.push_back(source.name);
    return names;
  }
  Ints kinds() const {
    Ints kinds;
    kinds.reserve(plan().entries().size());
    for (const PlanEntry& entry : plan().entries())
      kinds.push_back(static_cast<int64_t>(entry.kind));
    return kinds;
  }
  // reason, nbytes, reads, writes (numbers, targets), names that its programs need.
  std::tuple<std::string, int64_t, Ints, Ints, Strings, Ints> entry(int64_t index) const {
    const std::int32_t entry = Checked(index);
    EncodedWrites writes = EncodeWrites(plan().writes_of(entry), storage_names_);
    return {plan().entries()[static_cast<std::size_t>(entry)].reason,
            plan().ReadNbytes(entry),
            EncodeBoxes(plan().Reads(entry)),
            std::move(writes.numbers),
            std::move(writes.targets),
            InputNames(plan(), entry)};
  }
  std::optional<Ints> boxes(int64_t index) const {
    const auto boxes = plan().GetBoxes(Checked(index));
    if (!boxes.has_value()) return std::nullopt;
    return EncodeBoxes(*boxes);
  }
  std::optional<std::tuple<Ints, Tensors>> dest(int64_t index) const {
    const std::int32_t entry = Checked(index);
    const auto dests = plan().GetDest(entry);
    if (!dests.has_value()) return std::nullopt;
    const DType dtype = plan().sources()[static_cast<std::size_t>(entry)].dtype;
    std::vector<Box> boxes;
    Tensors tensors;
    for (const LoadPlan::Dest& dest : *dests) {
      // Without memory outside an update: only load_planned knows where the bytes go.
      const at::Tensor& storage =
          bound_->targets->storages()[static_cast<std::size_t>(dest.storage)];
      if (storage.is_meta()) return std::nullopt;
      boxes.push_back(dest.box);
      tensors.push_back(bound_->targets->View(dest.storage, dest.region, ToScalarType(dtype)));
    }
    if (!tensors.empty()) bound_->gave_destinations = true;
    return std::make_tuple(EncodeBoxes(boxes), std::move(tensors));
  }
  std::tuple<Strings, Ints, Ints> uncovered() const {
    std::tuple<Strings, Ints, Ints> result;
    for (const UncoveredTarget& item : plan().uncovered()) {
      if (item.nbytes == 0) continue;
      std::get<0>(result).push_back(plan().targets()[static_cast<std::size_t>(item.target)].name);
      std::get<1>(result).push_back(item.nbytes);
      std::get<2>(result).push_back(item.total_nbytes);
    }
    return result;
  }
  // (first, second, bytes) per pair, and the target.
  std::tuple<Ints, Strings> overlaps() const {
    std::tuple<Ints, Strings> result;
    for (const NameOverlap& overlap : plan().overlaps()) {
      for (const int64_t value :
           {int64_t{overlap.first}, int64_t{overlap.second}, overlap.nbytes}) {
        std::get<0>(result).push_back(value);
      }
      std::get<1>(result).push_back(storage_names_[static_cast<std::size_t>(overlap.storage)]);
    }
    return result;
  }
  std::string report() const { return plan().Report(); }
  int64_t num_fallbacks() const {
    return std::ranges::count(plan().entries(), EntryKind::kFallback, &PlanEntry::kind);
  }

 private:
  std::int32_t Checked(int64_t index) const {
    TORCH_CHECK_INDEX(index >= 0 && index < static_cast<int64_t>(plan().entries().size()),
                      "entry ", index, " of a plan with ", plan().entries().size());
    return static_cast<std::int32_t>(index);
  }

  std::shared_ptr<const BoundPlan> bound_;
  Strings storage_names_;
};

class TracerClass : public torch::CustomClassHolder {
 public:
  // `dims` holds the extents of all shapes, one after the other.
  TracerClass(Strings names, const Ints& dims, const Ints& ranks, const Ints& dtypes,
              Strings target_names, Tensors target_tensors) {
    std::vector<SourceMeta> metas(names.size());
    auto dim = dims.begin();
    for (std::size_t i = 0; i < names.size(); ++i) {
      metas[i].name = std::move(names[i]);
      metas[i].shape.assign(dim, dim + ranks[i]);
      metas[i].dtype = static_cast<at::ScalarType>(dtypes[i]);
      dim += ranks[i];
    }
    auto targets = std::make_shared<const TargetSet>(
        Value(TargetSet::Create(LiveTargets(std::move(target_names), std::move(target_tensors)))));
    tracer_ = Value(Tracer::Create(std::move(metas), std::move(targets)));
  }

  void begin_pass() { Raise(tracer_->BeginPass()); }
  // Given away: only what the loader keeps stays alive.
  std::tuple<Ints, Tensors> take_pass_tensors() {
    std::tuple<Ints, Tensors> result;
    for (PassTensor& item : tracer_->TakePass()) {
      std::get<0>(result).push_back(item.source);
      std::get<1>(result).push_back(std::move(item.tensor));
    }
    return result;
  }
  bool has_live_tensors() const { return tracer_->HasLiveTensors(); }
  Ints live_names() const {
    const std::vector<std::int32_t> names = tracer_->LiveNames();
    return Ints(names.begin(), names.end());
  }
  void begin_fallback_pass(const c10::intrusive_ptr<LoadPlanClass>& plan, int64_t round) {
    Raise(tracer_->BeginFallbackPass(plan->bound()->plan(), static_cast<int>(round)));
  }
  int64_t num_rounds() const { return tracer_->num_rounds(); }
  bool wants_exploring() const { return tracer_->WantsExploring(); }
  void begin_exploring() { Raise(tracer_->BeginExploring()); }
  void end_exploring(const std::string& error) { tracer_->EndExploring(error); }
  std::optional<at::Tensor> stand_in(const at::Tensor& tensor, const std::string& op,
                                     const std::string& where) {
    at::Tensor found = tracer_->StandIn(tensor, op, where);
    return found.defined() ? std::make_optional(std::move(found)) : std::nullopt;
  }
  std::optional<at::Tensor> readable_copy(const at::Tensor& tensor) {
    at::Tensor copy = tracer_->ReadableCopy(tensor);
    return copy.defined() ? std::make_optional(std::move(copy)) : std::nullopt;
  }
  bool is_symbolic(const at::Tensor& tensor) const { return tracer_->IsSymbolic(tensor); }
  int64_t num_answers() const { return tracer_->num_answers(); }
  bool decide(const std::string& site) { return tracer_->Decide(site); }
  void end_fallback_pass(const std::string& error) { tracer_->EndFallbackPass(error); }
  void set_current(int64_t source) { tracer_->SetCurrent(static_cast<std::int32_t>(source)); }
  void set_where(std::string where) { tracer_->SetWhere(std::move(where)); }
  void refuse(const at::Tensor& tensor, const std::string& op, const std::string& where) {
    tracer_->Refuse(tensor, op, where);
  }
  void join_thread() { tracer_->JoinThread(); }
  std::tuple<int64_t, std::string> end_pass(const std::string& error) {
    PassVerdict verdict = tracer_->EndPass(error);
    return {verdict.kind, std::move(verdict.message)};
  }
  void abandon_pass() { tracer_->AbandonPass(); }
  Strings copies() const { return tracer_->DescribeCopies(); }
  int64_t num_passes() const { return tracer_->num_passes(); }
  void mark_fallback(int64_t source, const std::string& reason) {
    tracer_->MarkFallback(static_cast<std::int32_t>(source), reason);
  }
  c10::intrusive_ptr<LoadPlanClass> build_plan(int64_t overlaps) {
    auto traced = Value(tracer_->BuildPlan(static_cast<OverlapPolicy>(overlaps)));
    return c10::make_intrusive<LoadPlanClass>(
        std::make_shared<const BoundPlan>(std::move(traced), tracer_->targets()));
  }

 private:
  std::unique_ptr<Tracer> tracer_;
};

// The watched call of `load_weights` in an update with fallbacks.
class CallWatchClass : public torch::CustomClassHolder {
 public:
  // `names` and `tensors` are the targets as they are now: some may be staged. Empty: as planned.
  CallWatchClass(const c10::intrusive_ptr<LoadPlanClass>& plan, Strings names, Tensors tensors)
      : plan_(plan->bound()), targets_(plan_->targets) {
    if (!names.empty()) {
      // In the order of the plan, so that storages have the numbers that they have there.
      std::map<std::string, at::Tensor> now;
      for (LiveTarget& target : LiveTargets(std::move(names), std::move(tensors))) {
        now.emplace(std::move(target.name), std::move(target.tensor));
      }
      std::vector<LiveTarget> targets = plan_->targets->targets();
      for (LiveTarget& target : targets) {
        if (const auto it = now.find(target.name); it != now.end()) target.tensor = it->second;
      }
      targets_ = std::make_shared<const TargetSet>(Value(TargetSet::Create(std::move(targets))));
    }
    watch_ = std::make_shared<CallWatch>(plan_->plan(), targets_);
  }

  void begin() { watch_->Begin(); }
  void join_thread() { watch_->JoinThread(); }
  // Torch may read what it likes, except bytes that the plan writes.
  std::optional<at::Tensor> readable_copy(const at::Tensor& tensor) {
    watch_->Check(tensor, "a read that reaches no operator");
    return std::nullopt;
  }
  // "" or the first violation.
  std::string end() {
    const absl::Status status = watch_->End();
    return std::string(status.message());
  }
  // First names of the targets that the call touched.
  Strings met() const {
    Strings names;
    for (const StorageId storage : watch_->met()) names.push_back(targets_->NameOf(storage));
    return names;
  }

 private:
  std::shared_ptr<const BoundPlan> plan_;
  std::shared_ptr<const TargetSet> targets_;
  std::shared_ptr<CallWatch> watch_;
};

class SessionClass : public torch::CustomClassHolder {
 public:
  using Plan = c10::intrusive_ptr<LoadPlanClass>;

  void start(Strings required) { Raise(session_.Start(std::move(required))); }
  bool has_plan(const Plan& plan) const { return session_.HasPlan(plan->bound().get()); }
  bool has_any_plan() const { return session_.HasPlan(nullptr); }
  void begin(const Plan& plan, Strings names, Tensors tensors) {
    Raise(session_.Begin(plan->bound(), LiveTargets(std::move(names), std::move(tensors))));
  }
  void deliver(const std::string& name, const at::Tensor& tensor) {
    Raise(session_.Deliver(name, tensor));
  }
  void deliver_all(const Strings& names, const Tensors& tensors) {
    TORCH_CHECK_VALUE(names.size() == tensors.size(), "as many names as tensors are needed");
    Raise(session_.Deliver(names, tensors));
  }
  void report_delivered(const std::string& name) { Raise(session_.ReportDelivered(name)); }
  bool eager_ready() const { return session_.EagerReady(); }
  bool needs_eager_call() const { return session_.NeedsEagerCall(); }
  std::tuple<Strings, Tensors> take_eager_call() {
    std::tuple<Strings, Tensors> call;
    for (auto& [name, tensor] : session_.TakeEagerCall()) {
      std::get<0>(call).push_back(std::move(name));
      std::get<1>(call).push_back(std::move(tensor));
    }
    return call;
  }
  void eager_done(const std::string& error, Strings names, Tensors tensors) {
    Raise(session_.EagerDone(error, LiveTargets(std::move(names), std::move(tensors))));
  }
  // `layers` and `devices` (as texts) and `initials` are parallel to `names`; an initial value
  // without elements is unknown. `max_nbytes` < 0: no bound.
  void set_staging(Strings names, const Ints& layers, const Strings& devices, Tensors initials,
                   const Ints& deferred, bool defer_processing, int64_t max_nbytes) {
    StagingSpec spec;
    for (std::size_t i = 0; i < names.size(); ++i) {
      spec.targets.push_back({std::move(names[i]), static_cast<std::int32_t>(layers[i]),
                              at::Device(devices[i]),
                              initials[i].numel() == 0 ? at::Tensor() : std::move(initials[i])});
    }
    spec.deferred_layers.assign(deferred.begin(), deferred.end());
    spec.defer_processing = defer_processing;
    if (max_nbytes >= 0) spec.max_nbytes = max_nbytes;
    Raise(session_.SetStaging(std::move(spec)));
  }
  using Ready = std::tuple<int64_t, Ints, Strings, Tensors>;  // group (-1: none), layers, tensors
  Ready take_ready_layers(bool finishing) {
    auto ready = Value(session_.TakeReadyLayers(finishing));
    return ready.has_value() ? Encode(*std::move(ready)) : Ready{-1, {}, {}, {}};
  }
  void layers_done(int64_t group) { Raise(session_.LayersDone(static_cast<std::int32_t>(group))); }
  void layers_overwrite() { Raise(session_.LayersOverwrite()); }
  std::vector<Ready> open_layers_for_call() {
    std::vector<Ready> layers;
    for (ReadyLayers& item : Value(session_.OpenLayersForCall())) {
      layers.push_back(Encode(std::move(item)));
    }
    return layers;
  }
  void layers_called(const Strings& met) { session_.LayersCalled(met); }
  void fail(const std::string& message) {
    Raise(session_.FailWith(absl::FailedPreconditionError(message)));
  }
  void prepare_finish(const std::optional<Strings>& partial, Strings names, Tensors tensors) {
    Raise(session_.PrepareFinish(partial, LiveTargets(std::move(names), std::move(tensors))));
  }
  std::tuple<Strings, int64_t, double, int64_t, int64_t> finish() {
    Receipt receipt = Value(session_.Finish());
    return {std::move(receipt.names), receipt.nbytes, receipt.seconds, receipt.peak_staging_nbytes,
            receipt.peak_held_nbytes};
  }
  void abort() { Raise(session_.Abort()); }
  // The load keeps the session.
  c10::intrusive_ptr<FileLoadClass> load_files(const Plan& plan, const Strings& paths,
                                               const Ints& options) {
    auto load = Value(FileLoad::Start(session_, plan->bound(), paths, DecodeOptions(options)));
    return c10::make_intrusive<FileLoadClass>(c10::intrusive_ptr<SessionClass>::reclaim_copy(this),
                                              std::move(load));
  }
  void load_bucket(const at::Tensor& buffer, Strings names, const Ints& dims, const Ints& ranks,
                   const Ints& dtypes, const Ints& offsets) {
    Raise(DeliverBucket(session_, buffer,
                        DecodeBucket(std::move(names), dims, ranks, dtypes, offsets)));
  }
  void load_shards(const Plan& plan, const c10::intrusive_ptr<ShardSetClass>& shards) {
    Raise(LoadShards(plan->plan(), *shards->shards(), session_));
  }
  ReloadSession& session() { return session_; }
  std::tuple<std::string, double, Strings, Strings, std::string> report() const {
    SessionReport report = session_.report();
    return {std::string(ToString(report.state)), report.since, std::move(report.landed),
            std::move(report.undefined), std::move(report.error)};
  }

 private:
  static Ready Encode(ReadyLayers item) {
    Ready ready{item.group, Ints(item.layers.begin(), item.layers.end()), {}, {}};
    for (LiveTarget& target : item.tensors) {
      std::get<2>(ready).push_back(std::move(target.name));
      std::get<3>(ready).push_back(std::move(target.tensor));
    }
    return ready;
  }

  ReloadSession session_;
};

void DefineClasses(torch::Library& library) {
  library.class_<LoadPlanClass>("LoadPlan")
      .def("names", &LoadPlanClass::names)
      .def("kinds", &LoadPlanClass::kinds)
      .def("entry", &LoadPlanClass::entry)
      .def("boxes", &LoadPlanClass::boxes)
      .def("dest", &LoadPlanClass::dest)
      .def("uncovered", &LoadPlanClass::uncovered)
      .def("overlaps", &LoadPlanClass::overlaps)
      .def("report", &LoadPlanClass::report)
      .def("num_fallbacks", &LoadPlanClass::num_fallbacks);
  library.class_<TracerClass>("Tracer")
      .def(torch::init<Strings, Ints, Ints, Ints, Strings, Tensors>())
      .def("begin_pass", &TracerClass::begin_pass)
      .def("take_pass_tensors", &TracerClass::take_pass_tensors)
      .def("has_live_tensors", &TracerClass::has_live_tensors)
      .def("live_names", &TracerClass::live_names)
      .def("begin_fallback_pass", &TracerClass::begin_fallback_pass)
      .def("end_fallback_pass", &TracerClass::end_fallback_pass)
      .def("num_rounds", &TracerClass::num_rounds)
      .def("wants_exploring", &TracerClass::wants_exploring)
      .def("begin_exploring", &TracerClass::begin_exploring)
      .def("end_exploring", &TracerClass::end_exploring)
      .def("readable_copy", &TracerClass::readable_copy)
      .def("is_symbolic", &TracerClass::is_symbolic)
      .def("stand_in", &TracerClass::stand_in)
      .def("num_answers", &TracerClass::num_answers)
      .def("decide", &TracerClass::decide)
      .def("set_current", &TracerClass::set_current)
      .def("set_where", &TracerClass::set_where)
      .def("refuse", &TracerClass::refuse)
      .def("join_thread", &TracerClass::join_thread)
      .def("end_pass", &TracerClass::end_pass)
      .def("abandon_pass", &TracerClass::abandon_pass)
      .def("copies", &TracerClass::copies)
      .def("num_passes", &TracerClass::num_passes)
      .def("mark_fallback", &TracerClass::mark_fallback)
      .def("build_plan", &TracerClass::build_plan);
  library.class_<CallWatchClass>("CallWatch")
      .def(torch::init<c10::intrusive_ptr<LoadPlanClass>, Strings, Tensors>())
      .def("begin", &CallWatchClass::begin)
      .def("join_thread", &CallWatchClass::join_thread)
      .def("readable_copy", &CallWatchClass::readable_copy)
      .def("end", &CallWatchClass::end)
      .def("met", &CallWatchClass::met);
  library.class_<FileLoadClass>("FileLoad")
      .def("step", &FileLoadClass::step)
      .def("cancel", &FileLoadClass::cancel)
      .def("stats", &FileLoadClass::stats);
  DefineShardSet(library);
  library.class_<SessionClass>("ReloadSession")
      .def(torch::init<>())
      .def("start", &SessionClass::start)
      .def("has_plan", &SessionClass::has_plan)
      .def("has_any_plan", &SessionClass::has_any_plan)
      .def("begin", &SessionClass::begin)
      .def("deliver", &SessionClass::deliver)
      .def("deliver_all", &SessionClass::deliver_all)
      .def("report_delivered", &SessionClass::report_delivered)
      .def("eager_ready", &SessionClass::eager_ready)
      .def("needs_eager_call", &SessionClass::needs_eager_call)
      .def("take_eager_call", &SessionClass::take_eager_call)
      .def("eager_done", &SessionClass::eager_done)
      .def("set_staging", &SessionClass::set_staging)
      .def("take_ready_layers", &SessionClass::take_ready_layers)
      .def("layers_done", &SessionClass::layers_done)
      .def("layers_overwrite", &SessionClass::layers_overwrite)
      .def("open_layers_for_call", &SessionClass::open_layers_for_call)
      .def("layers_called", &SessionClass::layers_called)
      .def("fail", &SessionClass::fail)
      .def("prepare_finish", &SessionClass::prepare_finish)
      .def("finish", &SessionClass::finish)
      .def("abort", &SessionClass::abort)
      .def("load_files", &SessionClass::load_files)
      .def("load_bucket", &SessionClass::load_bucket)
      .def("load_shards", &SessionClass::load_shards)
      .def("report", &SessionClass::report);
}

// Not the TORCH_LIBRARY macro: a second copy of the library in one process must stay silent.
struct Register {
  std::optional<torch::Library> library;

  Register() {
    if (c10::Dispatcher::singleton().findSchema({"loadplan::version", ""}).has_value()) return;
    library.emplace(torch::Library::DEF, "loadplan", std::nullopt, __FILE__, __LINE__);
    library->def("version() -> str", [] { return std::string(kVersion); });
    library->def("built_for_torch() -> str", [] { return std::string(kBuiltForTorch); });
    // The host language's dtype as the number that every list here uses.
    library->def("dtype_code(int dtype) -> int", [](int64_t dtype) { return dtype; });
    library->def("read_metadata(str[] paths) -> (str[], int[], int[], int[])", ReadMetadata);
    DefineClasses(*library);
    DefineShardExchange<LoadPlanClass, SessionClass>(*library);
  }
};
const Register registered;

}  // namespace
}  // namespace loadplan
