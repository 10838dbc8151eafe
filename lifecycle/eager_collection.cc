#include "lifecycle/eager_collection.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>

namespace loadplan {
namespace {

// The representative of `name` in the sets of names that overlap one another.
std::int32_t Root(std::vector<std::int32_t>& parents, std::int32_t name) {
  auto at = [&](std::int32_t i) -> std::int32_t& { return parents[static_cast<std::size_t>(i)]; };
  while (at(name) != name) {
    at(name) = at(at(name));
    name = at(name);
  }
  return name;
}

}  // namespace

void EagerCollection::Add(std::int32_t source, const at::Tensor& tensor) {
  at::Tensor kept = at::empty(tensor.sizes(), tensor.options().device(device_));
  kept.copy_(tensor);
  Give(source, std::move(kept), NextArrival());
}

void EagerCollection::Give(std::int32_t source, at::Tensor tensor, std::int64_t arrival) {
  arrived_.push_back({arrival, source, std::move(tensor)});
}

std::vector<std::pair<std::int32_t, at::Tensor>> EagerCollection::Take() {
  std::ranges::sort(arrived_, {}, &Arrived::arrival);
  std::vector<std::int32_t> parents(plan_.sources().size());
  std::iota(parents.begin(), parents.end(), 0);
  for (const NameOverlap& overlap : plan_.overlaps()) {
    if (plan_.overlap_policy() != OverlapPolicy::kFallback) break;
    parents[static_cast<std::size_t>(Root(parents, overlap.second))] = Root(parents, overlap.first);
  }
  // Members of one set keep their order of arrival; the sorted places of the set are theirs.
  struct Place {
    std::int32_t root;
    std::int32_t slot;  // declared position
  };
  std::vector<Place> places;
  places.reserve(arrived_.size());
  for (const Arrived& item : arrived_) {
    places.push_back({Root(parents, item.source), item.source});
  }
  std::vector<std::size_t> by_set(arrived_.size());
  std::iota(by_set.begin(), by_set.end(), std::size_t{0});
  std::stable_sort(by_set.begin(), by_set.end(),
                   [&](std::size_t a, std::size_t b) { return places[a].root < places[b].root; });
  std::ranges::sort(places, [](const Place& a, const Place& b) {
    return a.root != b.root ? a.root < b.root : a.slot < b.slot;
  });
  std::vector<std::pair<std::int32_t, std::size_t>> order;  // (slot, index into arrived_)
  order.reserve(arrived_.size());
  for (std::size_t i = 0; i < by_set.size(); ++i) order.emplace_back(places[i].slot, by_set[i]);
  std::ranges::sort(order);
  std::vector<std::pair<std::int32_t, at::Tensor>> call;
  call.reserve(arrived_.size());
  for (const auto& [slot, index] : order) {
    call.emplace_back(arrived_[index].source, std::move(arrived_[index].tensor));
  }
  arrived_.clear();
  return call;
}

}  // namespace loadplan
