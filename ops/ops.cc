// TORCH_LIBRARY(loadplan): what host processes see. Thin: takes lists apart, calls the layer
// below, and turns Status into an exception. Nothing else raises.
#include <ATen/ops/empty.h>
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
#include "backend/target_set.h"
#include "backend/trace_tensor.h"
#include "backend/tracer.h"
#include "lifecycle/copy_device.h"
#include "lifecycle/reload_session.h"
#include "loadplan_built_for.h"
#include "ops/arguments.h"
#include "ops/encode.h"
#include "ops/file_load_class.h"
#include "ops/peers_class.h"
#include "ops/plan_class.h"
#include "ops/plan_file_class.h"
#include "ops/shard_classes.h"

namespace loadplan {
namespace {

class TracerClass : public torch::CustomClassHolder {
 public:
  // `dims` holds the extents of all shapes, one after the other; a device may be "".
  TracerClass(Strings names, const Ints& dims, const Ints& ranks, const Ints& dtypes,
              const Strings& devices, Strings target_names, Tensors target_tensors) {
    std::vector<SourceMeta> metas(names.size());
    auto dim = dims.begin();
    for (std::size_t i = 0; i < names.size(); ++i) {
      metas[i].name = std::move(names[i]);
      metas[i].shape.assign(dim, dim + ranks[i]);
      metas[i].dtype = static_cast<at::ScalarType>(dtypes[i]);
      dim += ranks[i];
      if (!devices[i].empty()) metas[i].device = at::Device(devices[i]);
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
  bool end_exploring(const std::string& error) { return tracer_->EndExploring(error); }
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
  // Storages as Python knows them (`_cdata`).
  Ints mirrors() const {
    Ints storages;
    for (const c10::StorageImpl* const storage : tracer_->Mirrors())
      storages.push_back(static_cast<int64_t>(reinterpret_cast<std::intptr_t>(storage)));
    return storages;
  }
  void name_mirror(int64_t storage, const std::string& name) {
    tracer_->NameMirror(reinterpret_cast<const c10::StorageImpl*>(storage), name);
  }
  void note_exposure(const at::Tensor& tensor, const std::string& op) {
    tracer_->NoteExposure(tensor, op);
  }
  void note_reshape(const at::Tensor& tensor, const std::string& op) {
    tracer_->NoteReshape(tensor, op);
  }
  void note_birth(const at::Tensor& tensor) { tracer_->NoteBirth(tensor); }
  int64_t num_answers() const { return tracer_->num_answers(); }
  bool decide(const std::string& site) { return tracer_->Decide(site); }
  void end_fallback_pass(const std::string& error) { tracer_->EndFallbackPass(error); }
  void set_current(int64_t source) { tracer_->SetCurrent(static_cast<std::int32_t>(source)); }
  at::Device claimed_device(const at::Tensor& tensor) const { return ClaimedDevice(tensor); }
  bool fall_back_as_a_whole(const std::string& error) { return tracer_->FallBackAsAWhole(error); }
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
    watch_->Check(tensor, "a read that reaches no operator", /*written=*/false);
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
  const std::shared_ptr<CallWatch>& watch() const { return watch_; }

 private:
  std::shared_ptr<const BoundPlan> plan_;
  std::shared_ptr<const TargetSet> targets_;
  std::shared_ptr<CallWatch> watch_;
};

// (names, (written, total) of each, its ranges: count, then start and stop of each).
std::tuple<Strings, Ints, Ints> Encode(const std::vector<TargetBytes>& targets) {
  std::tuple<Strings, Ints, Ints> result;
  auto& [names, nbytes, ranges] = result;
  for (const TargetBytes& target : targets) {
    names.push_back(target.name);
    nbytes.insert(nbytes.end(), {target.nbytes, target.total_nbytes});
    ranges.push_back(static_cast<int64_t>(target.ranges.size()));
    for (const ByteRange& range : target.ranges) {
      ranges.insert(ranges.end(), {range.start, range.stop});
    }
  }
  return result;
}

at::Tensor Encode(const std::vector<std::int32_t>& positions) {
  at::Tensor encoded = at::empty({static_cast<int64_t>(positions.size())}, at::kInt);
  std::ranges::copy(positions, encoded.mutable_data_ptr<std::int32_t>());
  return encoded;
}

class SessionClass : public torch::CustomClassHolder {
 public:
  using Plan = c10::intrusive_ptr<LoadPlanClass>;
  using Watch = c10::intrusive_ptr<CallWatchClass>;

  void start(Strings required, bool atomic, int64_t memory_nbytes, std::string directory,
             const std::vector<Plan>& destinations) {
    StartOptions options{std::move(required), atomic, {memory_nbytes, std::move(directory)}, {}};
    for (const Plan& plan : destinations) options.destinations.push_back(plan->bound());
    Raise(session_.Start(std::move(options)));
  }
  bool has_any_plan() const { return session_.HasPlan(nullptr); }
  void begin(const Plan& plan, Strings names, Tensors tensors) {
    Raise(session_.Begin(plan->bound(), LiveTargets(std::move(names), std::move(tensors))));
  }
  void check_plan() const { Raise(session_.CheckEvent(SessionEvent::kPlan)); }
  void deliver(const std::string& name, const at::Tensor& tensor) {
    Raise(session_.Deliver(name, tensor));
  }
  void deliver_fallbacks(const Strings& names, const Tensors& tensors) {
    TORCH_CHECK_VALUE(names.size() == tensors.size(), "as many names as tensors are needed");
    Raise(session_.DeliverFallbacks(names, tensors));
  }
  void deliver_planned(const Strings& names, const Tensors& tensors) {
    TORCH_CHECK_VALUE(names.size() == tensors.size(), "as many names as tensors are needed");
    Raise(session_.DeliverPlanned(names, tensors));
  }
  // Names by their positions in the plan: a model's 70,000 strings take longer than their bytes.
  void deliver_positions(const at::Tensor& positions, const Tensors& tensors) {
    TORCH_CHECK_VALUE(positions.numel() == static_cast<int64_t>(tensors.size()),
                      "as many names as tensors are needed");
    const std::span<const int64_t> entries(positions.const_data_ptr<int64_t>(), tensors.size());
    Raise(session_.DeliverPlanned(entries, tensors));
  }
  void report_delivered(const std::string& name) { Raise(session_.ReportDelivered(name)); }
  void hand_out(const Plan& plan) { Raise(session_.HandOut(plan->bound())); }
  bool fallback_call_ready() const { return session_.FallbackCallReady(); }
  bool needs_fallback_call() const { return session_.NeedsFallbackCall(); }
  // Gives the call that `watch` will watch.
  std::tuple<Strings, Tensors> take_fallback_call(const Watch& watch) {
    watch->watch()->KeepOthers(
        [this](const at::Tensor& tensor) { return session_.KeepOther(tensor); });
    std::tuple<Strings, Tensors> call;
    for (auto& [name, tensor] : Value(session_.TakeFallbackCall())) {
      std::get<0>(call).push_back(std::move(name));
      std::get<1>(call).push_back(std::move(tensor));
    }
    return call;
  }
  void fallback_call_done(const std::string& error, const Watch& watch, Strings names,
                          Tensors tensors) {
    Raise(session_.FallbackCallDone(error, watch->watch()->TakeWritten(),
                                    LiveTargets(std::move(names), std::move(tensors))));
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
    return ready.has_value() ? EncodeReady(*std::move(ready)) : Ready{-1, {}, {}, {}};
  }
  void layers_done(int64_t group) { Raise(session_.LayersDone(static_cast<std::int32_t>(group))); }
  void layers_overwrite(Strings names, Tensors tensors) {
    Raise(session_.LayersOverwrite(LiveTargets(std::move(names), std::move(tensors))));
  }
  // Names, and how many bytes of each were zeroed.
  std::tuple<Strings, Ints> zeroed_bytes() const {
    std::tuple<Strings, Ints> zeroed;
    for (const TargetBytes& target : session_.ZeroedBytes()) {
      std::get<0>(zeroed).push_back(target.name);
      std::get<1>(zeroed).push_back(target.total_nbytes - target.nbytes);
    }
    return zeroed;
  }
  std::vector<Ready> open_layers_for_call() {
    std::vector<Ready> layers;
    for (ReadyLayers& item : Value(session_.OpenLayersForCall())) {
      layers.push_back(EncodeReady(std::move(item)));
    }
    return layers;
  }
  void layers_called(const Strings& met) { session_.LayersCalled(met); }
  void fail(const std::string& message) {
    Raise(session_.FailWith(absl::FailedPreconditionError(message)));
  }
  void before_hook(Strings names, Tensors tensors) {
    Raise(session_.BeforeHook(LiveTargets(std::move(names), std::move(tensors))));
  }
  void hook_failed(const std::string& error, Strings names, Tensors tensors,
                   const std::optional<Plan>& known) {
    Raise(session_.HookFailed(error, LiveTargets(std::move(names), std::move(tensors)),
                              known.has_value() ? (*known)->bound() : nullptr));
  }
  void left_in_load_format(Strings names, Tensors tensors) {
    session_.LeftInLoadFormat(LiveTargets(std::move(names), std::move(tensors)));
  }
  bool may_have_written() const { return session_.MayHaveWritten(); }
  void prepare_finish(const std::optional<Strings>& partial, Strings names, Tensors tensors) {
    Raise(session_.PrepareFinish(partial, LiveTargets(std::move(names), std::move(tensors))));
  }
  void complete() { Raise(session_.Complete()); }
  // Positions of names, bytes, seconds, coverage, peaks of staged and of held bytes.
  std::tuple<at::Tensor, int64_t, double, Strings, Ints, int64_t, int64_t> finish() {
    Receipt receipt = Value(session_.Finish());
    auto [targets, nbytes, ranges] = Encode(receipt.coverage);
    return {Encode(receipt.entries), receipt.nbytes,    receipt.seconds,
            std::move(targets),      std::move(nbytes), receipt.peak_staging_nbytes,
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
  void load_shards(const Plan& plan, const c10::intrusive_ptr<ShardSetClass>& shards,
                   bool must_hold) {
    Raise(LoadShards(plan->plan(), *shards->shards(), session_, must_hold));
  }
  ReloadSession& session() { return session_; }
  std::string state() const { return std::string(ToString(session_.report().state)); }
  // State, since, error, landed, undefined.
  std::tuple<std::string, double, std::string, Strings, Strings, Ints, Ints> report() const {
    SessionReport report = session_.report();
    auto [names, nbytes, ranges] = Encode(report.undefined);
    return {std::string(ToString(report.state)),
            report.since,
            std::move(report.error),
            std::move(report.landed),
            std::move(names),
            std::move(nbytes),
            std::move(ranges)};
  }

 private:
  static Ready EncodeReady(ReadyLayers item) {
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
      .def("entries", &LoadPlanClass::entries)
      .def("entry_digests", &LoadPlanClass::entry_digests)
      .def("boxes", &LoadPlanClass::boxes)
      .def("dest", &LoadPlanClass::dest)
      .def("uncovered", &LoadPlanClass::uncovered)
      .def("mirrors", &LoadPlanClass::mirrors)
      .def("overlaps", &LoadPlanClass::overlaps)
      .def("report", &LoadPlanClass::report)
      .def("num_fallbacks", &LoadPlanClass::num_fallbacks)
      .def("landings", &LoadPlanClass::landings)
      .def("metas", &LoadPlanClass::metas)
      .def("targets", &LoadPlanClass::targets)
      .def("save", &LoadPlanClass::save);
  library.class_<PlanFileClass>("PlanFile")
      .def(torch::init<const std::string&>())
      .def("about", &PlanFileClass::about)
      .def("digest", &PlanFileClass::digest)
      .def("plan", &PlanFileClass::plan)
      .def("bind", &PlanFileClass::bind);
  library.class_<TracerClass>("Tracer")
      .def(torch::init<Strings, Ints, Ints, Ints, Strings, Strings, Tensors>())
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
      .def("mirrors", &TracerClass::mirrors)
      .def("name_mirror", &TracerClass::name_mirror)
      .def("note_exposure", &TracerClass::note_exposure)
      .def("note_reshape", &TracerClass::note_reshape)
      .def("note_birth", &TracerClass::note_birth)
      .def("stand_in", &TracerClass::stand_in)
      .def("num_answers", &TracerClass::num_answers)
      .def("decide", &TracerClass::decide)
      .def("set_current", &TracerClass::set_current)
      .def("claimed_device", &TracerClass::claimed_device)
      .def("fall_back_as_a_whole", &TracerClass::fall_back_as_a_whole)
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
  DefineFileLoad(library);
  DefineShardSet(library);
  library.class_<SessionClass>("ReloadSession")
      .def(torch::init<>())
      .def("start", &SessionClass::start)
      .def("has_any_plan", &SessionClass::has_any_plan)
      .def("begin", &SessionClass::begin)
      .def("check_plan", &SessionClass::check_plan)
      .def("deliver", &SessionClass::deliver)
      .def("deliver_fallbacks", &SessionClass::deliver_fallbacks)
      .def("deliver_planned", &SessionClass::deliver_planned)
      .def("deliver_positions", &SessionClass::deliver_positions)
      .def("report_delivered", &SessionClass::report_delivered)
      .def("set_staging", &SessionClass::set_staging)
      .def("take_ready_layers", &SessionClass::take_ready_layers)
      .def("layers_done", &SessionClass::layers_done)
      .def("layers_overwrite", &SessionClass::layers_overwrite)
      .def("zeroed_bytes", &SessionClass::zeroed_bytes)
      .def("open_layers_for_call", &SessionClass::open_layers_for_call)
      .def("layers_called", &SessionClass::layers_called)
      .def("fail", &SessionClass::fail)
      .def("hand_out", &SessionClass::hand_out)
      .def("fallback_call_ready", &SessionClass::fallback_call_ready)
      .def("needs_fallback_call", &SessionClass::needs_fallback_call)
      .def("take_fallback_call", &SessionClass::take_fallback_call)
      .def("fallback_call_done", &SessionClass::fallback_call_done)
      .def("before_hook", &SessionClass::before_hook)
      .def("hook_failed", &SessionClass::hook_failed)
      .def("left_in_load_format", &SessionClass::left_in_load_format)
      .def("may_have_written", &SessionClass::may_have_written)
      .def("prepare_finish", &SessionClass::prepare_finish)
      .def("complete", &SessionClass::complete)
      .def("finish", &SessionClass::finish)
      .def("abort", &SessionClass::abort)
      .def("state", &SessionClass::state)
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
    // For the host language to implement. See backend/loader_line.h.
    library->def("loader_line() -> str");
    // See backend/inner_tensors.h.
    library->def("inner_tensors(Tensor wrapper) -> Tensor[]");
    // The host language's dtype as the number that every list here uses.
    library->def("dtype_code(int dtype) -> int", [](int64_t dtype) { return dtype; });
    // "" where batches on CUDA devices can be had, else why they cannot.
    library->def("why_no_cuda_batches() -> str",
                 [] { return std::string(CudaCopyEngine().status().message()); });
    library->def("read_metadata(str[] paths) -> (str[], int[], int[], int[])", ReadMetadata);
    DefineClasses(*library);
    DefineShardExchange<LoadPlanClass, SessionClass>(*library);
    DefinePeers(*library);
  }
};
const Register registered;

}  // namespace
}  // namespace loadplan
