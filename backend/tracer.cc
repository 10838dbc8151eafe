#include "backend/tracer.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "backend/content_digests.h"
#include "backend/convert.h"
#include "backend/mode.h"
#include "backend/trace_tensor.h"
#include "backend/tracer_state.h"
#include "backend/watcher.h"
#include "geometry/checked_product.h"
#include "plan/resolve.h"

namespace loadplan {
namespace {

using Clock = std::chrono::steady_clock;
double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Runs of one round of exploring that the loader may end by an exception.
constexpr int kFailuresOfOneRound = 6;

}  // namespace

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
    if (!CheckedProduct(static_cast<Index>(c10::elementSize(meta.dtype)), meta.shape)) {
      return absl::InvalidArgumentError(
          absl::StrCat("checkpoint tensor `", meta.name, "` has a shape whose bytes cannot be ",
                       "counted: [", absl::StrJoin(meta.shape, ", "), "]; declare what is sent"));
    }
  }
  std::unique_ptr<Tracer> tracer(new Tracer());
  tracer->state_->metas = std::move(metas);
  tracer->state_->mirrors = std::make_unique<MirrorBook>(targets);
  tracer->state_->targets = std::move(targets);
  return tracer;
}

absl::Status Tracer::State::Begin(const std::function<bool(std::int32_t)>& takes_part,
                                  std::shared_ptr<StandIns> answers) {
  pass_began = Clock::now();
  if (!TraceDeviceError().empty()) return absl::FailedPreconditionError(TraceDeviceError());
  if (session != nullptr) {
    return absl::FailedPreconditionError("the tracer's pass has not ended yet");
  }
  auto next = std::make_shared<TraceSession>(mirrors->targets());
  if (answers != nullptr) {
    answers->Rewind();
    next->Explore(std::move(answers));
  }
  if (auto status = next->Begin(); !status.ok()) return status;
  session = next;
  targets = mirrors->targets();
  ++num_passes;
  current = -1;
  has_marked = false;
  pass.clear();
  pass.reserve(metas.size());
  source_storages.assign(metas.size(), -1);
  storages.clear();
  for (std::size_t i = 0; i < metas.size(); ++i) {
    const auto source = static_cast<std::int32_t>(i);
    if (!takes_part(source)) continue;
    const SourceMeta& meta = metas[i];
    at::Tensor tensor = session->NewCheckpointTensor(source, meta.name, meta.shape, meta.dtype);
    if (meta.device.has_value()) ClaimDevice(tensor, *meta.device);
    source_storages[i] = session->FindWritten(tensor).storage;
    storages.emplace_back(tensor.storage().getWeakStorageImpl());
    pass.push_back({source, std::move(tensor)});
  }
  sources_of_pass.clear();
  for (const PassTensor& item : pass) sources_of_pass.push_back(item.source);
  return absl::OkStatus();
}

absl::Status Tracer::BeginPass() {
  State& state = *state_;
  return state.Begin([&state](std::int32_t source) { return !state.fallbacks.contains(source); });
}

bool Tracer::WantsExploring() const {
  const State& state = *state_;
  return !state.is_explored && !state.fallbacks.empty() &&
         state.fallbacks.size() < state.metas.size();
}

absl::Status Tracer::BeginExploring() {
  State& state = *state_;
  if (!state.exploration.has_value()) state.exploration.emplace();
  if (state.stand_ins == nullptr)
    state.stand_ins = std::make_shared<StandIns>(static_cast<int>(state.rounds.size()));
  return state.Begin([](std::int32_t) { return true; }, state.stand_ins);
}

