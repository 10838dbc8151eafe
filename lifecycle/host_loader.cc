#include "lifecycle/host_loader.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>

#include "absl/strings/str_cat.h"
#include "backend/call_watch.h"

namespace loadplan {
namespace {

// What `load_weights` throws, in its own words; "" where it returns.
std::string ErrorOf(const LoadWeights& load_weights, const NextWeight& next) {
  try {
    load_weights(next);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of no known type";
  }
  return "";
}

// One call of the loader in the tracer's current pass.
std::string RunPass(Tracer& tracer, const LoadWeights& load_weights) {
  std::vector<PassTensor> tensors = tracer.TakePass();
  std::size_t given = 0;
  return ErrorOf(load_weights, [&]() -> std::optional<std::pair<std::string, at::Tensor>> {
    if (given == tensors.size()) return std::nullopt;
    PassTensor& item = tensors[given++];
    tracer.SetCurrent(item.source);
    const std::string& name = tracer.metas()[static_cast<std::size_t>(item.source)].name;
    // Moved: only what the loader keeps stays alive.
    return std::make_pair(name, std::move(item.tensor));
  });
}

absl::Status RefuseKeptTensors(const Tracer& tracer) {
  if (!tracer.HasLiveTensors()) return absl::OkStatus();
  const std::vector<std::int32_t> kept = tracer.LiveNames();
  return absl::FailedPreconditionError(absl::StrCat(
      "the loader kept ",
      kept.empty() ? "a tensor computed from checkpoint tensors"
                   : absl::StrCat("the tensor of `",
                                  tracer.metas()[static_cast<std::size_t>(kept.front())].name, "`"),
      " after it returned, where a plan cannot follow it; copy it into a target, or drop it"));
}

absl::Status RunPasses(Tracer& tracer, const LoadWeights& load_weights) {
  for (;;) {
    if (absl::Status status = tracer.BeginPass(); !status.ok()) return status;
    const PassVerdict verdict = tracer.EndPass(RunPass(tracer, load_weights));
    if (verdict.kind == PassVerdict::kDone) break;
    if (verdict.kind == PassVerdict::kRefuse) return absl::FailedPreconditionError(verdict.message);
  }
  if (absl::Status status = RefuseKeptTensors(tracer); !status.ok()) return status;
  while (tracer.WantsExploring()) {
    if (absl::Status status = tracer.BeginExploring(); !status.ok()) return status;
    const std::string error = RunPass(tracer, load_weights);
    tracer.EndExploring(error);
    if (!error.empty()) continue;
    if (absl::Status status = RefuseKeptTensors(tracer); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status TraceFallbackCall(Tracer& tracer, const LoadPlan& plan,
                               const LoadWeights& load_weights) {
  for (int round = 0; round < tracer.num_rounds(); ++round) {
    if (absl::Status status = tracer.BeginFallbackPass(plan, round); !status.ok()) return status;
    tracer.EndFallbackPass(RunPass(tracer, load_weights));
  }
  return absl::OkStatus();
}

std::ptrdiff_t NumFallbacks(const TracedPlan& traced) {
  return std::ranges::count(traced.plan.entries(), EntryKind::kFallback, &PlanEntry::kind);
}

}  // namespace

absl::StatusOr<std::shared_ptr<const BoundPlan>> PlanLoads(std::vector<SourceMeta> metas,
                                                           std::vector<LiveTarget> targets,
                                                           const LoadWeights& load_weights,
                                                           OverlapPolicy overlaps) {
  absl::StatusOr<TargetSet> set = TargetSet::Create(std::move(targets));
  if (!set.ok()) return set.status();
  auto live = std::make_shared<const TargetSet>(*std::move(set));
  auto tracer = Tracer::Create(std::move(metas), live);
  if (!tracer.ok()) return tracer.status();
  if (absl::Status status = RunPasses(**tracer, load_weights); !status.ok()) return status;
  auto traced = (*tracer)->BuildPlan(overlaps);
  // Names that join the fallbacks take part in the next trace of their call.
  const auto num_names = static_cast<std::ptrdiff_t>((*tracer)->metas().size());
  while (traced.ok() && NumFallbacks(**traced) > 0 && NumFallbacks(**traced) < num_names) {
    absl::Status status = TraceFallbackCall(**tracer, (*traced)->plan, load_weights);
    if (!status.ok()) return status;
    auto again = (*tracer)->BuildPlan(overlaps);
    if (!again.ok()) return again.status();
    const std::ptrdiff_t joined = NumFallbacks(**again) - NumFallbacks(**traced);
    // Fewer: everything fell back because a call with some names only does less than the loader
    // does, which a call with all of them no longer shows.
    if (joined >= 0) traced = std::move(again);
    if (joined <= 0) break;
  }
  if (!traced.ok()) return traced.status();
  return std::make_shared<const BoundPlan>(*std::move(traced), std::move(live));
}

absl::Status CallLoader(ReloadSession& session, const BoundPlan& plan,
                        const LoadWeights& load_weights, std::span<const LiveTarget> current) {
  if (!session.FallbackCallReady()) return absl::OkStatus();
  absl::StatusOr<ReloadSession::Call> call = session.TakeFallbackCall();
  if (!call.ok()) return call.status();
  const auto watch = std::make_shared<CallWatch>(plan.plan(), plan.targets);
  watch->KeepOthers([&](const at::Tensor& tensor) { return session.KeepOther(tensor); });
  std::size_t given = 0;
  watch->Begin();
  std::string error =
      ErrorOf(load_weights, [&]() -> std::optional<std::pair<std::string, at::Tensor>> {
        if (given == call->size()) return std::nullopt;
        return std::move((*call)[given++]);
      });
  const absl::Status violation = watch->End();
  if (error.empty()) error = std::string(violation.message());
  return session.FallbackCallDone(error, watch->TakeWritten(), current);
}

}  // namespace loadplan
