#include "transfer/exchange.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "lifecycle/annotate.h"
#include "lifecycle/attempt.h"
#include "transfer/exchange_run.h"
#include "transfer/reader_table.h"

namespace loadplan {
namespace {

// FNV-1a: the same on every rank, and apart for texts that differ by accident.
std::int64_t Digest(std::string_view bytes, std::uint64_t digest = 0xcbf29ce484222325U) {
  for (const char byte : bytes) {
    digest ^= static_cast<std::uint8_t>(byte);
    digest *= 0x100000001b3U;
  }
  return static_cast<std::int64_t>(digest);
}

// The compact form of a table, or nothing.
struct Sections {
  std::string names;
  std::string geometries;

  static Sections Of(const GeometryTable* table) {
    if (table == nullptr) return {};
    return {GeometryTable::EncodeNames(*table->names()), table->EncodeGeometries()};
  }
};

// (digest, number of bytes) of a section; which rank it is from does not matter.
using SectionId = std::pair<std::int64_t, std::int64_t>;

// What the ranks have to say, each section sent once however many ranks say it.
class TableExchange {
 public:
  // names and geometries of what is held, then of what is needed
  static constexpr std::size_t kSections = 4;

  TableExchange(const GeometryTable* held, const GeometryTable* needed) {
    Sections of_held = Sections::Of(held);
    Sections of_needed = Sections::Of(needed);
    own_ = {std::move(of_held.names), std::move(of_held.geometries), std::move(of_needed.names),
            std::move(of_needed.geometries)};
  }

  void AppendIds(std::vector<std::int64_t>& header) const {
    for (const std::string& section : own_) {
      header.push_back(Digest(section));
      header.push_back(static_cast<std::int64_t>(section.size()));
    }
  }

  // `ids`: of all ranks, what AppendIds gave there.
  absl::StatusOr<std::vector<RankTables>> Run(PeerGroup& peers,
                                              std::span<const std::vector<SectionId>> ids) {
    for (std::size_t rank = 0; rank < ids.size(); ++rank) {
      for (std::size_t k = 0; k < kSections; ++k) {
        const SectionId& id = ids[rank][k];
        if (id.second == 0 || bytes_.contains(id)) continue;
        absl::StatusOr<std::string> bytes =
            peers.Broadcast(own_[k], id.second, static_cast<std::int32_t>(rank));
        if (!bytes.ok()) return bytes.status();
        peers.NoteProgress();
        bytes_.emplace(id, *std::move(bytes));
      }
    }
    std::vector<RankTables> ranks;
    for (const std::vector<SectionId>& of_rank : ids) {
      RankTables tables;
      absl::Status status = Decode(of_rank[0], of_rank[1], tables.held);
      if (status.ok()) status = Decode(of_rank[2], of_rank[3], tables.needed);
      if (!status.ok()) return status;
      ranks.push_back(std::move(tables));
    }
    return ranks;
  }

 private:
  absl::Status Decode(const SectionId& names, const SectionId& geometries,
                      std::shared_ptr<const GeometryTable>& table) {
    if (geometries.second == 0) return absl::OkStatus();
    std::shared_ptr<const GeometryTable>& known = tables_[{names, geometries}];
    if (known == nullptr) {
      std::shared_ptr<const GeometryTable::Names>& list = names_[names];
      if (list == nullptr) {
        auto decoded = GeometryTable::DecodeNames(bytes_[names]);
        if (!decoded.ok()) return decoded.status();
        list = *std::move(decoded);
      }
      absl::StatusOr<GeometryTable> decoded = GeometryTable::Decode(list, bytes_[geometries]);
      if (!decoded.ok()) return decoded.status();
      known = std::make_shared<const GeometryTable>(*std::move(decoded));
    }
    table = known;
    return absl::OkStatus();
  }

