// The classes behind `loadplan.Shards` and `loadplan.ShardSchedule`.
#ifndef LOADPLAN_OPS_SHARD_CLASSES_H_
#define LOADPLAN_OPS_SHARD_CLASSES_H_

#include <torch/custom_class.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lifecycle/reload_session.h"
#include "transfer/exchange.h"
#include "transfer/shard_set.h"

namespace loadplan {

class ShardSetClass : public torch::CustomClassHolder {
 public:
  using Ints = std::vector<std::int64_t>;

  // `shape`, dtype code, and per piece its rank with start and stop of each dimension. Returns the
  // number by which `add` knows the geometry.
  std::int64_t add_geometry(const Ints& shape, std::int64_t dtype, const Ints& pieces);
  // `pieces`: which pieces of the geometry `tensors` are.
  void add(const std::string& name, std::int64_t geometry, const Ints& pieces,
           const std::vector<at::Tensor>& tensors);
  // Other tensors for the same pieces.
  void replace(const std::string& name, const std::vector<at::Tensor>& tensors);
  // Raises where a name is no exact cover.
  void check();

  const std::shared_ptr<ShardSet>& shards() const { return shards_; }

 private:
  std::shared_ptr<ShardSet> shards_ = std::make_shared<ShardSet>();
};

class ShardExchangeClass : public torch::CustomClassHolder {
 public:
  using Ints = std::vector<std::int64_t>;
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // Not connected yet.
  explicit ShardExchangeClass(Group group) : group_(std::move(group)) {}
  // Before `connect`. Seconds and bytes as in ExchangeOptions.
  void set_options(double timeout, std::int64_t max_bytes_in_flight, std::int64_t bucket_nbytes,
                   bool must_hold);
  // `problem`: empty, or why this rank cannot take part.
  void connect(ExchangeRoles roles, const std::string& problem);
  // For one update, instead of `connect`: all ranks read `paths` together.
  void connect_files(const std::shared_ptr<const BoundPlan>& plan,
                     const std::vector<std::string>& paths, bool skips_undeclared);
  // Bytes that this rank read from files.
  std::int64_t read_nbytes() const { return files_ == nullptr ? 0 : files_->nbytes_read(); }
  // An update in two steps, as ShardExchange has them. Gives what was sent, received, of it in
  // place, copied; messages.
  void move(const std::shared_ptr<ShardSet>& shards, ReloadSession* session,
            const std::string& problem);
  Ints settle(ReloadSession* session, const std::string& problem);
  // Tells the others that this rank goes no further, in whichever call they wait for it: `connect`
  // or an update. Nothing where they know. May raise.
  void fail(ReloadSession* session, const std::string& problem);
  std::string report() const;
  // ranks; links, row by row; copied, whole tensors, bounds of the busiest sender and receiver
  std::tuple<std::int64_t, Ints, Ints> traffic() const;

 private:
  ShardExchange& connected() const;

  Group group_;
  ExchangeOptions options_;
  bool has_called_ = false;  // `connect` or `connect_files`: the others have heard of it
  std::shared_ptr<FileShards> files_;
  std::unique_ptr<ShardExchange> exchange_;
};

void DefineShardSet(torch::Library& library);

// After the classes of plans and sessions, which it takes.
template <typename Plan, typename Session>
void DefineShardExchange(torch::Library& library) {
  using Self = c10::intrusive_ptr<ShardExchangeClass>;
  using MaybeShards = std::optional<c10::intrusive_ptr<ShardSetClass>>;
  using MaybeSession = std::optional<c10::intrusive_ptr<Session>>;
  const auto shards_of = [](const MaybeShards& shards) {
    return shards.has_value() ? (*shards)->shards() : nullptr;
  };
  const auto session_of = [](const MaybeSession& session) {
    return session.has_value() ? &(*session)->session() : nullptr;
  };
  library.class_<ShardExchangeClass>("ShardExchange")
      .def(torch::init<ShardExchangeClass::Group>())
      .def("set_options", &ShardExchangeClass::set_options)
      .def("connect",
           [shards_of](const Self& self, const MaybeShards& shards,
                       const std::optional<c10::intrusive_ptr<Plan>>& plan,
                       const std::string& problem) {
             self->connect({shards_of(shards), plan.has_value() ? (*plan)->bound() : nullptr, {}},
                           problem);
           })
      .def("connect_files",
           [](const Self& self, const c10::intrusive_ptr<Plan>& plan,
              const std::vector<std::string>& paths, bool skips_undeclared) {
             self->connect_files(plan->bound(), paths, skips_undeclared);
           })
      .def("move",
           [=](const Self& self, const MaybeShards& shards, const MaybeSession& session,
               const std::string& problem) {
             self->move(shards_of(shards), session_of(session), problem);
           })
      .def("settle",
           [=](const Self& self, const MaybeSession& session, const std::string& problem) {
             return self->settle(session_of(session), problem);
           })
      .def("fail", [=](const Self& self, const MaybeSession& session,
                       const std::string& problem) { self->fail(session_of(session), problem); })
      .def("read_nbytes", &ShardExchangeClass::read_nbytes)
      .def("report", &ShardExchangeClass::report)
      .def("traffic", &ShardExchangeClass::traffic);
}

}  // namespace loadplan

#endif  // LOADPLAN_OPS_SHARD_CLASSES_H_
