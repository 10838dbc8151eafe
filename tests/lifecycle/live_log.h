// LiveLog: a LogBuilder whose targets are real tensors, so that the plan can be executed.
#ifndef LOADPLAN_TESTS_LIFECYCLE_LIVE_LOG_H_
#define LOADPLAN_TESTS_LIFECYCLE_LIVE_LOG_H_

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/convert.h"
#include "lifecycle/byte_copy.h"
#include "lifecycle/reload_session.h"
#include "tests/testing/log_builder.h"

namespace loadplan::testing {

class LiveLog {
 public:
  // Targets come first: their storage ids are those of the TargetSet.
  View Target(const std::string& name, const DimVector& shape, const DType& dtype = kFloat32) {
    const at::IntArrayRef sizes(shape.data(), shape.size());
    targets_.push_back({name, at::full(sizes, 77, ToScalarType(dtype))});
    return log_.Target(name, shape, dtype);
  }
  View Source(const std::string& name, const DimVector& shape, const DType& dtype = kFloat32) {
    return log_.Source(name, shape, dtype);
  }
  View Constant(const at::Tensor& value) {
    const auto captured = static_cast<std::int32_t>(constants_.size());
    constants_.push_back(value);
    return log_.Constant(captured, ToDimVector(value.sizes()), ToDType(value.scalar_type()));
  }
  void Copy(const View& to, const View& from) { log_.Copy(to, from); }
  // `left * right`, with a contiguous result.
  View Multiply(const View& left, const View& right) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::mul", "Tensor");
    auto node = std::make_shared<OperatorNode>(OperatorNode{op, {}, {}, 2, {}});
    node->arguments = {at::Tensor(), at::Tensor()};
    node->slots = {{0, -1, false, MetaOf(left)}, {1, -1, false, MetaOf(right)}};
    const View value = log_.Node("aten::mul.Tensor", {left, right}, left.layout.shape());
    node->results = {MetaOf(value)};
    nodes_.push_back(std::move(node));
    return value;
  }

  absl::StatusOr<std::shared_ptr<const BoundPlan>> Bind(
      OverlapPolicy policy = OverlapPolicy::kLastWins) const {
    absl::StatusOr<LoadPlan> plan = log_.Build(policy);
    if (!plan.ok()) return plan.status();
    auto traced = std::make_shared<TracedPlan>();
    traced->plan = *std::move(plan);
    for (std::size_t i = 0; i < constants_.size(); ++i) {
      traced->constants[static_cast<std::int32_t>(i)] = constants_[i];
    }
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      traced->nodes[static_cast<NodeId>(i)] = nodes_[i];
    }
    absl::StatusOr<TargetSet> targets = TargetSet::Create(targets_);
    if (!targets.ok()) return targets.status();
    return std::make_shared<const BoundPlan>(
        std::move(traced), std::make_shared<const TargetSet>(*std::move(targets)));
  }

  // As if the plan had lost its operators.
  void ForgetNodes() { nodes_.clear(); }

  LogBuilder& log() { return log_; }
  std::vector<LiveTarget>& live() { return targets_; }
  const at::Tensor& target(std::size_t index) const { return targets_[index].tensor; }

 private:
  static ResultMeta MetaOf(const View& view) {
    const DimVector& shape = view.layout.shape();
    ResultMeta meta{{shape.begin(), shape.end()}, {}, ToScalarType(view.dtype)};
    for (const Index stride : view.layout.byte_strides()) {
      meta.strides.push_back(stride / view.layout.itemsize());
    }
    return meta;
  }

  LogBuilder log_;
  std::vector<LiveTarget> targets_;
  std::vector<at::Tensor> constants_;
  std::vector<std::shared_ptr<const OperatorNode>> nodes_;
};

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_LIFECYCLE_LIVE_LOG_H_
