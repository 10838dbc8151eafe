#include "ops/shard_classes.h"

#include <algorithm>
#include <utility>

#include "backend/convert.h"
#include "lifecycle/attempt.h"
#include "ops/peers_class.h"
#include "ops/raise.h"

namespace loadplan {
std::int64_t ShardSetClass::add_geometry(const Ints& shape, std::int64_t dtype,
                                         const Ints& pieces) {
  TensorGeometry geometry{
      DimVector(shape.begin(), shape.end()), ToDType(static_cast<at::ScalarType>(dtype)), {}};
  const std::size_t width = 1 + 2 * shape.size();
  TORCH_CHECK_VALUE(pieces.size() % width == 0, "a piece is a rank and a box");
  for (std::size_t at = 0; at < pieces.size(); at += width) {
    absl::InlinedVector<Interval, 4> intervals;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      intervals.push_back({pieces[at + 1 + 2 * d], pieces[at + 2 + 2 * d]});
    }
    // What does not fit is refused with the tensor's name, by check().
    const std::int64_t rank = std::clamp<std::int64_t>(pieces[at], -1, kMaxRanks);
    geometry.pieces.push_back({static_cast<std::int32_t>(rank), Box(std::move(intervals))});
  }
  return shards_->AddGeometry(std::move(geometry));
}

void ShardSetClass::add(const std::string& name, std::int64_t geometry, const Ints& pieces,
                        const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(pieces.size() == tensors.size(), "as many pieces as tensors are needed");
  std::vector<ShardSet::LocalShard> local;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    local.push_back({static_cast<std::int32_t>(pieces[i]), tensors[i]});
  }
  Raise(shards_->Add(name, static_cast<std::int32_t>(geometry), std::move(local)));
}

void ShardSetClass::replace(const std::string& name, const std::vector<at::Tensor>& tensors) {
  Raise(shards_->Replace(name, tensors));
}

void ShardSetClass::check() { Raise(CheckCovers(*Value(shards_->Table()))); }

void ShardExchangeClass::set_options(double timeout, std::int64_t max_bytes_in_flight,
                                     std::int64_t bucket_nbytes, bool must_hold) {
  TORCH_CHECK_VALUE(timeout > 0 && max_bytes_in_flight > 0 && bucket_nbytes > 0,
                    "`timeout`, `max_bytes_in_flight` and `bucket_nbytes` have to be positive");
  options_.timeout = Milliseconds(timeout);
  options_.max_bytes_in_flight = max_bytes_in_flight;
  options_.schedule.bucket_nbytes = bucket_nbytes;
  options_.schedule.must_hold = must_hold;
  options_.schedule.solo_nbytes = std::max<Index>(bucket_nbytes / 8, 1);
}

void ShardExchangeClass::connect(ExchangeRoles roles, const std::string& problem) {
  has_called_ = true;
  exchange_ = Value(ShardExchange::Connect(group_, std::move(roles), options_, ProblemOf(problem)));
}

void ShardExchangeClass::connect_files(const std::shared_ptr<const BoundPlan>& plan,
                                       const std::vector<std::string>& paths,
                                       bool skips_undeclared) {
  absl::StatusOr<std::unique_ptr<FileShards>> files = Attempt(
      "opening files", [&] { return FileShards::Open(paths, plan->plan(), skips_undeclared); });
  if (files.ok()) files_ = *std::move(files);
  options_.schedule.must_cover = false;
  has_called_ = true;
  exchange_ = Value(
      ShardExchange::Connect(group_, {.plan = plan, .files = files_}, options_, files.status()));
}

ShardExchange& ShardExchangeClass::connected() const {
  TORCH_CHECK(exchange_ != nullptr, "the schedule was not made; see the error of `connect`");
  return *exchange_;
}

void ShardExchangeClass::move(const std::shared_ptr<ShardSet>& shards, ReloadSession* session,
                              const std::string& problem) {
  Raise(connected().Move(shards, session, ProblemOf(problem)));
}

ShardExchangeClass::Ints ShardExchangeClass::settle(ReloadSession* session,
                                                    const std::string& problem) {
  const ExchangeReceipt receipt = Value(connected().Settle(session, ProblemOf(problem)));
  return {receipt.sent_nbytes, receipt.received_nbytes, receipt.in_place_nbytes,
          receipt.copied_nbytes, receipt.num_messages};
}

void ShardExchangeClass::fail(ReloadSession* session, const std::string& problem) {
  if (!has_called_) return connect({}, problem);
  if (exchange_ == nullptr || exchange_->has_failed()) return;  // the others know
  if (exchange_->is_moved()) {
    (void)settle(session, problem);
  } else {
    move(nullptr, session, problem);
  }
}

std::string ShardExchangeClass::report() const { return connected().schedule().Report(); }

std::tuple<std::int64_t, ShardExchangeClass::Ints, ShardExchangeClass::Ints>
ShardExchangeClass::traffic() const {
  const Traffic& traffic = connected().schedule().traffic();
  return {traffic.num_ranks,
          traffic.links,
          {traffic.local_nbytes, traffic.broadcast_nbytes, traffic.max_sent_bound,
           traffic.max_received_bound}};
}

void DefineShardSet(torch::Library& library) {
  library.class_<ShardSetClass>("ShardSet")
      .def(torch::init<>())
      .def("add_geometry", &ShardSetClass::add_geometry)
      .def("add", &ShardSetClass::add)
      .def("replace", &ShardSetClass::replace)
      .def("check", &ShardSetClass::check);
}

}  // namespace loadplan
