// CopyEngine: what runs batches of copies on one kind of device.
//
// The only thing that libloadplan.so and libloadplan_cuda.so know of each other: plain C++17, no
// torch, no CUDA. The second is opened when a program first asks for it; see Note [The CUDA
// library].
#ifndef LOADPLAN_CUDA_COPY_ENGINE_H_
#define LOADPLAN_CUDA_COPY_ENGINE_H_

#include <cstdint>

#include "geometry/copy_job.h"

namespace loadplan {

// Note [The CUDA library]
//
//   libloadplan.so        torch_cpu, c10, Abseil         opens, when asked,
//   libloadplan_cuda.so   libcudart.so.13, nothing else  and calls through the table below
//
// A host without a GPU, or with a torch for CPUs only, never sees the second. It needs no torch:
// the caller makes the device current and hands over the stream as a cudaStream_t. The two are
// built together; `layout` says whether they were.
struct CopyEngine {
  // kCopyEngineLayout of the library that has made the table.
  std::uint64_t layout = 0;

  // Whether `stream` is being captured into a graph.
  bool (*is_capturing)(void* stream) = nullptr;
  // Puts a batch on `stream`, of the current device. What the batch points to lies on that device
  // and stays as it is until the stream has come past it. Null, or what CUDA says went wrong.
  const char* (*run)(const CopyBatch& batch, void* stream) = nullptr;
  // The same; nothing has to stay.
  const char* (*run_small)(const SmallCopyBatch& batch, void* stream) = nullptr;
  // Whether batches may have jobs of this cast. Null: of none.
  bool (*has_cast)(CopyCast cast) = nullptr;
};

inline constexpr std::uint64_t kCopyEngineLayout =
    (std::uint64_t{2} << 48) | (std::uint64_t{sizeof(CopyEngine)} << 32) |
    (std::uint64_t{sizeof(SmallCopyBatch)} << 16) | sizeof(CopyJob);

// What libloadplan_cuda.so exports, by this name.
using GetCopyEngine = const CopyEngine* (*)();
inline constexpr char kGetCopyEngine[] = "loadplan_cuda_copy_engine";

}  // namespace loadplan

#endif  // LOADPLAN_CUDA_COPY_ENGINE_H_
