#include "tests/differential/differential.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "backend/call_watch.h"
#include "backend/convert.h"
#include "backend/operator_codec.h"
#include "backend/target_set.h"
#include "backend/tracer.h"
#include "lifecycle/execute.h"
#include "lifecycle/reload_session.h"
#include "lifecycle/saved_plan.h"

namespace loadplan::testing {
namespace {

constexpr int kUpdates = 2;
constexpr int kMaxPasses = 50;
constexpr std::uint32_t kOneOnMeta = 6;
constexpr char kMeets[] = "called with the fallback names only, touches bytes";

using Tensors = std::vector<at::Tensor>;

Tensors Clones(const Tensors& tensors) {
  Tensors clones;
  for (const at::Tensor& tensor : tensors) clones.push_back(tensor.clone());
  return clones;
}

// "" or the first difference.
std::string Difference(const Tensors& expected, const Tensors& got) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto* const a = static_cast<const unsigned char*>(expected[i].const_data_ptr());
    const auto* const b = static_cast<const unsigned char*>(got[i].const_data_ptr());
    for (std::size_t k = 0; k < expected[i].nbytes(); ++k) {
      if (a[k] != b[k])
        return absl::StrCat("byte ", k, " of storage ", i, " is ", b[k], ", eager left ", a[k]);
    }
  }
  return "";
}

at::Tensor Narrowed(at::Tensor tensor, const Box& box) {
  for (int d = 0; d < box.rank(); ++d) tensor = tensor.narrow(d, box[d].start, box[d].extent());
  return tensor;
}

class BothWays {
 public:
  BothWays(const Program& program, OverlapPolicy overlaps, std::uint64_t seed)
      : program_(program), overlaps_(overlaps), gen_(static_cast<std::uint32_t>(seed)) {
    for (const StorageSpec& storage : program.storages)
      live_.push_back(RandomValues(gen_, {storage.numel}, storage.dtype));
    for (int update = 0; update < kUpdates; ++update) {
      values_.emplace_back();
      for (const SourceSpec& source : program.sources)
        values_.back().push_back(RandomValues(gen_, source.sizes, source.dtype));
    }
  }

  Outcome Run() {
    try {
      RunEagerly();
    } catch (const std::exception& error) {
      return {Outcome::kInvalid, error.what()};
    }
    const Tensors before = Clones(live_);
    targets_ = TargetsOf(live_);
    Outcome outcome = gen_() % kOneOnMeta == 0 ? PlanOnMeta() : Plan(live_, targets_);
    if (const std::string changed = Difference(before, live_); !changed.empty())
      return {Outcome::kFailed, "while tracing, " + changed};
    if (outcome.kind != Outcome::kPlanned && outcome.kind != Outcome::kFallback) return outcome;
    if (gen_() % 2 == 0) {
      if (std::string error = ThroughFile(outcome); !error.empty())
        return {Outcome::kFailed, absl::StrCat("plan file: ", error)};
    }
    for (int update = 0; update < kUpdates; ++update) {
      const std::string error =
          outcome.kind == Outcome::kPlanned ? Update(update) : UpdateWithFallbacks(update);
      // Refused in words where the call of the loader meets the plan.
      if (error.find(kMeets) != std::string::npos) return {Outcome::kRefused, error};
      if (!error.empty()) return {Outcome::kFailed, absl::StrCat("update ", update, ": ", error)};
    }
    return outcome;
  }

 private:
  void RunEagerly() {
    const Tensors storages = Clones(live_);
    const Tensors targets = TargetViews(program_, storages);
    for (const Tensors& values : values_) {
      Tensors sources = Clones(values);
      int position = -1;
      const auto next = [&](int& source, at::Tensor& tensor) {
        if (++position == program_.num_sources()) return false;
        source = position;
        tensor = std::move(sources[static_cast<std::size_t>(position)]);
        return true;
      };
      RunLoader(program_, next, targets);
      expected_.push_back(Clones(storages));
    }
  }