bool Tracer::EndExploring(const std::string& error) {
  State& state = *state_;
  if (state.session == nullptr) return false;
  state.End();
  const std::shared_ptr<TraceSession> session = std::move(state.session);
  if (!session->guards().reached().empty()) {
    state.LetAllFallBack(session->unplannable());
    return false;
  }
  if (!error.empty()) {
    state.exploration->error = error;
    // A value that the loader refuses would fail an eager load as well.
    state.is_explored =
        !state.stand_ins->Turn() || ++state.failures_of_round == kFailuresOfOneRound;
    return false;
  }
  state.NoteRefusals(*session);
  std::vector<Mirror> left = session->LiveMirrors();
  if (state.mirrors->TakeInExplored(left)) {
    state.exploration.reset();
    state.rounds.clear();
    state.stand_ins.reset();
    return true;
  }
  state.GiveUpMirrored(*session, left);
  // The values of this round did satisfy the loader.
  state.exploration->error.clear();
  state.exploration->rounds.push_back(WritesOfPass(session->log(), DigestsOf(*session)));
  state.rounds.push_back(std::move(state.stand_ins));
  state.failures_of_round = 0;
  state.is_explored |= state.rounds.size() == StandIns::kNumRounds;
  return false;
}

at::Tensor Tracer::StandIn(const at::Tensor& tensor, const std::string& op,
                           const std::string& where) {
  TraceSession* const session = state_->session.get();
  if (session == nullptr || session->stand_ins() == nullptr || session->Find(tensor).storage < 0)
    return {};
  Refuse(tensor, op, where);
  const std::string site = absl::StrCat(op, " ", c10::toString(tensor.scalar_type()), " ",
                                        session->DescribeOrigin(session->Find(tensor).storage));
  return session->stand_ins()->Make(tensor, session->stand_ins()->Choose(site));
}

int64_t Tracer::num_answers() const {
  const TraceSession* const session = state_->session.get();
  return session == nullptr || session->stand_ins() == nullptr
             ? 0
             : session->stand_ins()->num_answers();
}

bool Tracer::Decide(const std::string& site) {
  TraceSession* const session = state_->session.get();
  return session != nullptr && session->stand_ins() != nullptr &&
         session->stand_ins()->Decide(site);
}

int Tracer::num_rounds() const { return std::max(1, static_cast<int>(state_->rounds.size())); }

absl::Status Tracer::BeginFallbackPass(const LoadPlan& plan, int round) {
  State& state = *state_;
  const bool is_explored = !state.rounds.empty();
  if (round == 0) state.fallback_call.emplace();
  return state.Begin(
      [&](std::int32_t source) {
        return plan.entries()[static_cast<std::size_t>(source)].kind == EntryKind::kFallback &&
               (is_explored || !state.fallbacks.contains(source));
      },
      is_explored ? state.rounds[static_cast<std::size_t>(round)] : nullptr);
}

std::vector<PassTensor> Tracer::TakePass() { return std::move(state_->pass); }

std::vector<std::int32_t> Tracer::State::Live() const {
  std::vector<std::int32_t> live;
  for (std::size_t i = 0; i < storages.size(); ++i) {
    if (storages[i].lock() != nullptr) live.push_back(sources_of_pass[i]);
  }
  return live;
}

bool Tracer::HasLiveTensors() const {
  const std::shared_ptr<TraceSession> session = state_->ended.lock();
  if (session == nullptr) return false;
  const long ours = (state_->last_session == session ? 2 : 1) + session->num_threads();
  return session.use_count() > ours;
}
std::vector<int32_t> Tracer::LiveNames() const { return state_->Live(); }

const std::vector<PassTensor>& Tracer::pass() const { return state_->pass; }
void Tracer::SetCurrent(int32_t source) { state_->current = source; }
std::vector<std::string> Tracer::DescribeCopies() const {
  const auto& session = state_->session != nullptr ? state_->session : state_->last_session;
  return session == nullptr ? std::vector<std::string>{} : session->DescribeCopies();
}
int Tracer::num_passes() const { return state_->num_passes; }
const std::vector<SourceMeta>& Tracer::metas() const { return state_->metas; }
const std::shared_ptr<const TargetSet>& Tracer::targets() const { return state_->targets; }
void Tracer::MarkFallback(int32_t source, const std::string& reason) {
  if (source == kEveryName) return state_->LetAllFallBack(reason);
  state_->GiveUp(source, reason);
  state_->has_marked = state_->session != nullptr;
}

bool Tracer::FallBackAsAWhole(const std::string& error) {
  State& state = *state_;
  if (state.fallbacks.empty()) return false;
  // BuildPlan lets every name fall back for this reason; nothing is left to explore.
  state.fallback_call.emplace();
  state.fallback_call->error = error;
  state.is_explored = true;
  return true;
}

