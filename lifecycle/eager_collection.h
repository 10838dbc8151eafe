// EagerCollection: the checkpoint tensors of an update that go through the loader, the fallback
// names of its plan, kept until all of them are there: they are given to one call of it.
#ifndef LOADPLAN_LIFECYCLE_EAGER_COLLECTION_H_
#define LOADPLAN_LIFECYCLE_EAGER_COLLECTION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "plan/load_plan.h"

namespace loadplan {

class EagerCollection {
 public:
  // `plan` must outlive the collection. Tensors are kept on `device`.
  EagerCollection(const LoadPlan& plan, at::Device device) : plan_(plan), device_(device) {}

  // Keeps bytes of its own: the sender may reuse its buffer. Raises what torch raises.
  void Add(std::int32_t source, const at::Tensor& tensor);

  // The place of the next arrival, which is taken by this.
  std::int64_t NextArrival() { return num_arrivals_++; }
  // Takes a tensor that nobody else holds, on the device. It came in at `arrival`.
  void Give(std::int32_t source, at::Tensor tensor, std::int64_t arrival);
  at::Device device() const { return device_; }

  // Tensors that have been added and not been taken.
  std::size_t size() const { return arrived_.size(); }

  // The names in the order of the call, each with its tensor, which the collection gives away:
  // declared order, except that names which overlap one another (and fall back for it) share
  // their places out in the order of their arrivals.
  //
  // Example: `a`, `b`, `c` declared, `a` and `c` overlap, arrived as c, a, b: c, b, a.
  std::vector<std::pair<std::int32_t, at::Tensor>> Take();

 private:
  const LoadPlan& plan_;
  at::Device device_;
  struct Arrived {
    std::int64_t arrival;
    std::int32_t source;
    at::Tensor tensor;
  };
  std::int64_t num_arrivals_ = 0;
  std::vector<Arrived> arrived_;
};

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_EAGER_COLLECTION_H_
