#include "lifecycle/reference_copies.h"

#include "cuda/cast_tile.h"
#include "geometry/copy_tile.h"

namespace loadplan {
namespace {

bool NeverCaptures(void*) { return false; }
const char* Run(const CopyBatch& batch, void*) {
  RunReferenceCopies(batch);
  return nullptr;
}
const char* RunSmall(const SmallCopyBatch& batch, void*) {
  RunReferenceCopies(batch.View());
  return nullptr;
}
bool HasCast(CopyCast cast) { return TorchCasts::Has(cast); }

}  // namespace

void RunReferenceCopies(const CopyBatch& batch, std::uint32_t num_threads) {
  for (std::uint32_t tile = 0; tile < batch.num_tiles; ++tile) {
    for (std::uint32_t thread = 0; thread < num_threads; ++thread) {
      CopyTile(batch, tile, thread, num_threads, TorchCasts());
    }
  }
}

const CopyEngine& ReferenceCopyEngine() {
  static const CopyEngine engine = {kCopyEngineLayout, NeverCaptures, Run, RunSmall, HasCast};
  return engine;
}

}  // namespace loadplan
