// What a Tracer knows from pass to pass. Internal to backend/tracer.cc (the passes) and
// backend/tracer_state.cc (which names they give up).
#ifndef LOADPLAN_BACKEND_TRACER_STATE_H_
#define LOADPLAN_BACKEND_TRACER_STATE_H_

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "backend/mirrors.h"
#include "backend/stand_ins.h"
#include "backend/trace_session.h"
#include "backend/tracer.h"
#include "plan/load_plan_builder.h"

namespace loadplan {

struct Tracer::State {
  using Clock = std::chrono::steady_clock;

  std::vector<SourceMeta> metas;
  std::unique_ptr<MirrorBook> mirrors;
  std::shared_ptr<const TargetSet> targets;    // of the last pass that BuildPlan may use
  std::shared_ptr<TraceSession> session;       // of the current pass
  std::shared_ptr<TraceSession> last_session;  // of the last pass that ended
  std::vector<PassTensor> pass;
  std::vector<std::int32_t> sources_of_pass;
  std::vector<StorageId> source_storages;  // per meta; -1: not in the pass
  absl::flat_hash_map<std::int32_t, std::string> fallbacks;
  absl::flat_hash_map<std::string, int> failures;  // per pattern
  std::int32_t current = -1;
  bool has_marked = false;  // whether MarkFallback gave a name of the current pass up
  int num_passes = 0;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;  // parallel to metas
  std::vector<StorageId> last_storages;  // of `last_session`, per meta; -1: not in that pass
  std::weak_ptr<TraceSession> ended;     // the pass that ended last, of whatever kind
  // What exploring shows, and the answers of each round that was complete.
  std::optional<Exploration> exploration;
  std::vector<std::shared_ptr<StandIns>> rounds;
  std::shared_ptr<StandIns> stand_ins;  // of the round that is not complete
  int failures_of_round = 0;
  bool is_explored = false;
  std::optional<FallbackCall> fallback_call;
  std::vector<Mirror> mirrors_of_pass;  // of the last complete one
  bool is_whole = false;                // every name goes through the loader, whatever the log says
  Clock::time_point pass_began;
  double trace_seconds = 0;  // of all passes

  absl::Status Begin(const std::function<bool(std::int32_t)>& takes_part,
                     std::shared_ptr<StandIns> answers = nullptr);
  void NoteRefusals(const TraceSession& explored);
  void End();
  std::vector<std::int32_t> Live() const;
  bool GiveUp(std::int32_t source, const std::string& reason);
  bool GiveUpRefused();
  bool GiveUpMirrored(const TraceSession& of, const std::vector<Mirror>& left);
  void LetAllFallBack(const std::string& reason);
};

}  // namespace loadplan

#endif  // LOADPLAN_BACKEND_TRACER_STATE_H_