  std::string TracePass(Tracer& tracer, const Tensors& targets) {
    std::size_t position = 0;
    const auto next = [&](int& source, at::Tensor& tensor) {
      if (position == tracer.pass().size()) return false;
      const PassTensor& given = tracer.pass()[position++];
      source = given.source;
      tensor = given.tensor;
      tracer.SetCurrent(given.source);
      return true;
    };
    try {
      RunLoader(program_, next, targets);
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }

  std::shared_ptr<const TargetSet> TargetsOf(const Tensors& storages) const {
    std::vector<LiveTarget> targets;
    for (const at::Tensor& view : TargetViews(program_, storages))
      targets.push_back({absl::StrCat("t", targets.size()), view});
    return std::make_shared<const TargetSet>(*TargetSet::Create(std::move(targets)));
  }

  // The plan of a layerwise reload: traced over targets without memory, run on those with it.
  Outcome PlanOnMeta() {
    Tensors storages;
    for (const at::Tensor& storage : live_)
      storages.push_back(at::empty_like(storage, at::TensorOptions(at::kMeta)));
    Outcome outcome = Plan(storages, TargetsOf(storages));
    outcome.on_meta = true;
    return outcome;
  }

  Outcome Plan(const Tensors& storages, const std::shared_ptr<const TargetSet>& traced) {
    std::vector<SourceMeta> metas;
    for (const SourceSpec& source : program_.sources)
      metas.push_back({absl::StrCat("w", metas.size()), source.sizes, source.dtype});
    auto tracer = Tracer::Create(std::move(metas), traced);
    const Tensors targets = TargetViews(program_, storages);
    for (;;) {
      if (auto status = (*tracer)->BeginPass(); !status.ok())
        return {Outcome::kFailed, status.ToString()};
      const PassVerdict verdict = (*tracer)->EndPass(TracePass(**tracer, targets));
      if (verdict.kind == PassVerdict::kDone) break;
      if (verdict.kind == PassVerdict::kRefuse) return {Outcome::kRefused, verdict.message};
      if ((*tracer)->num_passes() == kMaxPasses) return {Outcome::kFailed, "passes without end"};
    }
    while ((*tracer)->WantsExploring()) {
      if (auto status = (*tracer)->BeginExploring(); !status.ok())
        return {Outcome::kFailed, status.ToString()};
      (*tracer)->EndExploring(TracePass(**tracer, targets));
    }
    // Names that join the fallbacks take part in the next trace of their call.
    for (int fallbacks = 0;;) {
      auto plan = (*tracer)->BuildPlan(overlaps_);
      if (!plan.ok()) {
        const bool is_ours = plan.status().code() == absl::StatusCode::kInternal;
        return {is_ours ? Outcome::kFailed : Outcome::kRefused, plan.status().ToString()};
      }
      plan_ = *plan;
      const int now = static_cast<int>(
          std::ranges::count(plan_->plan.entries(), EntryKind::kFallback, &PlanEntry::kind));
      if (now <= fallbacks || now == program_.num_sources()) break;
      fallbacks = now;
      for (int round = 0; round < (*tracer)->num_rounds(); ++round) {
        if (auto status = (*tracer)->BeginFallbackPass(plan_->plan, round); !status.ok())
          return {Outcome::kFailed, status.ToString()};
        (*tracer)->EndFallbackPass(TracePass(**tracer, targets));
      }
    }
    return Describe();
  }

  Outcome Describe() const {
    Outcome outcome;
    outcome.num_names = program_.num_sources();
    for (const PlanEntry& entry : plan_->plan.entries()) {
      outcome.num_direct += entry.kind == EntryKind::kDirect;
      outcome.num_derived += entry.kind == EntryKind::kDerived;
      if (entry.kind != EntryKind::kFallback || outcome.kind == Outcome::kFallback) continue;
      outcome.kind = Outcome::kFallback;
      outcome.detail = entry.reason;
    }
    return outcome;
  }

  // Takes the plan that stands in a file, on tensors that were looked up again. "" or what
  // went wrong.
  std::string ThroughFile(Outcome& outcome) {
    const PlanFileInfo info{"1", "2", "AVX2", "", "None", {}, 0};
    const auto bytes = EncodeBoundPlan(BoundPlan(plan_, targets_), info);
    // The one thing that a file cannot hold.
    if (!bytes.ok()) return plan_->externals.empty() ? bytes.status().ToString() : "";
    auto file = DecodePlanFile(*bytes, DTypeByName);
    if (!file.ok()) return file.status().ToString();
    std::vector<LiveTarget> live = targets_->targets();
    std::shuffle(live.begin(), live.end(), gen_);
    const auto bound = BindPlan(*std::move(file), std::move(live), info);
    if (!bound.ok()) return bound.status().ToString();
    if (const auto again = EncodeBoundPlan(**bound, info); !again.ok() || *again != *bytes)
      return "the loaded plan is another file";
    plan_ = (*bound)->traced;
    targets_ = (*bound)->targets;
    outcome.from_file = true;
    return "";
  }

  // `value` where the plan reads it, other values elsewhere.
  at::Tensor OnlyReads(std::int32_t entry, const at::Tensor& value) {
    at::Tensor sent = RandomValues(gen_, value.sizes(), value.scalar_type());
    for (const Box& box : plan_->plan.Reads(entry)) {
      at::Tensor to = Narrowed(sent, box);
      to.copy_(Narrowed(value, box));
    }
    return sent;
  }

  // Lands a name through its destinations, as an engine would that receives into them.
  bool LandRaw(std::int32_t entry, const at::Tensor& value) {
    const auto dests = plan_->plan.GetDest(entry);
    if (!dests.has_value()) return false;
    for (const LoadPlan::Dest& dest : *dests) {
      const at::Tensor from = Narrowed(value, dest.box);
      const at::Tensor to = targets_->View(dest.storage, dest.region, value.scalar_type());
      to.copy_(from.reshape(to.sizes()));
    }
    return true;
  }

  // "" or what went wrong.
  std::string Update(int update) {
    PlanExecutor executor(plan_, targets_);
    if (auto status = executor.Begin(); !status.ok()) return status.ToString();
    std::vector<std::int32_t> order;
    for (std::int32_t n = 0; n < program_.num_sources(); ++n) order.push_back(n);
    std::shuffle(order.begin(), order.end(), gen_);
    for (const std::int32_t entry : order) {
      at::Tensor value =
          values_[static_cast<std::size_t>(update)][static_cast<std::size_t>(entry)].clone();
      if (update > 0) {
        value = OnlyReads(entry, value);
        if (gen_() % 2 == 0 && LandRaw(entry, value)) continue;
      }
      if (auto status = executor.Deliver(entry, value); !status.ok()) return status.ToString();
      value.zero_();  // a sender reuses its buffer
    }
    if (auto status = executor.Finish(); !status.ok()) return status.ToString();
    return Difference(expected_[static_cast<std::size_t>(update)], live_);
  }

  // The loader on real tensors, watched.
  std::string CallLoader(ReloadSession& session, const Tensors& targets,
                         const std::vector<LiveTarget>& current) {
    absl::StatusOr<ReloadSession::Call> taken = session.TakeFallbackCall();
    if (!taken.ok()) return taken.status().ToString();
    ReloadSession::Call& call = *taken;
    const auto watch = std::make_shared<CallWatch>(plan_->plan, targets_);
    std::size_t position = 0;
    const auto next = [&](int& source, at::Tensor& tensor) {
      if (position == call.size()) return false;
      auto& [name, value] = call[position++];
      source = plan_->plan.Find(name).value();
      tensor = std::move(value);
      return true;
    };
    watch->Begin();
    std::string error;
    try {
      RunLoader(program_, next, targets);
    } catch (const std::exception& raised) {
      error = raised.what();
    }
    const absl::Status status = watch->End();
    if (error.empty()) error = std::string(status.message());
    const absl::Status done = session.FallbackCallDone(error, watch->TakeWritten(), current);
    return done.ok() ? "" : done.ToString();
  }

  // As an engine runs it. Names that overlap are fallbacks in their order of arrival.
  std::string UpdateWithFallbacks(int update) {
    auto bound = std::make_shared<const BoundPlan>(plan_, targets_);
    ReloadSession session;
    const std::vector<LiveTarget>& current = targets_->targets();
    if (auto status = session.Start({}); !status.ok()) return status.ToString();
    if (auto status = session.Begin(bound, current); !status.ok()) return status.ToString();
    std::vector<std::int32_t> order;
    for (std::int32_t n = 0; n < program_.num_sources(); ++n) order.push_back(n);
    if (plan_->plan.overlaps().empty()) std::shuffle(order.begin(), order.end(), gen_);
    for (const std::int32_t entry : order) {
      at::Tensor value =
          values_[static_cast<std::size_t>(update)][static_cast<std::size_t>(entry)].clone();
      if (auto status = session.Deliver(absl::StrCat("w", entry), value); !status.ok())
        return status.ToString();
      value.zero_();
    }
    if (auto status = session.PrepareFinish(std::nullopt, current); !status.ok())
      return status.ToString();
    if (session.NeedsFallbackCall()) {
      std::string error = CallLoader(session, TargetViews(program_, live_), current);
      if (!error.empty()) return error;
    }
    if (auto finished = session.Finish(); !finished.ok()) return finished.status().ToString();
    return Difference(expected_[static_cast<std::size_t>(update)], live_);
  }

  const Program& program_;
  const OverlapPolicy overlaps_;
  std::mt19937 gen_;
  Tensors live_;                 // per storage
  std::vector<Tensors> values_;  // per update, per source
  std::vector<Tensors> expected_;
  std::shared_ptr<const TargetSet> targets_;
  std::shared_ptr<const TracedPlan> plan_;
};

// The `empty_like` whose memory `statement` fills; -1 where it fills none.
int EmptyFilledBy(const Program& program, const Statement& statement) {
  if (!WritesFirstArgument(statement.op)) return -1;
  int reg = statement.args[0];
  while (reg >= program.first_statement_register()) {
    const Statement& made =
        program.statements[static_cast<std::size_t>(reg - program.first_statement_register())];
    if (made.op == Op::kEmptyLike) return reg;
    reg = made.args[0];
  }
  return -1;
}

// `program` without statement `index` and those that need its result; nullopt where memory
// would be read that nothing filled.
std::optional<Program> Without(const Program& program, std::size_t index) {
  Program smaller = program;
  smaller.statements.clear();
  std::vector<int> renamed(static_cast<std::size_t>(program.first_statement_register()));
  for (std::size_t i = 0; i < renamed.size(); ++i) renamed[i] = static_cast<int>(i);
  for (std::size_t i = 0; i < program.statements.size(); ++i) {
    Statement statement = program.statements[i];
    bool drop = i == index;
    const int filled = EmptyFilledBy(program, statement);
    for (int& arg : statement.args) {
      arg = renamed[static_cast<std::size_t>(arg)];
      drop |= arg < 0;
    }
    if (drop && filled >= 0 && renamed[static_cast<std::size_t>(filled)] >= 0) return std::nullopt;
    renamed.push_back(drop ? -1
                           : smaller.first_statement_register() +
                                 static_cast<int>(smaller.statements.size()));
    if (!drop) smaller.statements.push_back(std::move(statement));
  }
  return smaller;
}

}  // namespace

Outcome RunBothWays(const Program& program, OverlapPolicy overlaps, std::uint64_t seed) {
  return BothWays(program, overlaps, seed).Run();
}

Program Shrink(Program program, OverlapPolicy overlaps, std::uint64_t seed) {
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (std::size_t i = program.statements.size(); i-- > 0;) {
      if (i >= program.statements.size()) continue;
      const std::optional<Program> candidate = Without(program, i);
      if (!candidate.has_value()) continue;
      if (RunBothWays(*candidate, overlaps, seed).kind != Outcome::kFailed) continue;
      program = *candidate;
      smaller = true;
    }
  }
  return program;
}

}  // namespace loadplan::testing