void Tracer::JoinThread() {
  if (state_->session != nullptr) state_->session->JoinThread();
}

void Tracer::Refuse(const at::Tensor& tensor, const std::string& op, const std::string& where) {
  TraceSession* const session = state_->session.get();
  if (session == nullptr || session->Find(tensor).storage < 0) return;
  const bool assigns = op.ends_with(" = ...");
  session->RecordRefusal(
      op,
      absl::StrCat("`", op, "` ",
                   assigns ? "puts it into memory that no plan knows" : "reads its value"),
      where, {tensor});
}

at::Tensor Tracer::ReadableCopy(const at::Tensor& tensor) {
  TraceSession* const session = state_->session.get();
  if (session == nullptr || !tensor.has_storage()) return {};
  switch (session->Find(tensor).touch) {
    case Touch::kPlain:
      session->NoteExternal(tensor);
      return {};
    case Touch::kKnown: {
      session->RecordAnswered({tensor});
      const ModeOff mode_off;
      const StorageGuards::Lift lift(session->guards(), StoragesOf({tensor}));
      return tensor.detach().cpu().clone();
    }
    case Touch::kTrace:
      return session->ConstantValue(tensor, /*allow_uninitialised=*/false).value_or(at::Tensor());
    case Touch::kStale:
      break;
  }
  return {};
}

std::vector<const c10::StorageImpl*> Tracer::Mirrors() const {
  std::vector<const c10::StorageImpl*> storages;
  if (state_->session == nullptr) return storages;
  for (const Mirror& mirror : state_->session->LiveMirrors())
    storages.push_back(mirror.storage._unsafe_get_target());
  return storages;
}

void Tracer::NameMirror(const c10::StorageImpl* mirror, const std::string& name) {
  if (state_->session != nullptr) state_->session->NameMirror(mirror, name);
}

void Tracer::NoteExposure(const at::Tensor& tensor, const std::string& op) {
  TraceSession* const session = state_->session.get();
  if (session != nullptr && session->Find(tensor).touch == Touch::kPlain)
    session->NoteExposure(tensor, op);
}

void Tracer::NoteReshape(const at::Tensor& tensor, const std::string& op) {
  if (state_->session != nullptr) state_->session->NoteReshape(tensor, op);
}

void Tracer::NoteBirth(const at::Tensor& tensor) {
  if (state_->session != nullptr) state_->session->NoteBirth(tensor);
}

bool Tracer::IsSymbolic(const at::Tensor& tensor) const {
  const TraceSession* const session = state_->session.get();
  if (session == nullptr || !tensor.has_storage()) return false;
  const Touch touch = session->Find(tensor).touch;
  return touch == Touch::kTrace || touch == Touch::kStale;
}

void Tracer::State::End() {
  session->End();
  ended = session;
  trace_seconds += SecondsSince(pass_began);
  pass.clear();
}

void Tracer::AbandonPass() {
  State& state = *state_;
  if (state.session == nullptr) return;
  state.End();
  state.last_session = std::move(state.session);
  state.session.reset();
  state.last_storages = state.source_storages;
}

