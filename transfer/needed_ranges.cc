#include "transfer/needed_ranges.h"

#include <algorithm>
#include <utility>

namespace loadplan {
namespace {

struct Dim {
  Index stride;
  Index extent;
};

// The bytes that `map` reads, as runs: dimensions whose steps leave no more than `gap` bytes
// between them are filled up, so that a run is at least `gap` bytes away from the next one of its
// dimension.
void AppendRuns(const StridedMap& map, Index gap, std::vector<ByteRange>& runs) {
  if (map.empty()) return;
  Index start = map.from().byte_offset;
  std::vector<Dim> dims;
  for (std::size_t d = 0; d < map.shape().size(); ++d) {
    Index stride = map.from().byte_strides[d];
    const Index extent = map.shape()[d];
    if (stride == 0 || extent == 1) continue;
    if (stride < 0) {
      start += stride * (extent - 1);
      stride = -stride;
    }
    dims.push_back({stride, extent});
  }
  std::ranges::sort(dims, {}, &Dim::stride);
  Index run = map.from().itemsize;
  std::vector<Dim> steps;
  for (const Dim& dim : dims) {
    if (steps.empty() && dim.stride - run <= gap) {
      run += dim.stride * (dim.extent - 1);
    } else {
      steps.push_back(dim);
    }
  }
  std::vector<Index> starts = {start};
  for (const Dim& dim : steps) {
    const std::size_t count = starts.size();
    for (Index i = 1; i < dim.extent; ++i) {
      for (std::size_t k = 0; k < count; ++k) starts.push_back(starts[k] + i * dim.stride);
    }
  }
  for (const Index at : starts) runs.push_back({at, at + run});
}

}  // namespace

std::vector<ByteRange> NeededRanges(const LoadPlan& plan, std::int32_t entry, Index gap) {
  const EntryKind kind = plan.entries()[static_cast<std::size_t>(entry)].kind;
  const Index nbytes = plan.sources()[static_cast<std::size_t>(entry)].nbytes();
  if (kind == EntryKind::kUnneeded || nbytes == 0) return {};
  if (kind == EntryKind::kFallback) return {{0, nbytes}};
  std::vector<ByteRange> runs;
  plan.ForEachRead(entry, [&](const StridedMap& map) { AppendRuns(map, gap, runs); });
  std::ranges::sort(runs, {}, &ByteRange::start);
  std::vector<ByteRange> merged;
  for (const ByteRange& run : runs) {
    if (!merged.empty()) {
      ByteRange& last = merged.back();
      const bool is_apart = last.nbytes() >= kApartNbytes && run.nbytes() >= kApartNbytes;
      if (run.start < last.stop || (run.start - last.stop <= gap && !is_apart)) {
        last.stop = std::max(last.stop, run.stop);
        continue;
      }
    }
    merged.push_back(run);
  }
  return merged;
}

}  // namespace loadplan
