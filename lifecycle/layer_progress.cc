#include "lifecycle/layer_progress.h"

#include <algorithm>
#include <numeric>

#include "geometry/at.h"

namespace loadplan {
namespace {

std::int32_t FindRoot(std::vector<std::int32_t>& parents, std::int32_t layer) {
  while (At(parents, layer) != layer) {
    At(parents, layer) = At(parents, At(parents, layer));
    layer = At(parents, layer);
  }
  return layer;
}

}  // namespace

LayerProgress::LayerProgress(const LoadPlan& plan,
                             const std::vector<std::vector<std::int32_t>>& layers_of_storage)
    : group_of_storage_(layers_of_storage.size(), -1), uncovered_(layers_of_storage.size(), false) {
  std::int32_t num_layers = 0;
  for (const auto& layers : layers_of_storage) {
    for (const std::int32_t layer : layers) num_layers = std::max(num_layers, layer + 1);
  }
  std::vector<std::int32_t> parents(static_cast<std::size_t>(num_layers));
  std::iota(parents.begin(), parents.end(), 0);
  std::vector<bool> is_shown(parents.size(), false);
  for (const auto& layers : layers_of_storage) {
    for (const std::int32_t layer : layers) {
      is_shown[static_cast<std::size_t>(layer)] = true;
      // The smaller root stays: groups are in the order of their first layers.
      const std::int32_t a = FindRoot(parents, layers.front());
      const std::int32_t b = FindRoot(parents, layer);
      At(parents, std::max(a, b)) = std::min(a, b);
    }
  }
  std::vector<std::int32_t> group_of_root(parents.size(), -1);
  for (std::int32_t layer = 0; layer < num_layers; ++layer) {
    if (!is_shown[static_cast<std::size_t>(layer)]) continue;
    std::int32_t& group = At(group_of_root, FindRoot(parents, layer));
    if (group < 0) {
      group = static_cast<std::int32_t>(groups_.size());
      groups_.emplace_back();
    }
    At(groups_, group).layers.push_back(layer);
  }
  for (std::size_t s = 0; s < layers_of_storage.size(); ++s) {
    if (layers_of_storage[s].empty()) continue;
    group_of_storage_[s] = At(group_of_root, FindRoot(parents, layers_of_storage[s].front()));
    At(groups_, group_of_storage_[s]).storages.push_back(static_cast<StorageId>(s));
  }

  const auto expect = [this](std::span<const WriteItem> items, Index LayerGroup::*nbytes) {
    for (const WriteItem& item : items) {
      const std::int32_t group = GroupOf(item.target);
      if (group >= 0) At(groups_, group).*nbytes += item.map.nbytes();
    }
  };
  expect(plan.writes(), &LayerGroup::expected_nbytes);
  expect(plan.value_writes(), &LayerGroup::expected_nbytes);
  expect(plan.constants(), &LayerGroup::constant_nbytes);
  expect(plan.live_copies(), &LayerGroup::constant_nbytes);
  for (const UncoveredTarget& item : plan.uncovered()) {
    const StorageId storage = At(plan.targets(), item.target).storage;
    if (item.nbytes == 0 || GroupOf(storage) < 0) continue;
    uncovered_[static_cast<std::size_t>(storage)] = true;
    At(groups_, GroupOf(storage)).has_uncovered = true;
  }
}

void LayerProgress::Count(StorageId storage, Index nbytes) {
  At(groups_, GroupOf(storage)).received_nbytes += nbytes;
}

}  // namespace loadplan
