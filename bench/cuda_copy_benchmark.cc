// Ways to put the writes of a Kimi-K2 layer on a stream, on a GPU: the kernel, CUDA's own batches,
// a call for each write, and one plain copy of as many bytes, which is what the device can do.
//
// Rank 1 of 8, bf16. rows: gate and up of each expert, one run of 3.7 MB each; columns: down, 7168
// runs of 512 bytes out of 4096; small: runs of 3 KB; cast_rows, cast_columns: the same from a
// checkpoint in float32. range(0): writes. Bytes are counted twice: read and written. Time is that
// of the device, between two events. Each way is checked once before it is timed.
#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <vector>

#include "cuda/copy_engine.h"
#include "geometry/copy_jobs.h"

extern "C" const loadplan::CopyEngine* loadplan_cuda_copy_engine();

namespace loadplan {
namespace {

struct Shape {
  std::size_t rows;
  std::size_t row_nbytes;
  std::size_t from_pitch;
  std::size_t from_itemsize = 2;

  std::size_t nbytes() const { return rows * row_nbytes; }
  std::size_t from_nbytes() const { return rows * from_pitch; }
  // Read and written.
  std::size_t moved_nbytes() const { return nbytes() + nbytes() / 2 * from_itemsize; }
};
constexpr Shape kRows{1, 256 * 7168 * 2, 256 * 7168 * 2};
constexpr Shape kColumns{7168, 512, 4096};
constexpr Shape kSmall{1, 3072, 3072};
constexpr Shape kCastRows{1, 256 * 7168 * 2, 256 * 7168 * 4, 4};
constexpr Shape kCastColumns{7168, 512, 8192, 4};

// Memory of the device for `count` writes, and what all ways need.
class Writes {
 public:
  Writes(const Shape& of_each, std::size_t num_writes) : shape(of_each), count(num_writes) {
    is_ok_ = cudaMalloc(&to_, count * shape.nbytes()) == cudaSuccess &&
             cudaMalloc(&from_, count * shape.from_nbytes()) == cudaSuccess &&
             cudaMemset(from_, 90, count * shape.from_nbytes()) == cudaSuccess;
    cudaEventCreate(&start_);
    cudaEventCreate(&stop_);
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaDeviceSynchronize();
  }
  Writes(const Writes&) = delete;
  Writes& operator=(const Writes&) = delete;
  ~Writes() {
    cudaFree(to_);
    cudaFree(from_);
    cudaEventDestroy(start_);
    cudaEventDestroy(stop_);
    cudaStreamDestroy(stream);
    // A way that CUDA refused is skipped; the next one starts afresh.
    (void)cudaGetLastError();
  }
  char* to(std::size_t i) const { return static_cast<char*>(to_) + i * shape.nbytes(); }
  char* from(std::size_t i) const { return static_cast<char*>(from_) + i * shape.from_nbytes(); }

  // Times `run`, which puts all writes on the stream and returns whether it could.
  template <typename Run>
  void Time(benchmark::State& state, const Run& run) {
    if (!is_ok_) return state.SkipWithError("too little memory on this GPU");
    cudaMemset(to_, 1, count * shape.nbytes());
    cudaDeviceSynchronize();
    if (!run() || !IsCopied()) return state.SkipWithError("refused, or other bytes");
    for (auto _ : state) {
      cudaEventRecord(start_, stream);
      run();
      cudaEventRecord(stop_, stream);
      cudaEventSynchronize(stop_);
      float ms = 0;
      cudaEventElapsedTime(&ms, start_, stop_);
      state.SetIterationTime(static_cast<double>(ms) / 1e3);
    }
    state.SetBytesProcessed(state.iterations() *
                            static_cast<int64_t>(count * shape.moved_nbytes()));
  }

  const Shape shape;
  const std::size_t count;
  cudaStream_t stream = nullptr;

 private:
  bool IsCopied() const {
    std::vector<char> bytes(count * shape.nbytes());
    cudaStreamSynchronize(stream);
    if (cudaMemcpy(bytes.data(), to_, bytes.size(), cudaMemcpyDeviceToHost) != cudaSuccess) {
      return false;
    }
    return std::ranges::all_of(bytes, [](char byte) { return byte == 90; });
  }

