// From what the ranks say of themselves to the messages of one rank: Kimi-K2 on 64 trainers and 32
// inference ranks.
#include "transfer/schedule.h"

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/cases.h"
#include "benchmark/benchmark.h"
#include "plan/load_plan_builder.h"
#include "transfer/geometry_table.h"

namespace loadplan::bench {
namespace {

constexpr std::int32_t kTrainers = 64;
constexpr std::int32_t kReceivers = 32;

// The compact form of a table.
struct Sections {
  std::string names;
  std::string geometries;
};

Sections Encode(const GeometryTable& table) {
  return {GeometryTable::EncodeNames(*table.names()), table.EncodeGeometries()};
}

bool IsExpert(const std::string& name) { return name.find(".experts.") != std::string::npos; }

// The number behind `.<key>.` in a name; 0 where there is none.
std::int32_t NumberBehind(const std::string& name, std::string_view key) {
  const std::size_t at = name.find(key);
  return at == std::string::npos ? 0 : std::stoi(name.substr(at + key.size()));
}

// Rows [i * ceil(n / parts), ...), as torch.chunk and FSDP2 cut them.
Box RowChunk(const DimVector& shape, Index i, Index parts) {
  absl::InlinedVector<Interval, 4> intervals = Box::Whole(shape).intervals();
  const Index step = (shape[0] + parts - 1) / parts;
  intervals[0] = {std::min(i * step, shape[0]), std::min((i + 1) * step, shape[0])};
  return Box(std::move(intervals));
}

using PiecesOf = std::vector<ShardPiece> (*)(const SourceTensor& source);

// FSDP2 over all 64: rows.
std::vector<ShardPiece> FsdpPieces(const SourceTensor& source) {
  std::vector<ShardPiece> pieces;
  for (std::int32_t rank = 0; rank < kTrainers; ++rank) {
    pieces.push_back({rank, RowChunk(source.shape, rank, kTrainers)});
  }
  return pieces;
}

// Megatron-like: 4 pipeline stages; in each, experts whole over 16 ranks, all else in rows over 4
// of them with 4 replicas.
std::vector<ShardPiece> PipelinePieces(const SourceTensor& source) {
  const std::int32_t stage = NumberBehind(source.name, ".layers.") * 4 / 61;
  std::vector<ShardPiece> pieces;
  if (IsExpert(source.name)) {
    const std::int32_t expert = NumberBehind(source.name, ".experts.");
    pieces.push_back({stage * 16 + expert / (384 / 16), Box::Whole(source.shape)});
    return pieces;
  }
  for (std::int32_t rank = 0; rank < 16; ++rank) {
    pieces.push_back({stage * 16 + rank, RowChunk(source.shape, rank % 4, 4)});
  }
  return pieces;
}

// What each of 96 ranks says. Trainers describe themselves alone, so that no two tables are equal:
// the worst case.
std::vector<Sections> Describe(PiecesOf pieces_of, bool is_expert_parallel) {
  std::vector<Sections> sections;
  const Index parallel = is_expert_parallel ? kReceivers : 8;
  std::vector<LoadPlan> plans;
  for (Index rank = 0; rank < parallel; ++rank) {
    plans.push_back(*BuildLoadPlan(MakeK2(
        {.tensor_parallel = parallel, .is_expert_parallel = is_expert_parallel, .rank = rank})));
  }
  std::vector<GeometryTableBuilder> builders(kTrainers);
  for (const SourceTensor& source : plans.front().sources()) {
    std::vector<std::vector<ShardPiece>> of_rank(kTrainers);
    for (ShardPiece& piece : pieces_of(source)) {
      of_rank[static_cast<std::size_t>(piece.rank)].push_back(std::move(piece));
    }
    for (std::size_t rank = 0; rank < of_rank.size(); ++rank) {
      if (of_rank[rank].empty()) continue;
      builders[rank].Add(source.name, {source.shape, source.dtype, std::move(of_rank[rank])});
    }
  }
  for (GeometryTableBuilder& builder : builders) {
    sections.push_back(Encode(std::move(builder).Build().value()));
  }
  for (std::int32_t rank = 0; rank < kReceivers; ++rank) {
    const LoadPlan& plan = plans[static_cast<std::size_t>(rank % parallel)];
    sections.push_back(Encode(NeededTable(plan, kTrainers + rank).value()));
  }
  return sections;
}

std::vector<RankTables> Decode(const std::vector<Sections>& sections) {
  std::vector<std::pair<std::string_view, std::shared_ptr<const GeometryTable::Names>>> lists;
  std::vector<RankTables> ranks;
  for (const Sections& item : sections) {
    auto list =
        std::ranges::find(lists, std::string_view(item.names), [](auto& l) { return l.first; });
    if (list == lists.end()) {
      lists.emplace_back(item.names, GeometryTable::DecodeNames(item.names).value());
      list = lists.end() - 1;
    }
    auto table = std::make_shared<const GeometryTable>(
        GeometryTable::Decode(list->second, item.geometries).value());
    const bool holds = ranks.size() < kTrainers;
    ranks.push_back({holds ? table : nullptr, holds ? nullptr : table});
  }
  return ranks;
}

void PlanSchedule(benchmark::State& state, PiecesOf pieces_of, bool is_expert_parallel) {
  const std::vector<Sections> sections = Describe(pieces_of, is_expert_parallel);
  const auto rank = static_cast<std::int32_t>(state.range(0));
  std::size_t nbytes = 0;
  for (const Sections& item : sections) nbytes += item.geometries.size();
  for (auto _ : state) {
    const std::vector<RankTables> ranks = Decode(sections);
    absl::StatusOr<Schedule> schedule = Schedule::Make(ranks, {});
    if (!schedule.ok()) return state.SkipWithError("no schedule");
    const std::vector<Message> messages = schedule->MessagesOf(rank);
    state.PauseTiming();
    Index moved = 0;
    std::size_t parts = 0;
    for (const Message& message : messages) {
      moved += message.nbytes;
      parts += message.parts.size();
    }
    const Traffic& traffic = schedule->traffic();
    const auto at = static_cast<std::size_t>(rank);
    if (moved == 0 || moved != traffic.sent[at] + traffic.received[at]) {
      state.SkipWithError("not the bytes of this rank");
    }
    state.counters["names"] = static_cast<double>(schedule->names().size());
    state.counters["classes"] = static_cast<double>(schedule->num_classes());
    state.counters["parts"] = static_cast<double>(parts);
    state.counters["messages"] = static_cast<double>(messages.size());
    state.counters["exchanged_MB"] =
        static_cast<double>(nbytes + sections.front().names.size()) / 1e6;
    const auto max = [](const std::vector<Index>& v) {
      return static_cast<double>(*std::ranges::max_element(v));
    };
    state.counters["sender_balance"] =
        max(traffic.sent) / static_cast<double>(traffic.max_sent_bound);
    state.counters["of_broadcast"] =
        static_cast<double>(traffic.total_nbytes) / static_cast<double>(traffic.broadcast_nbytes);
    state.ResumeTiming();
  }
}

// Each on the first trainer and on the first inference rank.
void BM_ScheduleK2FsdpToTP8x4(benchmark::State& state) { PlanSchedule(state, FsdpPieces, false); }
BENCHMARK(BM_ScheduleK2FsdpToTP8x4)
    ->ArgName("rank")
    ->Arg(0)
    ->Arg(kTrainers)
    ->Unit(benchmark::kMillisecond);

void BM_ScheduleK2PipelineToEP32(benchmark::State& state) {
  PlanSchedule(state, PipelinePieces, true);
}
BENCHMARK(BM_ScheduleK2PipelineToEP32)
    ->ArgName("rank")
    ->Arg(0)
    ->Arg(kTrainers)
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace loadplan::bench

BENCHMARK_MAIN();