  std::array<std::string, kSections> own_;
  absl::flat_hash_map<SectionId, std::string> bytes_;
  absl::flat_hash_map<SectionId, std::shared_ptr<const GeometryTable::Names>> names_;
  absl::flat_hash_map<std::pair<SectionId, SectionId>, std::shared_ptr<const GeometryTable>>
      tables_;
};

// `key`: of this schedule and no other one. Two models may be laid out alike.
std::int64_t DigestOf(const Schedule& schedule, const std::string& key) {
  std::string text = absl::StrCat(key, " ", schedule.names().size(), " ", schedule.num_classes());
  for (const Index nbytes : schedule.traffic().links) absl::StrAppend(&text, " ", nbytes);
  return Digest(text);
}

// Also whether what this process has of replicas is the same.
absl::Status BeginRead(ShardSet& shards, const ReloadSession* session) {
  absl::Status status =
      shards.BeginRead(session == nullptr ? std::vector<at::Tensor>() : session->LiveStorages());
  return status.ok() ? shards.CheckAgreement() : status;
}

struct EndsRead {
  void operator()(ShardSet* shards) const { shards->EndRead(); }
};

}  // namespace

absl::StatusOr<std::unique_ptr<ShardExchange>> ShardExchange::Connect(
    c10::intrusive_ptr<c10d::ProcessGroup> group, ExchangeRoles roles,
    const ExchangeOptions& options, const absl::Status& problem) {
  std::unique_ptr<ShardExchange> exchange(
      new ShardExchange(std::move(group), std::move(roles), options));
  if (absl::Status status = exchange->MakeSchedule(problem); !status.ok()) return status;
  return exchange;
}

absl::Status ShardExchange::DescribeOwn(std::shared_ptr<const GeometryTable>& held,
                                        std::shared_ptr<const GeometryTable>& needed) {
  if (roles_.shards != nullptr) {
    absl::StatusOr<std::shared_ptr<const GeometryTable>> table = roles_.shards->Table();
    if (!table.ok()) return table.status();
    if (absl::Status status = roles_.shards->CheckPresent(peers_.rank()); !status.ok()) {
      return Annotate(status, absl::StrCat(". Ranks of shards are those of the group, in which "
                                           "this process is rank ",
                                           peers_.rank(), "; `ranks=` renumbers those of a mesh"));
    }
    held = *std::move(table);
  }
  if (roles_.plan != nullptr) {
    absl::StatusOr<GeometryTable> table = NeededTable(roles_.plan->plan(), peers_.rank());
    if (!table.ok()) return table.status();
    needed = std::make_shared<const GeometryTable>(*std::move(table));
  }
  return absl::OkStatus();
}

absl::Status ShardExchange::MakeSchedule(const absl::Status& problem) {
  std::shared_ptr<const GeometryTable> held;
  std::shared_ptr<const GeometryTable> needed;
  std::optional<TableExchange> tables;
  absl::Status own = problem;
  if (own.ok()) own = Attempt("describing tensors", [&] { return DescribeOwn(held, needed); });
  if (own.ok()) {
    own = Attempt("describing tensors", [&] { tables.emplace(held.get(), needed.get()); });
  }
  std::vector<std::int64_t> header = {static_cast<std::int64_t>(GroupCall::kSchedule),
                                      options_.schedule.bucket_nbytes,
                                      options_.schedule.solo_nbytes,
                                      options_.schedule.must_cover ? 1 : 0,
                                      options_.schedule.must_hold ? 1 : 0,
                                      roles_.files != nullptr ? 1 : 0};
  const std::size_t num_common = header.size();
  header.push_back(roles_.files != nullptr ? Digest(roles_.files->Description()) : 0);
  const std::size_t num_fixed = header.size();
  if (tables.has_value()) tables->AppendIds(header);
  std::string key;
  const auto headers = peers_.Consult(header, own, &key);
  if (!headers.ok()) return headers.status();
  std::vector<std::vector<SectionId>> ids;
  for (std::size_t rank = 0; rank < headers->size(); ++rank) {
    const std::vector<std::int64_t>& theirs = (*headers)[rank];
    if (!std::equal(header.begin(), header.begin() + static_cast<std::ptrdiff_t>(num_common),
                    theirs.begin())) {
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", rank, " schedules with other options than rank ", peers_.rank(),
                       ", or with another version of loadplan; use the same on all ranks"));
    }
    if (theirs[num_common] != header[num_common]) {
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", rank, " reads other files than rank ", peers_.rank(),
                       ", or they were written meanwhile; give the same files to all ranks"));
    }
    ids.emplace_back();
    for (std::size_t i = num_fixed; i < header.size(); i += 2) {
      ids.back().emplace_back(theirs[i], theirs[i + 1]);
    }
  }
  // What fails on one rank from here on, memory that it cannot have for one, ends it for all.
  absl::Status status = Attempt("scheduling", [&]() -> absl::Status {
    if (absl::Status begun = peers_.BeginWatch(key); !begun.ok()) return begun;
    absl::StatusOr<std::vector<RankTables>> ranks = tables->Run(peers_, ids);
    if (!ranks.ok()) return ranks.status();
    if (absl::Status used = UseTables(*std::move(ranks)); !used.ok()) return used;
    digest_ = DigestOf(schedule_, key);
    return absl::OkStatus();
  });
  if (status.ok()) status = peers_.AwaitAll();
  if (!status.ok()) {
    const absl::Status first = peers_.Fail(status);
    // What the tables say every rank finds for itself.
    if (!absl::IsInvalidArgument(status)) status = first;
  }
  peers_.EndWatch();
  return status;
}

