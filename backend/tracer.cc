#include "backend/tracer.h"

#include <c10/core/ScalarType.h>

#include <cctype>
#include <chrono>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "backend/convert.h"
#include "backend/trace_session.h"
#include "backend/trace_tensor.h"
#include "plan/load_plan_builder.h"
#include "plan/resolve.h"

namespace loadplan {
namespace {

// `experts.12.w2.scale` -> `experts.#.w2.scale`: names that fail for the same reason.
std::string PatternOf(const std::string& name) {
  std::string pattern;
  for (const char c : name) {
    const bool digit = std::isdigit(static_cast<unsigned char>(c)) != 0;
    if (digit && !pattern.empty() && pattern.back() == '#') continue;
    pattern.push_back(digit ? '#' : c);
  }
  return pattern;
}

using Clock = std::chrono::steady_clock;
double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Names of one pattern that may fail one by one; after that the pattern is given up whole.
constexpr int kFailuresOfOnePattern = 2;

}  // namespace

struct Tracer::State {
  std::vector<SourceMeta> metas;
  std::shared_ptr<const TargetSet> targets;
  std::shared_ptr<TraceSession> session;       // of the current pass
  std::shared_ptr<TraceSession> last_session;  // of the last pass that ended
  std::vector<PassTensor> pass;
  std::vector<StorageId> source_storages;  // per meta, in last_session; -1: not in that pass
  absl::flat_hash_map<std::int32_t, std::string> fallbacks;
  absl::flat_hash_map<std::string, int> failures;  // per pattern
  std::int32_t current = -1;
  int num_passes = 0;
  Clock::time_point pass_began;
  double trace_seconds = 0;  // of all passes

  bool GiveUp(std::int32_t source, const std::string& reason);
  bool GiveUpRefused();
};

// Whether the name was not given up before.
bool Tracer::State::GiveUp(std::int32_t source, const std::string& reason) {
  if (!fallbacks.emplace(source, reason).second) return false;
  const std::string pattern = PatternOf(metas[static_cast<std::size_t>(source)].name);
  if (++failures[pattern] < kFailuresOfOnePattern) return true;
  for (std::size_t i = 0; i < metas.size(); ++i) {
    if (PatternOf(metas[i].name) != pattern) continue;
    fallbacks.emplace(static_cast<std::int32_t>(i), reason);
  }
  return true;
}

// Gives up every name behind a refusal of the last pass; whether there was a new one.
bool Tracer::State::GiveUpRefused() {
  const RecordLog& log = last_session->log();
  bool found = false;
  const SymbolicMemory memory(log);
  const auto give_up = [&](const ReadRecord& read, Index time, const std::string& reason) {
    if (read.storage < 0) return;
    for (const std::int32_t name : memory.NamesBehind(read.storage, read.layout.Span(), time))
      found |= GiveUp(name, reason);
  };
  for (const RefusalRecord& refusal : log.refusals) {
    const std::string reason = refusal.where.empty()
                                   ? refusal.reason
                                   : absl::StrCat(refusal.reason, " at ", refusal.where);
    for (const ReadRecord& read : refusal.inputs) give_up(read, refusal.time, reason);
  }
  for (const ReadRecord& mirror : last_session->LiveMirrors()) {
    give_up(mirror, static_cast<Index>(log.copies.size()),
            "is copied into a tensor that is no target and outlives load_weights");
  }
  return found;
}

Tracer::Tracer() : state_(std::make_unique<State>()) {}
Tracer::~Tracer() {
  if (state_->session != nullptr) state_->session->End();
}

absl::StatusOr<std::unique_ptr<Tracer>> Tracer::Create(std::vector<SourceMeta> metas,
                                                       std::shared_ptr<const TargetSet> targets) {
  absl::flat_hash_set<std::string_view> names;
  for (const SourceMeta& meta : metas) {
    if (!names.insert(meta.name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("checkpoint tensor `", meta.name, "` is declared twice"));
    }
    for (const int64_t extent : meta.shape) {
      if (extent < 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("checkpoint tensor `", meta.name, "` has the negative extent ", extent));
      }
    }
    if (meta.dtype == at::ScalarType::Undefined || c10::isQIntType(meta.dtype)) {
      return absl::InvalidArgumentError(absl::StrCat("checkpoint tensor `", meta.name,
                                                     "` has dtype ", c10::toString(meta.dtype),
                                                     ", which holds no plain items"));
    }
  }
  std::unique_ptr<Tracer> tracer(new Tracer());
  tracer->state_->metas = std::move(metas);
  tracer->state_->targets = std::move(targets);
  return tracer;
}