  bool is_ok_ = false;
  void* to_ = nullptr;
  void* from_ = nullptr;
  cudaEvent_t start_ = nullptr;
  cudaEvent_t stop_ = nullptr;
};

std::size_t Count(const benchmark::State& state) {
  return static_cast<std::size_t>(state.range(0));
}

// As torch numbers them.
constexpr std::int8_t kFloat32 = 6;
constexpr std::int8_t kBFloat16 = 15;

void BM_Kernel(benchmark::State& state, const Shape& shape) {
  Writes writes(shape, Count(state));
  const auto index = [](std::size_t value) { return static_cast<Index>(value); };
  const bool is_cast = shape.from_itemsize != 2;
  const StridedMap map = StridedMap::Unchecked(
      {index(shape.rows), index(shape.row_nbytes / 2)}, {0, {index(shape.row_nbytes), 2}, 2},
      {0, {index(shape.from_pitch), index(shape.from_itemsize)}, index(shape.from_itemsize)},
      is_cast);
  // The bytes that are checked for stay: 0x5a5a5a5a as a float becomes 0x5a5a.
  CopyCast cast;
  if (is_cast) cast = {kFloat32, kBFloat16};
  std::vector<CopyJob> jobs;
  std::vector<CopyItem> items;
  for (std::size_t i = 0; i < writes.count; ++i) {
    items.push_back({reinterpret_cast<std::uint64_t>(writes.from(i)),
                     static_cast<std::uint32_t>(jobs.size()), 0});
    AppendCopyJobs(map, reinterpret_cast<std::uint64_t>(writes.to(i)), 1, &jobs, cast);
  }
  CopyBatch batch;
  batch.num_tiles = NumberTiles(jobs, {}, items);
  batch.num_planned = static_cast<std::uint32_t>(jobs.size());
  batch.num_items = static_cast<std::uint32_t>(items.size());
  batch.has_casts = is_cast;
  void* jobs_there = nullptr;
  void* items_there = nullptr;
  const std::size_t items_nbytes = std::span(items).size_bytes();
  cudaMalloc(&jobs_there, std::span(jobs).size_bytes());
  cudaMalloc(&items_there, items_nbytes);
  cudaMemcpy(jobs_there, jobs.data(), std::span(jobs).size_bytes(), cudaMemcpyHostToDevice);
  void* pinned = nullptr;
  cudaMallocHost(&pinned, items_nbytes);
  std::memcpy(pinned, items.data(), items_nbytes);
  batch.planned = static_cast<const CopyJob*>(jobs_there);
  batch.items = static_cast<const CopyItem*>(items_there);
  writes.Time(state, [&] {
    // Items are new in every update.
    cudaMemcpyAsync(items_there, pinned, items_nbytes, cudaMemcpyHostToDevice, writes.stream);
    return loadplan_cuda_copy_engine()->run(batch, writes.stream) == nullptr;
  });
  cudaFree(jobs_there);
  cudaFree(items_there);
  cudaFreeHost(pinned);
}

void BM_Memcpy3DBatch(benchmark::State& state, const Shape& shape) {
  Writes writes(shape, Count(state));
  std::vector<cudaMemcpy3DBatchOp> ops(writes.count);
  for (std::size_t i = 0; i < ops.size(); ++i) {
    ops[i].src.type = ops[i].dst.type = cudaMemcpyOperandTypePointer;
    ops[i].src.op.ptr.ptr = writes.from(i);
    ops[i].src.op.ptr.rowLength = shape.from_pitch;
    ops[i].dst.op.ptr.ptr = writes.to(i);
    ops[i].extent = {shape.row_nbytes, shape.rows, 1};
    ops[i].srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  }
  writes.Time(state, [&] {
    return cudaMemcpy3DBatchAsync(ops.size(), ops.data(), 0, writes.stream) == cudaSuccess;
  });
}

void BM_Memcpy2DEach(benchmark::State& state, const Shape& shape) {
  Writes writes(shape, Count(state));
  writes.Time(state, [&] {
    bool is_ok = true;
    for (std::size_t i = 0; i < writes.count; ++i) {
      is_ok = is_ok && cudaMemcpy2DAsync(writes.to(i), shape.row_nbytes, writes.from(i),
                                         shape.from_pitch, shape.row_nbytes, shape.rows,
                                         cudaMemcpyDeviceToDevice, writes.stream) == cudaSuccess;
    }
    return is_ok;
  });
}

void BM_OneMemcpy(benchmark::State& state, const Shape& shape) {
  Writes writes(shape, Count(state));
  writes.Time(state, [&] {
    return cudaMemcpyAsync(writes.to(0), writes.from(0), writes.count * shape.nbytes(),
                           cudaMemcpyDeviceToDevice, writes.stream) == cudaSuccess;
  });
}

#define LOADPLAN_WAYS(shape, name, count)                                        \
  BENCHMARK_CAPTURE(BM_Kernel, name, shape)->Arg(count)->UseManualTime();        \
  BENCHMARK_CAPTURE(BM_Memcpy3DBatch, name, shape)->Arg(count)->UseManualTime(); \
  BENCHMARK_CAPTURE(BM_Memcpy2DEach, name, shape)->Arg(count)->UseManualTime();  \
  BENCHMARK_CAPTURE(BM_OneMemcpy, name, shape)->Arg(count)->UseManualTime()
LOADPLAN_WAYS(kRows, rows, 768);
LOADPLAN_WAYS(kColumns, columns, 384);
LOADPLAN_WAYS(kSmall, small, 300);
BENCHMARK_CAPTURE(BM_Kernel, cast_rows, kCastRows)->Arg(768)->UseManualTime();
BENCHMARK_CAPTURE(BM_Kernel, cast_columns, kCastColumns)->Arg(384)->UseManualTime();

}  // namespace
}  // namespace loadplan

int main(int argc, char** argv) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    std::printf("no GPU: nothing is measured (%s)\n", cudaGetErrorString(error));
    return 0;
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