// What the call did to live memory: everything it wrote into targets, and what it read there that
// it had not written.
void Tracer::EndFallbackPass(const std::string& error) {
  State& state = *state_;
  if (state.session == nullptr) return;
  state.End();
  const RecordLog& log = state.session->log();
  FallbackCall& call = *state.fallback_call;
  if (call.error.empty()) call.error = error;
  call.names = state.sources_of_pass;
  const auto touch = [&](const ReadRecord& read) {
    if (read.storage >= 0 && state.session->IsTarget(read.storage)) call.touched.push_back(read);
  };
  for (const CopyRecord& copy : log.copies) {
    touch({copy.to, copy.map.ToLayout(), copy.to_dtype});
    if (state.session->IsTarget(copy.to))
      call.written.push_back({copy.to, copy.map.ToLayout(), copy.to_dtype});
    if (state.session->IsTarget(copy.from)) {
      const ByteRange span = copy.map.FromSpan();
      touch({copy.from, StridedLayout::Unchecked(span.start, {span.nbytes()}, {1}, 1),
             copy.from_dtype});
    }
  }
  for (const NodeRecord& node : log.nodes) {
    for (const ReadRecord& input : node.inputs) touch(input);
  }
  for (const AnsweredRead& answered : log.answered) touch(answered.read);
  if (state.session->stand_ins() != nullptr) {
    for (const RefusalRecord& refusal : log.refusals) {
      for (const ReadRecord& input : refusal.inputs) touch(input);
    }
  } else if (!log.refusals.empty() && call.error.empty()) {
    call.error = log.refusals.front().reason;
  }
  call.rounds.push_back(WritesOfPass(log, DigestsOf(*state.session)));
  state.GiveUpMirrored(*state.session, state.session->LiveMirrors());
  state.session.reset();
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
  // What came of the error that this raised shows nothing.
  if (const std::string reached = state.last_session->guards().reached(); !reached.empty()) {
    state.LetAllFallBack(state.last_session->unplannable());
    return {};
  }
  const bool has_marked = std::exchange(state.has_marked, false);
  bool repeat = state.GiveUpRefused() || has_marked;
  if (error.empty()) {
    // What a frame of the error holds is no mirror.
    state.mirrors_of_pass = state.last_session->LiveMirrors();
    std::vector<Mirror> left = state.mirrors_of_pass;
    const absl::StatusOr<bool> settled = state.mirrors->Settle(state.last_session->log(), left);
    if (!settled.ok()) return {PassVerdict::kRefuse, std::string(settled.status().message())};
    repeat |= *settled;
    repeat |= state.GiveUpMirrored(*state.last_session, left);
  }
  if (state.is_whole) return {};
  if (repeat) return {PassVerdict::kRepeat, ""};
  if (error.empty()) return {};
  const std::string name =
      state.current < 0
          ? std::string("before the first tensor")
          : absl::StrCat("at checkpoint tensor `",
                         state.metas[static_cast<std::size_t>(state.current)].name, "`");
  if (!state.mirrors->empty() && !state.metas.empty()) {
    state.LetAllFallBack(
        absl::StrCat("the loader changes `", state.mirrors->first(),
                     "`, which is no target and outlives load_weights, and then: ", error));
    return {};
  }
  return {PassVerdict::kRefuse, absl::StrCat("load_weights failed ", name, " while it was traced: ",
                                             error, "; nothing was written")};
}

absl::StatusOr<std::shared_ptr<const TracedPlan>> Tracer::BuildPlan(OverlapPolicy overlaps) {
  State& state = *state_;
  if (state.last_session == nullptr)
    return absl::FailedPreconditionError("no trace pass has ended yet");
  const TraceSession& session = *state.last_session;
  // Nobody has repeated the pass with its mirrors as targets.
  if (state.mirrors->targets().get() != &session.targets())
    state.GiveUpMirrored(session, state.mirrors_of_pass);
  const Clock::time_point began = Clock::now();
  BuildInput input;
  input.overlaps = overlaps;
  input.targets = session.targets().target_tensors();
  input.log = session.log();
  if (state.is_whole) {
    // One call with all names is eager itself, whatever it reads.
    input.log.refusals.clear();
    input.log.answered.clear();
  }
  input.sources.reserve(state.metas.size());
  for (std::size_t i = 0; i < state.metas.size(); ++i) {
    const SourceMeta& meta = state.metas[i];
    input.sources.push_back(
        {meta.name, ToDimVector(meta.shape), ToDType(meta.dtype), state.last_storages[i]});
  }
  for (const auto& [source, reason] : state.fallbacks) input.fallbacks.emplace_back(source, reason);
  if (!state.fallbacks.empty() || state.fallback_call.has_value())
    input.digests = DigestsOf(session);
  if (!state.is_whole) {
    input.exploration = state.exploration;
    input.fallback_call = state.fallback_call;
  }
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
  if (!state.is_whole && !traced->plan.AllFallBack()) traced->externals = session.LiveExternals();
  traced->every_name_is_traced = state.fallbacks.empty();
  return std::shared_ptr<const TracedPlan>(std::move(traced));
}

}  // namespace loadplan
