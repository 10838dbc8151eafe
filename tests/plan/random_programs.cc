#include "tests/plan/random_programs.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/testing/log_builder.h"

namespace loadplan::testing {
namespace {

constexpr std::array kTypes = {kUint8, kUint8, kBFloat16, kFloat16, kFloat32};

class Generator {
 public:
  explicit Generator(std::mt19937& generator) : generator_(generator) {}

  RandomProgram Make();

 private:
  Index Draw(Index low, Index high) {  // inclusive
    return std::uniform_int_distribution<Index>(low, high)(generator_);
  }
  bool Chance(int percent) { return Draw(1, 100) <= percent; }

  DimVector DrawShape();
  const DType& DrawType() { return kTypes[static_cast<size_t>(Draw(0, kTypes.size() - 1))]; }
  View DrawView(View view);
  View DrawStep(View view);
  // Views of `to` and `from` of one shape, by narrowing, unit dimensions and expanding.
  void Match(View& to, View& from);
  void AddStorages();
  void AddCopy();
  void AddNode();
  void AddRefusal();
  View DrawSource();
  View DrawDestination();

  std::mt19937& generator_;
  LogBuilder log_;
  std::vector<View> sources_;       // readable: every storage
  std::vector<View> destinations_;  // writable
  bool may_cast_ = false;
  bool may_repeat_ = false;
  bool has_casts_ = false;
};

DimVector Generator::DrawShape() {
  DimVector shape(static_cast<size_t>(Chance(10) ? 0 : Draw(1, 3)));
  for (Index& extent : shape) extent = Chance(1) ? 0 : Draw(1, 6);
  return shape;
}

void Generator::AddStorages() {
  const auto add = [&](const View& view, bool is_writable) {
    sources_.push_back(view);
    if (is_writable) destinations_.push_back(view);
  };
  const DType common = DrawType();
  const auto type = [&] { return Chance(85) ? common : DrawType(); };
  for (Index i = Draw(1, 5); i-- > 0;) {
    add(log_.Source(absl::StrCat("w", i), DrawShape(), type()), Chance(5));
  }
  for (Index i = Draw(1, 3); i-- > 0;) {
    const View target = log_.Target(absl::StrCat("p", i), DrawShape(), type());
    add(target, true);
    add(target, true);
    if (Chance(20)) log_.Alias(absl::StrCat("alias", i), DrawView(target));
  }
  for (Index i = Draw(0, 2); i-- > 0;) add(log_.Temporary(DrawShape(), type()), true);
  for (Index i = Draw(0, 1); i-- > 0;) add(log_.Scratch(0, DrawShape(), type()), true);
  for (Index i = Draw(0, 1); i-- > 0;) add(log_.Constant(1, DrawShape(), type()), false);
}

View Generator::DrawStep(View view) {
  const auto rank = static_cast<Index>(view.layout.shape().size());
  if (rank == 0) return Chance(50) ? view.Unsqueeze(0) : view;
  const auto dim = static_cast<size_t>(Draw(0, rank - 1));
  const Index extent = view.extent(dim);
  switch (Draw(0, 6)) {
    case 0: {
      const Index start = Draw(0, extent / 2);
      const Index stop = Chance(5) ? start : Draw(std::min(start + 1, extent), extent);
      return view.Slice(dim, start, stop, Chance(25) ? 2 : 1);
    }
    case 1:
      return extent > 0 ? view.Select(dim, Draw(0, extent - 1)) : view;
    case 2:
      return view.Transpose(dim, static_cast<size_t>(Draw(0, rank - 1)));
    case 3:
      return view.Unsqueeze(static_cast<size_t>(Draw(0, rank)));
    case 4:
      if (!IsContiguous(view.layout)) return view;
      return Chance(50) || extent % 2 != 0 ? view.Reshape({view.layout.num_elements()})
                                           : view.Reshape({2, view.layout.num_elements() / 2});
    case 5: {  // another dtype of a contiguous last dimension
      const DType& other = DrawType();
      const auto last = static_cast<size_t>(rank - 1);
      const Index row = view.extent(last) * view.layout.itemsize();
      if (row % other.itemsize != 0 || view.layout.byte_strides()[last] != view.layout.itemsize()) {
        return view;
      }
      return view.As(other);
    }
    default: {  // diagonal
      const auto other = static_cast<size_t>(Draw(0, rank - 1));
      if (other == dim || extent != view.extent(other)) return view;
      View diagonal = view.Select(other, 0);
      DimVector strides = diagonal.layout.byte_strides();
      strides[dim > other ? dim - 1 : dim] += view.layout.byte_strides()[other];
      return extent == 0 ? view
                         : diagonal.With(view.layout.byte_offset(), diagonal.layout.shape(),
                                         std::move(strides));
    }
  }
}

View Generator::DrawView(View view) {
  for (Index steps = Draw(0, 3); steps-- > 0;) view = DrawStep(std::move(view));
  return view;
}

void Generator::Match(View& to, View& from) {
  while (to.layout.shape().size() < from.layout.shape().size()) {
    const auto dim =
        static_cast<size_t>(Draw(0, static_cast<Index>(from.layout.shape().size()) - 1));
    from = from.extent(dim) > 0 && Chance(50) ? from.Select(dim, Draw(0, from.extent(dim) - 1))
                                              : from.Transpose(dim, 0);
    if (to.layout.shape().size() < from.layout.shape().size()) to = to.Unsqueeze(0);
  }
  while (from.layout.shape().size() < to.layout.shape().size()) from = from.Unsqueeze(0);
  for (size_t d = 0; d < to.layout.shape().size(); ++d) {
    if (from.extent(d) == 1 && to.extent(d) > 1 && Chance(60)) {
      from = from.Select(d, 0).Expand(d, to.extent(d));
      continue;
    }
    const Index extent = std::min(to.extent(d), from.extent(d));
    const Index to_start = Draw(0, to.extent(d) - extent);
    const Index from_start = Draw(0, from.extent(d) - extent);
    to = to.Slice(d, to_start, to_start + extent);
    from = from.Slice(d, from_start, from_start + extent);
  }
}

View Generator::DrawSource() {
  // Checkpoint tensors come first.
  const auto last = static_cast<Index>(Chance(50) ? log_.input().sources.size() : sources_.size());
  return sources_[static_cast<size_t>(Draw(0, last - 1))];
}

View Generator::DrawDestination() {
  return destinations_[static_cast<size_t>(Draw(0, static_cast<Index>(destinations_.size()) - 1))];
}

void Generator::AddCopy() {
  View to = DrawView(DrawDestination());
  View from = DrawView(DrawSource());
  if (to.dtype != from.dtype && !may_cast_) {
    // Raw bytes, as `view(dtype)` gives them.
    if (to.layout.itemsize() != from.layout.itemsize()) return;
    from.dtype = to.dtype;
  }
  Match(to, from);
  // unfold: windows that share bytes.
  if (may_repeat_ && Chance(20) && !to.layout.shape().empty() && to.extent(0) > 2) {
    View& view = Chance(50) ? to : from;
    const Index windows = view.extent(0) - 1;
    DimVector shape = view.layout.shape();
    DimVector strides = view.layout.byte_strides();
    shape[0] = 2;
    shape.insert(shape.begin(), windows);
    strides.insert(strides.begin(), strides[0]);
    const View unfolded =
        view.With(view.layout.byte_offset(), std::move(shape), std::move(strides));
    View& other = &view == &to ? from : to;
    other = other.Slice(0, 0, 2).Expand(0, windows);
    if (&other == &to && windows > 1) return;
    view = unfolded;
  }
  has_casts_ |= to.dtype != from.dtype && to.layout.num_elements() > 0;
  log_.Copy(to, from);
  StridedMap& map = log_.input().log.copies.back().map;
  if (Chance(10) && !map.shape().empty() && !map.empty()) {  // a flip
    MapSide side = map.from();
    side.byte_offset += (map.shape()[0] - 1) * side.byte_strides[0];
    side.byte_strides[0] = -side.byte_strides[0];
    map = StridedMap::Unchecked(map.shape(), map.to(), side, map.is_cast());
  }
}

void Generator::AddNode() {
  std::vector<View> inputs;
  for (Index i = Draw(0, 2); i-- > 0;) inputs.push_back(DrawView(DrawSource()));
  sources_.push_back(log_.Node(Chance(50) ? "aten::bitwise_xor.Tensor" : "aten::mul.Tensor", inputs,
                               DrawShape(), Chance(10) ? "random numbers" : ""));
}

void Generator::AddRefusal() {
  log_.Refuse("aten::item", "its value is read", "loader.py:7", {DrawView(DrawSource())});
}

RandomProgram Generator::Make() {
  may_cast_ = Chance(20);
  may_repeat_ = Chance(10);
  const bool may_refuse = Chance(10);
  const bool may_compute = Chance(50);
  AddStorages();
  for (Index steps = Draw(1, 12); steps-- > 0;) {
    if (may_compute && Chance(25))
      AddNode();
    else if (may_refuse && Chance(20))
      AddRefusal();
    else
      AddCopy();
  }
  RandomProgram program;
  program.input = std::move(log_.input());
  program.has_casts = has_casts_;
  if (Chance(10)) {
    const auto name =
        static_cast<std::int32_t>(Draw(0, static_cast<Index>(program.input.sources.size()) - 1));
    program.input.fallbacks.emplace_back(name, "an earlier pass gave up on it");
  }
  const Index policy = Draw(0, 9);
  program.input.overlaps = policy == 0  ? OverlapPolicy::kError
                           : policy < 4 ? OverlapPolicy::kFallback
                                        : OverlapPolicy::kLastWins;
  for (const StorageRecord& storage : program.input.log.storages) {
    std::vector<std::uint8_t>& bytes =
        program.initial.emplace_back(static_cast<size_t>(storage.nbytes));
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(Draw(0, 255));
  }
  return program;
}

}  // namespace

std::string Describe(const BuildInput& input) {
  static constexpr std::array kKinds = {"checkpoint", "target",   "temporary",
                                        "scratch",    "constant", "value"};
  std::string text;
  for (size_t s = 0; s < input.log.storages.size(); ++s) {
    const StorageRecord& storage = input.log.storages[s];
    absl::StrAppend(&text, "storage ", s, ": ", kKinds[static_cast<size_t>(storage.kind)], " ",
                    storage.ref, ", ", storage.nbytes, " bytes\n");
  }
  for (const TargetTensor& target : input.targets) {
    absl::StrAppend(&text, target.name, ": storage ", target.storage, " ", ToString(target.layout),
                    "\n");
  }
  const auto add_reads = [&](const std::vector<ReadRecord>& reads) {
    for (const ReadRecord& read : reads) {
      absl::StrAppend(&text, " [", read.storage, " ", ToString(read.layout), "]");
    }
    absl::StrAppend(&text, "\n");
  };
  for (size_t n = 0; n < input.log.nodes.size(); ++n) {
    const NodeRecord& node = input.log.nodes[n];
    absl::StrAppend(&text, "node ", n, " at ", node.time, ": ", node.op, " ", node.not_replayable);
    add_reads(node.inputs);
  }
  for (const RefusalRecord& refusal : input.log.refusals) {
    absl::StrAppend(&text, "refusal at ", refusal.time, ": ", refusal.op);
    add_reads(refusal.inputs);
  }
  for (size_t time = 0; time < input.log.copies.size(); ++time) {
    const CopyRecord& copy = input.log.copies[time];
    absl::StrAppend(&text, "copy ", time, ": ", copy.to, " <- ", copy.from, " ", ToString(copy.map),
                    "\n");
  }
  for (const auto& [name, reason] : input.fallbacks) absl::StrAppend(&text, "given ", name, "\n");
  absl::StrAppend(&text, "policy ", static_cast<int>(input.overlaps), "\n");
  return text;
}

RandomProgram MakeRandomProgram(std::mt19937& generator) { return Generator(generator).Make(); }

}  // namespace loadplan::testing
