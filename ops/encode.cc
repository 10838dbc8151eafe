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

std::int64_t HowOf(const Landing& landing) {
  return (landing.is_hull ? 1 : 0) | (landing.is_transposed ? 2 : 0) |
         (landing.is_reversed ? 4 : 0) | (landing.is_repeated ? 8 : 0);
}

// FNV-1a over words of eight bytes. Each item begins with its size: no two lists run together.
class Digester {
 public:
  void Add(const std::vector<std::int64_t>& numbers) {
    Mix(numbers.size());
    for (const std::int64_t number : numbers) Mix(static_cast<std::uint64_t>(number));
  }
  void Add(const std::string& text) {
    Mix(text.size());
    for (const char byte : text) Mix(static_cast<std::uint8_t>(byte));
  }
  std::int64_t digest() const { return static_cast<std::int64_t>(digest_); }

 private:
  void Mix(std::uint64_t word) {
    digest_ = (digest_ ^ word) * 0x100000001b3U;
    digest_ ^= digest_ >> 29;  // high bits reach low ones too
  }

  std::uint64_t digest_ = 0xcbf29ce484222325U;
};

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
    numbers.insert(numbers.end(),
                   {landing.target, static_cast<std::int64_t>(landing.origin.kind),
                    landing.origin.index, HowOf(landing), count(landing.from), count(landing.to)});
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

std::vector<std::vector<std::int64_t>> InputNames(const LoadPlan& plan) {
  std::vector<std::vector<std::int64_t>> names(plan.entries().size());
  for (const Program& program : plan.programs()) {
    for (const std::int32_t entry : program.names) {
      std::vector<std::int64_t>& of_entry = names[static_cast<std::size_t>(entry)];
      of_entry.insert(of_entry.end(), program.names.begin(), program.names.end());
    }
  }
  for (std::vector<std::int64_t>& of_entry : names) {
    std::ranges::sort(of_entry);
    const auto rest = std::ranges::unique(of_entry);
    of_entry.erase(rest.begin(), rest.end());
  }
  return names;
}

std::vector<std::int64_t> EntryDigests(const LoadPlan& plan,
                                       std::span<const std::string> storage_names) {
  std::vector<std::int64_t> digests;
  const std::vector<std::vector<std::int64_t>> inputs = InputNames(plan);
  for (std::size_t i = 0; i < plan.entries().size(); ++i) {
    const auto entry = static_cast<std::int32_t>(i);
    const SourceTensor& source = plan.sources()[i];
    const EncodedWrites writes = EncodeWrites(plan.writes_of(entry), storage_names);
    Digester digester;
    digester.Add(std::vector<std::int64_t>(source.shape.begin(), source.shape.end()));
    digester.Add(std::vector<std::int64_t>{static_cast<std::int64_t>(source.dtype.code),
                                           static_cast<std::int64_t>(plan.entries()[i].kind)});
    digester.Add(plan.entries()[i].reason);
    digester.Add(EncodeBoxes(plan.Reads(entry)));
    digester.Add(writes.numbers);
    for (const std::string& target : writes.targets) digester.Add(target);
    for (const std::int64_t input : inputs[i]) {
      digester.Add(plan.sources()[static_cast<std::size_t>(input)].name);
    }
    digests.push_back(digester.digest());
  }
  return digests;
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