absl::Status ShardExchange::UseTables(std::vector<RankTables> ranks) {
  std::shared_ptr<const GeometryTable> readers;
  if (roles_.files != nullptr) {
    absl::StatusOr<GeometryTable> table = ReaderTable(ranks);
    if (!table.ok()) return table.status();
    readers = std::make_shared<const GeometryTable>(*std::move(table));
    for (RankTables& tables_of_rank : ranks) tables_of_rank.held = readers;
  }
  absl::StatusOr<Schedule> schedule = Schedule::Make(ranks, options_.schedule);
  if (!schedule.ok()) return schedule.status();
  schedule_ = *std::move(schedule);
  messages_ = schedule_.MessagesOf(peers_.rank());
  if (readers != nullptr) {
    roles_.files->Assign(*readers, schedule_, messages_, peers_.rank());
  }
  for (const Message& message : messages_) {
    staging_nbytes_ = std::max(staging_nbytes_, message.nbytes);
  }
  if (roles_.plan != nullptr) {
    num_parts_ = schedule_.NumPartsTo(peers_.rank());
    empty_entries_ = EntriesWithoutParts(schedule_, peers_.rank(), roles_.plan->plan());
  }
  return absl::OkStatus();
}

absl::Status ShardExchange::CheckRoles(const std::shared_ptr<ShardSet>& shards,
                                       ReloadSession* session) const {
  if ((shards == nullptr) != (roles_.shards == nullptr)) {
    return absl::InvalidArgumentError(
        shards == nullptr ? "this rank holds shards in the schedule; give them to every update"
                          : "this rank holds no shards in the schedule; schedule with them");
  }
  if ((session == nullptr) != (roles_.plan == nullptr)) {
    return absl::InvalidArgumentError(
        session == nullptr
            ? "this rank receives in the schedule; give its model and plan to every update"
            : "this rank receives nothing in the schedule; schedule with its plan");
  }
  if (session != nullptr && !session->HasPlan(roles_.plan.get())) {
    return absl::FailedPreconditionError(
        "the update has another plan than the schedule; schedule with the new plan");
  }
  if (shards == nullptr || shards == roles_.shards) return absl::OkStatus();
  const auto table = shards->Table();
  if (!table.ok()) return table.status();
  const auto scheduled = roles_.shards->Table();
  if (*(*table)->names() != *(*scheduled)->names() ||
      (*table)->geometry_of() != (*scheduled)->geometry_of() ||
      (*table)->geometries() != (*scheduled)->geometries()) {
    return absl::FailedPreconditionError(
        "the shards lie otherwise than in the schedule; schedule with the new ones");
  }
  return shards->CheckPresent(peers_.rank());
}

absl::StatusOr<ExchangeReceipt> ShardExchange::Update(const std::shared_ptr<ShardSet>& shards,
                                                      ReloadSession* session,
                                                      const absl::Status& problem) {
  if (absl::Status status = Move(shards, session, problem); !status.ok()) return status;
  return Settle(session);
}

absl::Status ShardExchange::Fail(const absl::Status& status, ReloadSession* session) {
  failure_ = status;
  return session == nullptr ? status : session->FailWith(status);
}

