// A pass by hand, for tests of the trace device: targets, checkpoint tensors, and the rule that
// no live byte changes while they are traced.
#ifndef LOADPLAN_TESTS_BACKEND_TRACED_LOADER_H_
#define LOADPLAN_TESTS_BACKEND_TRACED_LOADER_H_

#include <ATen/ATen.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/target_set.h"
#include "backend/trace_session.h"
#include "backend/tracer.h"
#include "gtest/gtest.h"

namespace loadplan::testing {

inline std::string BytesOf(const at::Tensor& tensor) {
  if (!tensor.storage() || tensor.device().is_meta()) return "";
  const c10::Storage& storage = tensor.storage();
  return {static_cast<const char*>(storage.data()), storage.nbytes()};
}

// What `f` raises, in its own words; "" if it returns.
template <typename F>
std::string ErrorOf(const F& f) {
  try {
    f();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Example:
//   TracedLoader loader({{"w", {4}, at::kFloat}}, {{"p", p}});
//   loader.Begin();
//   p.copy_(loader["w"]);
//   EXPECT_EQ(loader.End().kind, PassVerdict::kDone);
class TracedLoader {
 public:
  TracedLoader(std::vector<SourceMeta> metas, std::vector<LiveTarget> targets) {
    for (const LiveTarget& target : targets) {
      before_.push_back(BytesOf(target.tensor));
      live_.push_back(target.tensor);
    }
    targets_ = std::make_shared<const TargetSet>(*TargetSet::Create(std::move(targets)));
    tracer_ = *Tracer::Create(std::move(metas), targets_);
  }
  ~TracedLoader() {
    tracer_->AbandonPass();
    for (std::size_t i = 0; i < live_.size(); ++i) {
      EXPECT_EQ(BytesOf(live_[i]), before_[i])
          << "tracing changed target `" << targets_->targets()[i].name << "`";
    }
  }
  TracedLoader(const TracedLoader&) = delete;
  TracedLoader& operator=(const TracedLoader&) = delete;

  void Begin() {
    const absl::Status status = tracer_->BeginPass();
    ASSERT_TRUE(status.ok()) << status;
    session_ = TraceSession::Current()->shared_from_this();
  }
  // The trace tensor of a name; undefined where the name was given up.
  at::Tensor operator[](const std::string& name) const {
    for (const PassTensor& given : tracer_->pass()) {
      if (tracer_->metas()[static_cast<std::size_t>(given.source)].name == name)
        return given.tensor;
    }
    return {};
  }
  PassVerdict End(const std::string& error = "") { return tracer_->EndPass(error); }
  absl::StatusOr<std::shared_ptr<const TracedPlan>> Plan() {
    return tracer_->BuildPlan(OverlapPolicy::kFallback);
  }

  Tracer& tracer() { return *tracer_; }
  TraceSession& session() { return *session_; }
  const RecordLog& log() const { return session_->log(); }
  const CopyRecord& copy(std::size_t index) const { return log().copies.at(index); }
  StorageKind KindOf(StorageId storage) const {
    return log().storages.at(static_cast<std::size_t>(storage)).kind;
  }

 private:
  std::vector<at::Tensor> live_;
  std::vector<std::string> before_;
  std::shared_ptr<const TargetSet> targets_;
  std::unique_ptr<Tracer> tracer_;
  std::shared_ptr<TraceSession> session_;
};

// Entry `name` of a plan.
inline const PlanEntry& EntryOf(const TracedPlan& traced, const std::string& name) {
  return traced.plan.entries().at(static_cast<std::size_t>(traced.plan.Find(name).value()));
}

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_BACKEND_TRACED_LOADER_H_
