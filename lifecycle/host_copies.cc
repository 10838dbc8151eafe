#include "lifecycle/host_copies.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "lifecycle/stream_copy.h"

namespace loadplan {
namespace {

// Shorter rows would leave lines half written.
constexpr std::uint32_t kMinStreamedRow = 1024;

std::byte* At(std::uint64_t address) {
  return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
}

struct Cached {
  static void Copy(std::byte* to, const std::byte* from, std::size_t nbytes) {
    std::memcpy(to, from, nbytes);
  }
};
struct Streamed {
  static void Copy(std::byte* to, const std::byte* from, std::size_t nbytes) {
    StreamBytes(to, from, nbytes);
  }
};
template <std::size_t kNbytes>
struct Item {
  static void Copy(std::byte* to, const std::byte* from, std::size_t) {
    std::memcpy(to, from, kNbytes);
  }
};

// Where a row of a job lies; moves to the next.
class Row {
 public:
  Row(const CopyJob& job, std::uint64_t from, std::uint32_t row)
      : job_(job), to_(job.to), from_(from + static_cast<std::uint64_t>(job.from)) {
    for (std::uint32_t d = 0; d < job.rank; ++d) {
      at_[d] = row;
      if (d + 1 < job.rank) {
        const std::uint32_t outer = job.extents[d].Quotient(row);
        at_[d] = row - outer * job.extents[d].value;
        row = outer;
      }
      Step(d, at_[d]);
    }
  }
  std::byte* to() const { return At(to_); }
  const std::byte* from() const { return At(from_); }
  // Rows until a dimension but the innermost moves on, this one among them.
  std::uint32_t left() const {
    return job_.rank == 1 ? ~std::uint32_t{0} : job_.extents[0].value - at_[0];
  }
  void Advance(std::uint32_t rows) {
    at_[0] += rows;
    Step(0, rows);
    for (std::uint32_t d = 0; d + 1 < job_.rank && at_[d] == job_.extents[d].value; ++d) {
      Step(d, -std::int64_t{at_[d]});
      at_[d] = 0;
      ++at_[d + 1];
      Step(d + 1, 1);
    }
  }

 private:
  void Step(std::uint32_t d, std::int64_t count) {
    to_ += static_cast<std::uint64_t>(count * job_.to_strides[d]);
    from_ += static_cast<std::uint64_t>(count * job_.from_strides[d]);
  }

