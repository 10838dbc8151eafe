// Batches of copies on CUDA. See Note [Copies in tiles] in geometry/copy_job.h.
#include "cuda/copy_engine.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "geometry/copy_tile.h"

namespace loadplan {
namespace {

constexpr int kThreads = 256;
// A tile is one round of four loads of 16 bytes for each thread.
static_assert(kCopyTileNbytes == kThreads * 4 * kMaxCopyUnit);

__device__ void RunTiles(const CopyBatch& batch) {
  for (std::uint32_t tile = blockIdx.x; tile < batch.num_tiles; tile += gridDim.x) {
    CopyTile(batch, tile, threadIdx.x, kThreads);
  }
}

__global__ void __launch_bounds__(kThreads) RunCopies(const CopyBatch batch) { RunTiles(batch); }

// Its argument has an address, at which every thread reads it.
__global__ void __launch_bounds__(kThreads)
    RunSmallCopies(const __grid_constant__ SmallCopyBatch batch) {
  RunTiles(batch.View());
}

// As many blocks as the device holds at a time, but no more than there are tiles. 0 in `*blocks`
// means that there is nothing to do.
template <typename Kernel>
cudaError_t ChooseBlocks(Kernel kernel, std::uint32_t num_tiles, unsigned* blocks) {
  int device = 0;
  int processors = 0;
  int blocks_each = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, kernel, kThreads, 0);
  }
  const unsigned held = static_cast<unsigned>(std::max(1, processors * blocks_each));
  *blocks = std::min<unsigned>(num_tiles, held);
  return error;
}

const char* Words(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename Batch>
const char* Launch(void (*kernel)(Batch), const Batch& batch, void* stream) {
  unsigned blocks = 0;
  cudaError_t error = ChooseBlocks(kernel, batch.num_tiles, &blocks);
  if (error != cudaSuccess || blocks == 0) return Words(error);
  Batch argument = batch;
  void* arguments[] = {&argument};
  error = cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(kThreads),
                           arguments, 0, static_cast<cudaStream_t>(stream));
  // cudaLaunchKernel also leaves its error for the next cudaGetLastError, which is torch's.
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

const char* Run(const CopyBatch& batch, void* stream) { return Launch(RunCopies, batch, stream); }
const char* RunSmall(const SmallCopyBatch& batch, void* stream) {
  return Launch(RunSmallCopies, batch, stream);
}

}  // namespace
}  // namespace loadplan

extern "C" __attribute__((visibility("default"))) const loadplan::CopyEngine*
loadplan_cuda_copy_engine() {
  static const loadplan::CopyEngine engine = {loadplan::kCopyEngineLayout, loadplan::IsCapturing,
                                              loadplan::Run, loadplan::RunSmall};
  return &engine;
}