absl::Status Tracer::BeginPass() {
  State& state = *state_;
  state.pass_began = Clock::now();
  if (!TraceDeviceError().empty()) return absl::FailedPreconditionError(TraceDeviceError());
  if (state.session != nullptr)
    return absl::FailedPreconditionError("the tracer's pass has not ended yet");
  auto session = std::make_shared<TraceSession>(state.targets);
  if (auto status = session->Begin(); !status.ok()) return status;
  state.session = session;
  ++state.num_passes;
  state.current = -1;
  state.pass.clear();
  state.pass.reserve(state.metas.size());
  state.source_storages.assign(state.metas.size(), -1);
  for (std::size_t i = 0; i < state.metas.size(); ++i) {
    const auto source = static_cast<std::int32_t>(i);
    if (state.fallbacks.contains(source)) continue;
    const SourceMeta& meta = state.metas[i];
    at::Tensor tensor = session->NewCheckpointTensor(source, meta.name, meta.shape, meta.dtype);
    state.source_storages[i] = session->Find(tensor).storage;
    state.pass.push_back({source, std::move(tensor)});
  }
  return absl::OkStatus();
}

const std::vector<PassTensor>& Tracer::pass() const { return state_->pass; }
void Tracer::SetCurrent(int32_t source) { state_->current = source; }
int Tracer::num_passes() const { return state_->num_passes; }
const std::vector<SourceMeta>& Tracer::metas() const { return state_->metas; }
const std::shared_ptr<const TargetSet>& Tracer::targets() const { return state_->targets; }
void Tracer::MarkFallback(int32_t source, const std::string& reason) {
  state_->fallbacks.emplace(source, reason);
}

void Tracer::JoinThread() {
  if (state_->session != nullptr) state_->session->JoinThread();
}

void Tracer::Refuse(const at::Tensor& tensor, const std::string& op, const std::string& where) {
  TraceSession* const session = state_->session.get();
  if (session == nullptr || session->Find(tensor).storage < 0) return;
  session->RecordRefusal(op, absl::StrCat("`", op, "` reads its value"), where, {tensor});
}

void Tracer::AbandonPass() {
  State& state = *state_;
  if (state.session == nullptr) return;
  state.session->End();
  state.trace_seconds += SecondsSince(state.pass_began);
  state.last_session = std::move(state.session);
  state.session.reset();
  state.pass.clear();
}

PassVerdict Tracer::EndPass(const std::string& error) {
  State& state = *state_;
  if (state.session == nullptr) return {PassVerdict::kRefuse, "no trace pass is active"};
  const std::string changed = state.session->guards().FindChanged();
  AbandonPass();
  if (!changed.empty()) {
    return {PassVerdict::kRefuse, absl::StrCat("the loader changed target `", changed,
                                               "` through a raw pointer while it was "
                                               "traced; use tensor operators in the loader")};
  }
  if (state.GiveUpRefused()) return {PassVerdict::kRepeat, ""};
  if (error.empty()) return {};
  const std::string name =
      state.current < 0
          ? std::string("before the first tensor")
          : absl::StrCat("at checkpoint tensor `",
                         state.metas[static_cast<std::size_t>(state.current)].name, "`");
  return {PassVerdict::kRefuse, absl::StrCat("load_weights failed ", name, " while it was traced: ",
                                             error, "; nothing was written")};
}

absl::StatusOr<std::shared_ptr<const TracedPlan>> Tracer::BuildPlan(OverlapPolicy overlaps) {
  State& state = *state_;
  if (state.last_session == nullptr)
    return absl::FailedPreconditionError("no trace pass has ended yet");
  const TraceSession& session = *state.last_session;
  const Clock::time_point began = Clock::now();
  BuildInput input;
  input.overlaps = overlaps;
  input.targets = state.targets->target_tensors();
  input.log = session.log();
  input.sources.reserve(state.metas.size());
  for (std::size_t i = 0; i < state.metas.size(); ++i) {
    const SourceMeta& meta = state.metas[i];
    input.sources.push_back(
        {meta.name, ToDimVector(meta.shape), ToDType(meta.dtype), state.source_storages[i]});
  }
  for (const auto& [source, reason] : state.fallbacks) input.fallbacks.emplace_back(source, reason);
  auto plan = BuildLoadPlan(std::move(input));
  if (!plan.ok()) return plan.status();
  auto traced = std::make_shared<TracedPlan>();
  traced->plan = *std::move(plan);
  traced->plan.trace_seconds = state.trace_seconds;
  traced->plan.build_seconds = SecondsSince(began);
  const auto keep = [&](const WriteItem& write) {
    if (write.origin.kind != OriginKind::kConstant) return;
    traced->constants[write.origin.index] =
        session.captured()[static_cast<std::size_t>(write.origin.index)];
  };
  for (const WriteItem& write : traced->plan.constants()) keep(write);
  for (const Program& program : traced->plan.programs()) {
    traced->nodes[program.node] = session.program(program.node);
    for (const ProgramInput& program_input : program.inputs) {
      for (const WriteItem& piece : program_input.pieces) keep(piece);
    }
  }
  return std::shared_ptr<const TracedPlan>(std::move(traced));
}

}  // namespace loadplan
