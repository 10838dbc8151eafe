#include "backend/movement.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>

#include <map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "backend/convert.h"
#include "geometry/compose.h"

namespace loadplan {
namespace {

// A label is the byte offset of an element in its storage, with the argument above.
constexpr int kArgumentShift = 48;
// More runs than this are no geometry any more: the operator is then a node.
constexpr int64_t kMaxRuns = int64_t{1} << 19;
constexpr int64_t kOffsetMask = (int64_t{1} << kArgumentShift) - 1;

const std::vector<MovementRule>& Rules() {
  static const auto* const rules = new std::vector<MovementRule>{
      {"aten::flip", {"self"}},
      {"aten::gather", {"self"}},
      {"aten::index.Tensor", {"self"}},
      {"aten::index_copy", {"self", "source"}},
      {"aten::index_copy_", {"self", "source"}},
      {"aten::index_fill.int_Scalar", {"self", "value"}},
      {"aten::index_fill_.int_Scalar", {"self", "value"}},
      {"aten::index_put", {"self", "values"}, "accumulate"},
      {"aten::index_put_", {"self", "values"}, "accumulate"},
      {"aten::index_select", {"self"}},
      {"aten::masked_fill.Scalar", {"self", "value"}},
      {"aten::masked_fill.Tensor", {"self", "value"}},
      {"aten::masked_fill_.Scalar", {"self", "value"}},
      {"aten::masked_fill_.Tensor", {"self", "value"}},
      {"aten::masked_select", {"self"}},
      {"aten::repeat_interleave.self_Tensor", {"self"}},
      {"aten::repeat_interleave.self_int", {"self"}},
      {"aten::roll", {"self"}},
      {"aten::rot90", {"self"}},
      {"aten::scatter.src", {"self", "src"}},
      {"aten::scatter_.src", {"self", "src"}},
      {"aten::take", {"self"}},
      {"aten::take_along_dim", {"self"}},
      {"aten::where.ScalarOther", {"self", "other"}},
      {"aten::where.ScalarSelf", {"self", "other"}},
      {"aten::where.self", {"self", "other"}},
  };
  return *rules;
}

// Runs of labels with one step, along the last dimension of the result.
class RunReader {
 public:
  RunReader(Index to_item, int64_t in_place) : itemsize_(to_item), in_place_(in_place) {}

  // `count` labels at `labels`, whose elements lie at `to_offset`, `to_stride` apart (bytes).
  void Row(const int64_t* labels, int64_t count, Index to_offset, Index to_stride) {
    for (int64_t begin = 0; begin < count;) {
      int64_t end = begin + 1;
      const int64_t step = end < count ? labels[end] - labels[begin] : 0;
      const int64_t argument = labels[begin] >> kArgumentShift;
      while (end < count && labels[end] - labels[end - 1] == step &&
             labels[end] >> kArgumentShift == argument)
        ++end;
      // A change of argument, or one odd label, ends a run of one.
      Add(argument, labels[begin] & kOffsetMask, end - begin > 1 ? step : 0, end - begin,
          to_offset + begin * to_stride, to_stride);
      begin = end;
    }
  }

  int64_t num_runs() const { return num_runs_; }

  std::vector<Move> Take() {
    std::vector<Move> moves;
    for (auto& [argument, pieces] : pieces_) {
      for (StridedMap& map : MergePieces(std::move(pieces)))
        moves.push_back({argument, std::move(map)});
    }
    return moves;
  }

 private:
  void Add(int64_t argument, Index from_offset, Index step, int64_t count, Index to_offset,
           Index to_stride) {
    if (argument == in_place_ && from_offset == to_offset && (count == 1 || step == to_stride))
      return;
    ++num_runs_;
    pieces_[argument].push_back(StridedMap::Unchecked({count}, {to_offset, {to_stride}, itemsize_},
                                                      {from_offset, {step}, itemsize_},
                                                      /*is_cast=*/false));
  }

  const Index itemsize_;
  const int64_t in_place_;
  int64_t num_runs_ = 0;
  std::map<int64_t, std::vector<StridedMap>> pieces_;
};

}  // namespace

const MovementRule* FindMovementRule(const c10::OperatorName& name) {
  static const auto* const by_name = [] {
    auto* const index = new absl::flat_hash_map<std::string, const MovementRule*>;
    for (const MovementRule& rule : Rules()) index->emplace(std::string(rule.op), &rule);
    return index;
  }();
  const auto found = by_name->find(c10::toString(name));
  return found == by_name->end() ? nullptr : found->second;
}

// The strides of an operator's result depend on those of its arguments, so labels have them
// too. Where elements share memory they share their label.
at::Tensor LabelsOf(const at::Tensor& tensor, int64_t argument) {
  const auto itemsize = static_cast<int64_t>(tensor.element_size());
  const int64_t first = (argument << kArgumentShift) + tensor.storage_offset() * itemsize;
  int64_t span = tensor.numel() == 0 ? 0 : 1;
  for (int64_t d = 0; d < tensor.dim() && span > 0; ++d)
    span += (tensor.size(d) - 1) * tensor.stride(d);
  if (span > kMaxLabels) return {};
  return at::arange(span).mul_(itemsize).add_(first).as_strided(tensor.sizes(), tensor.strides());
}

namespace {

// Reads rows of labels along the last dimension; false over `max_runs`.
bool ReadRows(const at::Tensor& labels, const at::Tensor& to, int64_t max_runs, RunReader& reader) {
  const at::Tensor dense = labels.contiguous();
  const auto itemsize = static_cast<Index>(to.element_size());
  const int64_t* const values = dense.const_data_ptr<int64_t>();
  const int64_t columns = to.dim() == 0 ? 1 : to.size(-1);
  const Index to_stride = to.dim() == 0 ? itemsize : to.stride(-1) * itemsize;
  for (int64_t row = 0; row * columns < dense.numel(); ++row) {
    Index offset = to.storage_offset() * itemsize;
    int64_t rest = row;
    for (int64_t d = to.dim() - 2; d >= 0; --d) {
      offset += rest % to.size(d) * to.stride(d) * itemsize;
      rest /= to.size(d);
    }
    reader.Row(values + row * columns, columns, offset, to_stride);
    if (reader.num_runs() > max_runs) return false;
  }
  return true;
}

}  // namespace

std::optional<std::vector<Move>> MovesOf(const at::Tensor& labels, const at::Tensor& to,
                                         int64_t in_place) {
  if (labels.numel() == 0) return std::vector<Move>{};
  const auto itemsize = static_cast<Index>(to.element_size());
  // Rows that an index permutes are whole runs; columns that it permutes are runs
  // only when read down the first dimension.
  const bool tall = to.dim() > 1;
  RunReader along_last(itemsize, in_place);
  if (ReadRows(labels, to, tall ? labels.numel() / 4 + 64 : kMaxRuns, along_last))
    return along_last.Take();
  RunReader along_first(itemsize, in_place);
  if (ReadRows(labels.movedim(0, -1), to.movedim(0, -1), kMaxRuns, along_first))
    return along_first.Take();
  return std::nullopt;
}

}  // namespace loadplan
