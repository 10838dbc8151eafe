// RandomLog: records of random copies and products, and what running them at once leaves.
#ifndef LOADPLAN_TESTS_LIFECYCLE_RANDOM_LOG_H_
#define LOADPLAN_TESTS_LIFECYCLE_RANDOM_LOG_H_

#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/lifecycle/live_log.h"

namespace loadplan::testing {

// Two targets `t0` and `t1`, three sources `a`, `b`, `c`.
class RandomLog {
 public:
  static constexpr Index kExtent = 48;  // elements of every storage

  explicit RandomLog(std::mt19937& gen) : gen_(gen) {
    const DType dtypes[] = {kFloat32, kFloat32, kBFloat16, kFloat16};
    const auto dtype = [&] { return dtypes[gen_() % 4]; };
    std::vector<View> readable;
    for (const char* name : {"t0", "t1"}) {
      targets_.push_back(log_.Target(name, {kExtent}, dtype()));
      Mirror(targets_.back(), log_.target(targets_.size() - 1).clone());
    }
    for (const char* name : {"a", "b", "c"}) {
      readable.push_back(log_.Source(name, {kExtent}, dtype()));
      weights_.push_back(at::randn({kExtent}).to(ToScalarType(readable.back().dtype)));
      Mirror(readable.back(), weights_.back().clone());
    }
    readable.insert(readable.end(), targets_.begin(), targets_.end());
    for (int step = 0; step < 6; ++step) Step(readable);
  }

  // Null where the log has to fall back or be refused: another test's matter.
  std::shared_ptr<const BoundPlan> Bind() const {
    const auto bound = log_.Bind();
    return bound.ok() && !(*bound)->plan().has_fallbacks() ? *bound : nullptr;
  }
  std::vector<LiveTarget>& live() { return log_.live(); }
  const std::vector<at::Tensor>& weights() const { return weights_; }  // by source
  void ExpectLeftAsRecorded() const {
    for (std::size_t i = 0; i < targets_.size(); ++i) {
      EXPECT_TRUE(at::equal(log_.target(i).view(at::kByte), Run(targets_[i]).view(at::kByte)));
    }
  }

 private:
  void Step(const std::vector<View>& readable) {
    DimVector shape(1 + gen_() % 3);
    for (Index& extent : shape) extent = 1 + static_cast<Index>(gen_() % 3);
    View from = RandomView(readable[gen_() % readable.size()], shape, true);
    if (gen_() % 3 == 0) {
      const View other = RandomView(readable[gen_() % readable.size()], shape, true);
      if (other.dtype == from.dtype) {
        const View value = log_.Multiply(from, other);
        Mirror(value, at::mul(Run(from), Run(other)).contiguous());
        from = value;
      }
    }
    const View to = RandomView(targets_[gen_() % targets_.size()], shape, false);
    if (to.storage == from.storage) return;  // copies inside one storage depend on their order
    log_.Copy(to, from);
    Run(to).copy_(Run(from));
  }

  View RandomView(const View& whole, const DimVector& shape, bool is_source) {
    std::vector<std::size_t> order(shape.size());
    for (std::size_t d = 0; d < order.size(); ++d) order[d] = d;
    std::shuffle(order.begin(), order.end(), gen_);
    DimVector strides(shape.size());
    Index stride = 1;
    for (const std::size_t d : order) {
      strides[d] = stride;
      stride *= shape[d];
    }
    Index step = std::max<Index>(1, kExtent / std::max<Index>(stride, 1));
    step = gen_() % 2 == 0 ? 1 : 1 + static_cast<Index>(gen_()) % step;
    for (Index& value : strides) value *= step;
    const Index slack = kExtent - stride * step;
    for (Index& value : strides) {
      if (is_source && gen_() % 6 == 0) value = 0;
    }
    const Index offset = slack > 0 ? static_cast<Index>(gen_()) % slack : 0;
    const Index itemsize = whole.layout.itemsize();
    for (Index& value : strides) value *= itemsize;
    return whole.With(offset * itemsize, shape, strides);
  }

  // The log's storages as real tensors, on which every record is run as it is made.
  void Mirror(const View& view, at::Tensor tensor) {
    mirror_.resize(std::max<std::size_t>(mirror_.size(), Key(view) + 1));
    mirror_[Key(view)] = std::move(tensor);
  }
  at::Tensor Run(const View& view) const {
    return ViewOf(ByteSide::OfStorage(mirror_[Key(view)]), view.layout, ToScalarType(view.dtype));
  }
  static std::size_t Key(const View& view) { return static_cast<std::size_t>(view.storage); }

  std::mt19937& gen_;
  LiveLog log_;
  std::vector<View> targets_;
  std::vector<at::Tensor> weights_;
  std::vector<at::Tensor> mirror_;
};

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_LIFECYCLE_RANDOM_LOG_H_
