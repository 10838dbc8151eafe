// Batches of copies on CUDA. See Note [Copies in tiles] in geometry/copy_job.h.
#include "cuda/copy_engine.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>

#include "cuda/cast_tile.h"
#include "geometry/copy_tile.h"

namespace loadplan {
namespace {

constexpr int kThreads = 256;
// A tile is one round of four loads of 16 bytes for each thread.
static_assert(kCopyTileNbytes == kThreads * 4 * kMaxCopyUnit);

template <typename Casts>
__device__ void RunTiles(const CopyBatch& batch) {
  for (std::uint32_t tile = blockIdx.x; tile < batch.num_tiles; tile += gridDim.x) {
    CopyTile(batch, tile, threadIdx.x, kThreads, Casts());
  }
}

// Kernels with casts are others: those take more registers.
template <typename Casts>
__global__ void __launch_bounds__(kThreads) RunCopies(const CopyBatch batch) {
  RunTiles<Casts>(batch);
}

// Its argument has an address, at which every thread reads it.
template <typename Casts>
__global__ void __launch_bounds__(kThreads)
    RunSmallCopies(const __grid_constant__ SmallCopyBatch batch) {
  RunTiles<Casts>(batch.View());
}

// Blocks of `kKernel` that the current device holds at a time; asked once for each device.
template <auto kKernel>
cudaError_t FindHeldBlocks(unsigned* blocks) {
  constexpr int kDevices = 64;
  static std::atomic<unsigned> known[kDevices];  // 0: not asked yet
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  *blocks = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (*blocks != 0) return cudaSuccess;
  int processors = 0;
  int blocks_each = 0;
  error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, kKernel, kThreads, 0);
  if (error != cudaSuccess) return error;
  *blocks = static_cast<unsigned>(std::max(1, processors * blocks_each));
  if (device < kDevices) known[device].store(*blocks, std::memory_order_relaxed);
  return cudaSuccess;
}

const char* Words(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <auto kKernel, typename Batch>
const char* Launch(const Batch& batch, void* stream) {
  if (batch.num_tiles == 0) return nullptr;
  unsigned held = 0;
  cudaError_t error = FindHeldBlocks<kKernel>(&held);
  if (error == cudaSuccess) {
    // Read when the call is made, and only then.
    void* arguments[] = {const_cast<Batch*>(&batch)};
    error = cudaLaunchKernel(reinterpret_cast<const void*>(kKernel),
                             dim3(std::min<unsigned>(batch.num_tiles, held)), dim3(kThreads),
                             arguments, 0, static_cast<cudaStream_t>(stream));
  }
  // CUDA also keeps its error for the next who asks, and that is torch.
  if (error != cudaSuccess) (void)cudaGetLastError();
  return Words(error);
}

bool IsCapturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) != cudaSuccess) {
    // Another thread captures: nothing that is not captured may go on this stream.
    (void)cudaGetLastError();
    return true;
  }
  return status != cudaStreamCaptureStatusNone;
}

const char* Run(const CopyBatch& batch, void* stream) {
  return batch.has_casts ? Launch<RunCopies<TorchCasts>>(batch, stream)
                         : Launch<RunCopies<NoCasts>>(batch, stream);
}
const char* RunSmall(const SmallCopyBatch& batch, void* stream) {
  return batch.has_casts ? Launch<RunSmallCopies<TorchCasts>>(batch, stream)
                         : Launch<RunSmallCopies<NoCasts>>(batch, stream);
}
bool HasCast(CopyCast cast) { return TorchCasts::Has(cast); }

}  // namespace
}  // namespace loadplan

extern "C" __attribute__((visibility("default"))) const loadplan::CopyEngine*
loadplan_cuda_copy_engine() {
  static const loadplan::CopyEngine engine = {loadplan::kCopyEngineLayout, loadplan::IsCapturing,
                                              loadplan::Run, loadplan::RunSmall, loadplan::HasCast};
  return &engine;
}
