#include "backend/stand_ins.h"

#include <ATen/ops/full.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstddef>

#include "backend/mode.h"

namespace loadplan {

void StandIns::Rewind() {
  const std::lock_guard<std::mutex> lock(mutex_);
  last_.clear();
}

int StandIns::Choose(const std::string& site) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_answers_;
  last_ = site;
  const auto found = turns_.find(site);
  return round_ + (found == turns_.end() ? 0 : found->second);
}

bool StandIns::Turn() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (last_.empty()) return false;
  ++turns_[last_];
  return true;
}

int StandIns::num_answers() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_answers_;
}

at::Tensor StandIns::Make(const at::Tensor& like, int choice) const {
  const ModeOff mode_off;
  const at::ScalarType dtype = like.scalar_type();
  // The first two lie on both sides of any likely threshold and are nobody's default; the
  // others are what a loader may insist on (an index, a scale).
  constexpr std::array<double, 5> kValues = {-1009, 1013, 0, 1, 2};
  double value = kValues[static_cast<std::size_t>(choice) % kValues.size()];
  if (dtype == at::kBool) value = choice % 2;
  if (c10::elementSize(dtype) == 1) value = std::clamp(value, 0.0, 100.0);
  return at::full({}, value, at::TensorOptions(at::kDouble)).to(dtype).expand(like.sizes());
}

}  // namespace loadplan
