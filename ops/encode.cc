#include "ops/encode.h"

#include <algorithm>
#include <set>

namespace loadplan {
namespace {

void AppendSide(const MapSide& side, std::vector<std::int64_t>& numbers) {
  numbers.push_back(side.byte_offset);
  numbers.insert(numbers.end(), side.byte_strides.begin(), side.byte_strides.end());
  numbers.push_back(side.itemsize);
}

void AppendBoxes(std::span<const Box> boxes, std::vector<std::int64_t>& numbers) {
  for (const Box& box : boxes) {
    numbers.push_back(box.rank());
    for (const Interval& interval : box.intervals()) {
      numbers.push_back(interval.start);
      numbers.push_back(interval.stop);
    }
  }
}

}  // namespace

std::vector<std::int64_t> EncodeBoxes(std::span<const Box> boxes) {
  std::vector<std::int64_t> numbers;
  AppendBoxes(boxes, numbers);
  return numbers;
}

std::vector<std::int64_t> EncodeLandings(std::span<const Landing> landings) {
  std::vector<std::int64_t> numbers;
  for (const Landing& landing : landings) {
    const auto count = [](const std::vector<Box>& boxes) {
      return static_cast<std::int64_t>(boxes.size());
    };
    numbers.insert(numbers.end(), {landing.target, static_cast<std::int64_t>(landing.origin.kind),
                                   landing.origin.index, landing.is_hull ? 1 : 0,
                                   count(landing.from), count(landing.to)});
    AppendBoxes(landing.from, numbers);
    AppendBoxes(landing.to, numbers);
  }
  return numbers;
}

EncodedWrites EncodeWrites(std::span<const WriteItem> items,
                           std::span<const std::string> storage_names) {
  EncodedWrites encoded;
  for (const WriteItem& item : items) {
    std::vector<std::int64_t>& numbers = encoded.numbers;
    const DimVector& shape = item.map.shape();
    numbers.push_back(static_cast<std::int64_t>(shape.size()));
    numbers.insert(numbers.end(), shape.begin(), shape.end());
    AppendSide(item.map.to(), numbers);
    AppendSide(item.map.from(), numbers);
    numbers.push_back(static_cast<std::int64_t>(item.casts.size()));
    for (const CastStep& step : item.casts) numbers.push_back(step.dtype.code);
    encoded.targets.push_back(storage_names[static_cast<std::size_t>(item.target)]);
  }
  return encoded;
}

std::vector<std::int64_t> InputNames(const LoadPlan& plan, std::int32_t entry) {
  std::set<std::int64_t> names;
  for (const Program& program : plan.programs()) {
    if (!std::ranges::binary_search(program.names, entry)) continue;
    names.insert(program.names.begin(), program.names.end());
  }
  return {names.begin(), names.end()};
}

}  // namespace loadplan
