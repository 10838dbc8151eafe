#include "tests/plan/plan_executor.h"

#include <algorithm>
#include <utility>

#include "tests/plan/byte_oracle.h"

namespace loadplan::testing {
namespace {

class Executor {
 public:
  Executor(const LoadPlan& plan, const RecordLog& log, const std::vector<Bytes>& initial)
      : plan_(plan), log_(log), initial_(initial), values_(plan.programs().size()) {
    result_.storages = initial;
    for (const Bytes& bytes : initial) result_.write_counts.emplace_back(bytes.size());
    result_.read_elements.resize(plan.sources().size());
    for (size_t s = 0; s < log.storages.size(); ++s) {
      const StorageRecord& record = log.storages[s];
      if (record.kind == StorageKind::kConstant || record.kind == StorageKind::kScratch) {
        captured_.resize(std::max(captured_.size(), static_cast<size_t>(record.ref) + 1));
        captured_[static_cast<size_t>(record.ref)] = initial[s];
      }
    }
  }

  Execution Run(std::mt19937& generator) {
    for (size_t p = 0; p < plan_.programs().size(); ++p) RunProgram(p);
    std::vector<const WriteItem*> items;
    for (const WriteItem& item : plan_.writes()) items.push_back(&item);
    for (const auto* list : {&plan_.constants(), &plan_.live_copies(), &plan_.value_writes()}) {
      for (const WriteItem& item : *list) items.push_back(&item);
    }
    std::shuffle(items.begin(), items.end(), generator);
    for (const WriteItem* item : items) {
      const auto target = static_cast<size_t>(item->target);
      Move(*item, result_.storages[target], &result_.write_counts[target]);
    }
    return std::move(result_);
  }

 private:
  const Bytes& BytesOf(const Origin& origin) const {
    const auto index = static_cast<size_t>(origin.index);
    switch (origin.kind) {
      case OriginKind::kCheckpoint:
        return initial_[static_cast<size_t>(plan_.sources()[index].storage)];
      case OriginKind::kConstant:
        return captured_[index];
      case OriginKind::kLiveBefore:
        return initial_[index];
      case OriginKind::kValue:
        return values_[index];
    }
    return initial_[0];
  }

  void Move(const WriteItem& item, Bytes& to, std::vector<int>* counts) {
    const Bytes& from = BytesOf(item.origin);
    ForEachItem(item.map, [&](Index to_offset, Index from_offset) {
      Bytes bytes(from.begin() + from_offset,
                  from.begin() + from_offset + item.map.from().itemsize);
      for (size_t c = 1; c < item.casts.size(); ++c) {
        Bytes next(static_cast<size_t>(item.casts[c].dtype.itemsize));
        CastItem(item.casts[c - 1].dtype, item.casts[c].dtype, bytes.data(), next.data());
        bytes = std::move(next);
      }
      for (size_t i = 0; i < bytes.size(); ++i) {
        to.at(static_cast<size_t>(to_offset) + i) = bytes[i];
        if (counts != nullptr) ++counts->at(static_cast<size_t>(to_offset) + i);
      }
      if (item.origin.kind == OriginKind::kCheckpoint) {
        const auto name = static_cast<size_t>(item.origin.index);
        const Index itemsize = plan_.sources()[name].dtype.itemsize;
        for (Index i = 0; i < item.map.from().itemsize; ++i) {
          result_.read_elements[name].insert((from_offset + i) / itemsize);
        }
      }
    });
  }

  void RunProgram(size_t p) {
    const Program& program = plan_.programs()[p];
    std::vector<Bytes> inputs;
    for (const ProgramInput& input : program.inputs) {
      Bytes buffer(static_cast<size_t>(input.layout.Span().stop), 0xee);
      for (const WriteItem& piece : input.pieces) Move(piece, buffer, nullptr);
      Bytes& items = inputs.emplace_back();
      for (const Index offset : ItemOffsets(input.layout)) {
        items.insert(items.end(), buffer.begin() + offset,
                     buffer.begin() + offset + input.layout.itemsize());
      }
    }
    const NodeRecord& node = log_.nodes[static_cast<size_t>(program.node)];
    const StorageRecord& output = log_.storages[static_cast<size_t>(node.outputs[0])];
    values_[p] = RunNode(program.node, static_cast<size_t>(output.nbytes), inputs);
  }

  const LoadPlan& plan_;
  const RecordLog& log_;
  const std::vector<Bytes>& initial_;
  std::vector<Bytes> values_;
  std::vector<Bytes> captured_;
  Execution result_;
};

}  // namespace

Execution Execute(const LoadPlan& plan, const RecordLog& log, const std::vector<Bytes>& initial,
                  std::mt19937& generator) {
  return Executor(plan, log, initial).Run(generator);
}

std::optional<std::vector<Bytes>> ExecuteDests(const LoadPlan& plan, std::int32_t entry,
                                               const std::vector<Bytes>& initial) {
  const std::optional<std::vector<LoadPlan::Dest>> dests = plan.GetDest(entry);
  if (!dests || dests->empty()) return std::nullopt;
  std::vector<Bytes> storages = initial;
  const SourceTensor& source = plan.sources()[static_cast<size_t>(entry)];
  const Bytes& from = initial[static_cast<size_t>(source.storage)];
  for (const LoadPlan::Dest& dest : *dests) {
    // Elements of the box in row-major order.
    DimVector strides(source.shape.size(), source.dtype.itemsize);
    for (size_t d = strides.size(); d-- > 1;) strides[d - 1] = strides[d] * source.shape[d];
    Index offset = 0;
    for (size_t d = 0; d < strides.size(); ++d) {
      offset += dest.box.intervals()[d].start * strides[d];
    }
    const std::vector<Index> from_items = ItemOffsets(
        StridedLayout::Unchecked(offset, dest.box.shape(), strides, source.dtype.itemsize));
    const std::vector<Index> to_items = ItemOffsets(dest.region);
    if (from_items.size() != to_items.size()) return std::vector<Bytes>{};
    for (size_t i = 0; i < to_items.size(); ++i) {
      std::copy_n(from.begin() + from_items[i], source.dtype.itemsize,
                  storages[static_cast<size_t>(dest.storage)].begin() + to_items[i]);
    }
  }
  return storages;
}

}  // namespace loadplan::testing