absl::Status ShardExchange::Move(const std::shared_ptr<ShardSet>& shards, ReloadSession* session,
                                 const absl::Status& problem) {
  if (failure_.ok() && is_moved_) {
    failure_ = absl::FailedPreconditionError("an update was begun and not ended");
  }
  if (!failure_.ok()) {
    const absl::Status status = absl::FailedPreconditionError(
        absl::StrCat("an earlier exchange of this group failed; make a new group and schedule. It "
                     "failed with: ",
                     std::string(failure_.message())));
    return session == nullptr ? status : session->FailWith(status);
  }
  const std::unique_ptr<ShardSet, EndsRead> read(shards.get());
  const absl::Status own = Attempt("checking shards", [&] {
    absl::Status status = problem.ok() ? CheckRoles(shards, session) : problem;
    return status.ok() && shards != nullptr ? BeginRead(*shards, session) : status;
  });
  std::string key;
  const std::array<std::int64_t, 3> header = {static_cast<std::int64_t>(GroupCall::kUpdate),
                                              digest_, num_updates_};
  const auto headers = peers_.Consult(header, own, &key);
  if (!headers.ok()) return Fail(headers.status(), session);
  for (std::size_t rank = 0; rank < headers->size(); ++rank) {
    const std::vector<std::int64_t>& theirs = (*headers)[rank];
    if (std::equal(header.begin(), header.end(), theirs.begin())) continue;
    return Fail(absl::FailedPreconditionError(
                    absl::StrCat("rank ", rank, " is at another update or schedule than rank ",
                                 peers_.rank(), "; all ranks have to make the same calls")),
                session);
  }
  ++num_updates_;
  // Memory that is being received into stays until the others know.
  std::optional<Run> run;
  absl::Status status = Attempt("exchanging shards", [&] {
    if (absl::Status begun = peers_.BeginWatch(key); !begun.ok()) return begun;
    ShardSource* source = shards.get();
    if (roles_.files != nullptr) source = roles_.files.get();
    return run.emplace(*this, source, session).Move();
  });
  if (!status.ok()) {
    status = peers_.Fail(status);
    peers_.EndWatch();
    return Fail(status, session);
  }
  receipt_ = run->receipt();
  is_moved_ = true;
  return absl::OkStatus();
}

absl::StatusOr<ExchangeReceipt> ShardExchange::Settle(ReloadSession* session,
                                                      const absl::Status& problem) {
  if (!failure_.ok()) return failure_;
  if (!is_moved_) return absl::FailedPreconditionError("no update was begun");
  is_moved_ = false;
  peers_.NoteProgress();
  absl::Status status = problem.ok() ? peers_.AwaitAll() : problem;
  if (!status.ok()) status = peers_.Fail(status);
  peers_.EndWatch();
  if (!problem.ok()) status = problem;
  if (!status.ok()) return Fail(status, session);
  return receipt_;
}

absl::Status LoadShards(const LoadPlan& plan, ShardSet& shards, ReloadSession& session,
                        bool must_hold) {
  const absl::StatusOr<std::shared_ptr<const GeometryTable>> held = shards.Table();
  if (!held.ok()) return session.FailWith(held.status());
  for (const std::string& name : *(*held)->names()) {
    if (plan.Find(name).has_value()) continue;
    return session.FailWith(absl::InvalidArgumentError(
        absl::StrCat("`", name,
                     "` has shards but was not declared when the plan was made; "
                     "declare it and plan again, or leave it out")));
  }
  const std::unique_ptr<ShardSet, EndsRead> read(&shards);
  if (absl::Status status = shards.CheckPresent(std::nullopt); !status.ok()) {
    return session.FailWith(status);
  }
  std::int32_t receiver = 0;
  for (const TensorGeometry& geometry : (*held)->geometries()) {
    for (const ShardPiece& piece : geometry.pieces) receiver = std::max(receiver, piece.rank + 1);
  }
  absl::StatusOr<GeometryTable> needed = NeededTable(plan, receiver);
  if (!needed.ok()) return session.FailWith(needed.status());
  std::vector<RankTables> ranks(static_cast<std::size_t>(receiver) + 1);
  for (std::size_t r = 0; r + 1 < ranks.size(); ++r) ranks[r].held = *held;
  ranks.back().needed = std::make_shared<const GeometryTable>(*std::move(needed));
  // Ranks are names here: there may be few of them, and large ones.
  const absl::StatusOr<Schedule> schedule =
      Schedule::Make(ranks, {.must_hold = must_hold, .counts_traffic = false});
  if (!schedule.ok()) return session.FailWith(schedule.status());
  if (absl::Status status = BeginRead(shards, &session); !status.ok()) {
    return session.FailWith(status);
  }
  Landing landing(*schedule, schedule->NumPartsTo(receiver), session);
  absl::Status status = landing.Begin(plan, EntriesWithoutParts(*schedule, receiver, plan));
  for (const Message& message : schedule->MessagesOf(receiver)) {
    for (const MessagePart& part : message.parts) {
      if (!status.ok()) return status;
      const std::string& name = schedule->names()[static_cast<std::size_t>(part.name)];
      const absl::StatusOr<LocalBytes> bytes =
          shards.Find(name, message.sender, schedule->ChunkOf(part).box);
      if (!bytes.ok()) return session.FailWith(bytes.status());
      status = landing.Land(part, bytes->layout, bytes->side);
    }
  }
  return status;
}

}  // namespace loadplan