  const CopyJob& job_;
  std::uint64_t to_;
  std::uint64_t from_;
  std::uint32_t at_[kMaxCopyDims] = {};
};

// Whole rows [first, first + count).
template <typename How>
void CopyRows(const CopyJob& job, std::uint64_t from, std::uint32_t first, std::uint32_t count) {
  const std::int64_t to_stride = job.to_strides[0];
  const std::int64_t from_stride = job.from_strides[0];
  const std::size_t nbytes = job.row_nbytes.value;
  for (Row row(job, from, first); count > 0;) {
    const std::uint32_t rows = std::min(count, row.left());
    std::byte* to = row.to();
    const std::byte* source = row.from();
    for (std::uint32_t i = 0; i < rows; ++i, to += to_stride, source += from_stride) {
      How::Copy(to, source, nbytes);
    }
    count -= rows;
    if (count > 0) row.Advance(rows);
  }
}

void CopyRowsOf(const CopyJob& job, std::uint64_t from, std::uint32_t first, std::uint32_t count,
                bool is_streamed) {
  switch (job.row_nbytes.value) {
    case 1:
      return CopyRows<Item<1>>(job, from, first, count);
    case 2:
      return CopyRows<Item<2>>(job, from, first, count);
    case 4:
      return CopyRows<Item<4>>(job, from, first, count);
    case 8:
      return CopyRows<Item<8>>(job, from, first, count);
    case 16:
      return CopyRows<Item<16>>(job, from, first, count);
    default:
      break;
  }
  if (is_streamed && job.row_nbytes.value >= kMinStreamedRow) {
    return CopyRows<Streamed>(job, from, first, count);
  }
  CopyRows<Cached>(job, from, first, count);
}

// Bytes [start, stop) of a job, row after row.
void CopyBytes(const CopyJob& job, std::uint64_t from, std::uint32_t start, std::uint32_t stop,
               bool is_streamed) {
  const std::uint32_t row_nbytes = job.row_nbytes.value;
  const auto part = [&](std::uint32_t row, std::uint32_t begin, std::uint32_t end) {
    const Row place(job, from, row);
    const auto copy = is_streamed ? Streamed::Copy : Cached::Copy;
    copy(place.to() + begin, place.from() + begin, end - begin);
  };
  std::uint32_t first = job.row_nbytes.Quotient(start);
  const std::uint32_t last = job.row_nbytes.Quotient(stop);
  const std::uint32_t begin = start - first * row_nbytes;
  const std::uint32_t end = stop - last * row_nbytes;
  if (begin > 0) {
    part(first, begin, first == last ? end : row_nbytes);
    if (first == last) return;
    ++first;
  }
  if (first < last) CopyRowsOf(job, from, first, last - first, is_streamed);
  if (end > 0) part(last, 0, end);
}

const CopyJob& JobOf(const CopyBatch& batch, const CopyItem& item) {
  return item.job < batch.num_planned ? batch.planned[item.job]
                                      : batch.extra[item.job - batch.num_planned];
}

void CopyTiles(const CopyBatch& batch, std::uint32_t first, std::uint32_t stop, bool is_streamed) {
  const CopyItem* const end = batch.items + batch.num_items;
  const CopyItem* item =
      std::upper_bound(batch.items, end, first,
                       [](std::uint32_t tile, const CopyItem& i) { return tile < i.first_tile; }) -
      1;
  for (; item != end && item->first_tile < stop; ++item) {
    const CopyJob& job = JobOf(batch, *item);
    const std::uint32_t skipped = first > item->first_tile ? first - item->first_tile : 0;
    const std::uint64_t reach = std::uint64_t{stop - item->first_tile} * kCopyTileNbytes;
    const auto nbytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(job.nbytes, reach));
    CopyBytes(job, item->from, skipped * kCopyTileNbytes, nbytes, is_streamed);
  }
}

const char* RunInParallel(const CopyBatch& batch, void*) {
  RunCopiesInParallel(batch, {.max_threads = at::in_parallel_region() ? 1 : at::get_num_threads()});
  return nullptr;
}
const char* RunSmallInParallel(const SmallCopyBatch& batch, void*) {
  return RunInParallel(batch.View(), nullptr);
}
bool NeverCaptures(void*) { return false; }

}  // namespace

void RunCopiesInParallel(const CopyBatch& batch, const HostCopyOptions& options) {
  if (batch.num_items == 0) return;
  std::uint64_t nbytes = 0;
  for (std::uint32_t i = 0; i < batch.num_items; ++i) nbytes += JobOf(batch, batch.items[i]).nbytes;
  const bool is_streamed = nbytes >= options.stream_nbytes;
  const std::uint32_t step = options.tiles_at_a_time;
  const std::uint32_t num_pieces = (batch.num_tiles + step - 1) / step;
  std::atomic<std::uint32_t> next{0};
  const auto work = [&] {
    for (std::uint32_t piece = next++; piece < num_pieces; piece = next++) {
      const std::uint32_t first = piece * step;
      CopyTiles(batch, first, std::min(first + step, batch.num_tiles), is_streamed);
    }
    StreamFence();
  };
  const auto num_threads = static_cast<std::size_t>(
      std::min({static_cast<std::uint64_t>(std::max(options.max_threads, 1)),
                nbytes / options.thread_nbytes, std::uint64_t{num_pieces}}));
  std::vector<std::thread> others;
  others.reserve(num_threads);
  try {
    while (others.size() + 1 < num_threads) others.emplace_back(work);
  } catch (const std::exception&) {
    // A limit on threads, or no memory for one: those that there are do it.
  }
  work();
  for (std::thread& other : others) other.join();
}

const CopyEngine& HostCopyEngine() {
  static const CopyEngine engine = {kCopyEngineLayout, NeverCaptures, RunInParallel,
                                    RunSmallInParallel};
  return engine;
}

}  // namespace loadplan
