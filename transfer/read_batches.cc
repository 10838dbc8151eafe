#include "transfer/read_batches.h"

#include <algorithm>
#include <deque>
#include <utility>

namespace loadplan {
namespace {

// The batches of one file.
class Batcher {
 public:
  explicit Batcher(const BatchLimits& limits) : limits_(limits) {}

  // `offset`: of the tensor in the file.
  void Add(std::int32_t tensor, Index offset, const std::vector<ByteRange>& ranges) {
    Index nbytes = 0;
    for (const ByteRange& range : ranges) nbytes += range.nbytes();
    const bool fits = nbytes == 0 || (nbytes <= limits_.nbytes &&
                                      ranges.back().stop - ranges.front().start <= limits_.span);
    if (nbytes > 0 && (!fits || (current_.nbytes > 0 && !HasRoom(offset, ranges, nbytes)))) Close();
    const bool is_cut = nbytes > limits_.most;
    for (ByteRange range : ranges) {
      while (!range.empty()) {
        Index room = kMaxSegment;
        if (is_cut) {
          if (RoomAt(offset + range.start) <= 0) Close();
          room = std::min(room, RoomAt(offset + range.start));
        }
        if (current_.nbytes == 0) start_ = offset + range.start;
        const Index stop = range.start + std::min(range.nbytes(), room);
        current_.segments.push_back({tensor, {range.start, stop}});
        current_.nbytes += stop - range.start;
        range.start = stop;
      }
    }
    current_.finishes.push_back(tensor);
    if (!fits) Close();
  }

  std::deque<ReadBatch> Take() {
    Close();
    return std::move(batches_);
  }

 private:
  void Close() {
    if (current_.segments.empty() && current_.finishes.empty()) return;
    batches_.push_back(std::exchange(current_, {}));
  }

  bool HasRoom(Index offset, const std::vector<ByteRange>& ranges, Index nbytes) const {
    return current_.nbytes + nbytes <= limits_.nbytes &&
           offset + ranges.back().stop - start_ <= limits_.span;
  }
  // Bytes that can be added, from `offset` of the file on.
  Index RoomAt(Index offset) const {
    if (current_.nbytes == 0) return limits_.nbytes;
    return std::min(limits_.nbytes - current_.nbytes, limits_.span - (offset - start_));
  }

  const BatchLimits limits_;
  std::deque<ReadBatch> batches_;
  ReadBatch current_;
  Index start_ = 0;  // of the first segment, in the file
};

}  // namespace

std::vector<ReadBatch> MakeBatches(const CheckpointFiles& files,
                                   std::span<const std::vector<ByteRange>> ranges,
                                   const std::vector<bool>& skipped, const BatchLimits& limits) {
  std::vector<Batcher> batchers(files.num_files(), Batcher(limits));
  for (std::size_t i = 0; i < files.tensors().size(); ++i) {
    if (skipped[i]) continue;
    const FileTensor& tensor = files.tensors()[i];
    batchers[static_cast<std::size_t>(tensor.file)].Add(static_cast<std::int32_t>(i), tensor.offset,
                                                        ranges[i]);
  }
  std::vector<std::deque<ReadBatch>> per_file;
  for (Batcher& batcher : batchers) per_file.push_back(batcher.Take());
  std::vector<ReadBatch> batches;
  for (bool found = true; found;) {
    found = false;
    for (std::deque<ReadBatch>& left : per_file) {
      if (left.empty()) continue;
      batches.push_back(std::move(left.front()));
      left.pop_front();
      found = true;
    }
  }
  return batches;
}

std::vector<StridedMap> ToMaps(std::span<const ByteRun> runs) {
  std::vector<StridedMap> maps;
  for (std::size_t i = 0; i < runs.size();) {
    std::size_t stop = i + 1;
    Index to_step = 0;
    Index from_step = 0;
    for (; stop < runs.size() && runs[stop].nbytes == runs[i].nbytes; ++stop) {
      const Index to = runs[stop].to - runs[stop - 1].to;
      const Index from = runs[stop].from - runs[stop - 1].from;
      if (stop == i + 1) {
        to_step = to;
        from_step = from;
      } else if (to != to_step || from != from_step) {
        break;
      }
    }
    const Index nbytes = runs[i].nbytes;
    maps.push_back(StridedMap::Unchecked({static_cast<Index>(stop - i)},
                                         {runs[i].to, {to_step}, nbytes},
                                         {runs[i].from, {from_step}, nbytes}, /*is_cast=*/false));
    i = stop;
  }
  return maps;
}

}  // namespace loadplan
