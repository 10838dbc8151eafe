// FileLoad: an update out of safetensors files, reading what the plan needs.
//
//   auto load = FileLoad::Start(session, plan, paths, {}).value();
//   while (!load->Step(0.1).value()) Show(load->stats());
//
// Threads read the next batches while the calling thread lands the ones before. See Note [How
// files are read].
#ifndef LOADPLAN_TRANSFER_FILE_LOAD_H_
#define LOADPLAN_TRANSFER_FILE_LOAD_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "geometry/export.h"
#include "geometry/strided_map.h"
#include "lifecycle/placed_part.h"
#include "lifecycle/reload_session.h"
#include "transfer/checkpoint_files.h"
#include "transfer/needed_ranges.h"
#include "transfer/range_reader.h"
#include "transfer/read_batches.h"
#include "transfer/staging_buffers.h"

namespace loadplan {

// Note [How files are read]
//
// Every tensor's needed ranges are known before anything is read. They are cut into batches, some
// of which are in flight and together no larger than `max_staging_nbytes`. A long segment that goes
// as it is to one contiguous place in memory of the CPU is read straight to it. The others are read
// into staging. The thread that has read them writes those that are plain copies, before they leave
// its cache, and the session lands the rest. What lies in the file between two segments and is
// cheaper to read than to step over is read along.
//
// Of files in the page cache, what goes as it is to memory of the CPU is not read: the file is
// mapped, a window at a time, and threads copy from there. See Note [Mapped files].
//
// Nothing of a tensor is written before all its bytes are read, unless it goes straight to its
// place or is larger than a batch. A file is compared with what it was when its header was read
// before staged bytes are written, and before anything of a batch counts as landed. The session is
// told of a write when its batch is submitted: a load that fails may name bytes as undefined that
// no thread came to write.
//
// The reader below knows ranges and memory, the session names and plans. Ranks of a node that read
// disjoint ranges and exchange them would stand in between.

struct FileLoadOptions {
  int num_threads = 0;  // 0: chosen
  bool direct = false;  // past the page cache
  Index max_staging_nbytes = Index{256} << 20;
  // Bytes read along between two ranges; -1: by cost, and files in the page cache may be mapped.
  Index gap = -1;
  // Names in the files that the plan does not declare are left alone; else they are an error.
  bool skips_undeclared = false;
};

struct FileLoadStats {
  Index names_done = 0;
  Index num_names = 0;
  Index needed_nbytes = 0;   // by the plan, of the names in these files
  Index planned_nbytes = 0;  // to be read, with gaps
  Index read_nbytes = 0;     // so far, as the reader counts
  Index in_place_nbytes = 0;
  double seconds = 0;
};

class LOADPLAN_API FileLoad {
 public:
  // Opens the files and reads their headers. `session` has begun with `plan` and outlives the load.
  //
  // A file that is missing or malformed leaves the session as it was. A name that the plan does not
  // declare, that has arrived before, or has another shape or dtype than declared fails it, with
  // nothing written by this load.
  static absl::StatusOr<std::unique_ptr<FileLoad>> Start(ReloadSession& session,
                                                         std::shared_ptr<const BoundPlan> plan,
                                                         std::span<const std::string> paths,
                                                         const FileLoadOptions& options);
  ~FileLoad();

  // Goes on for about `seconds`; true when everything has landed. DataLoss fails the session: a
  // file was cut short, or changed, or cannot be read. No thread writes any more after an error.
  absl::StatusOr<bool> Step(double seconds);
  // Ends the load; the session fails with `reason`.
  absl::Status Cancel(const std::string& reason);

  FileLoadStats stats() const;

 private:
  // Of one tensor, in staging.
  struct StagedPart {
    std::int32_t tensor = -1;
    StridedMap held;  // from bytes of the staging buffer
    // Where the thread that has read it writes it; else the session lands it.
    std::optional<PlacedPart> placed;
  };
  struct InFlight {
    const ReadBatch* batch = nullptr;
    std::shared_ptr<ReadGroup> group;
    at::Tensor staging;
    std::shared_ptr<const std::vector<StagedPart>> parts;
    // Parallel to the segments: where in `staging`; -1: in its place.
    std::vector<Index> places;
    // Of those places: a session that fails lets go of some, and threads may be reading into them.
    std::vector<at::Tensor> held;
  };

  FileLoad(ReloadSession& session, std::shared_ptr<const BoundPlan> plan, CheckpointFiles files,
           const FileLoadOptions& options);

  absl::Status Prepare();
  absl::Status CheckTensor(const FileTensor& tensor, std::int32_t* entry) const;
  // How much of its tensors lies in the page cache and is read from there.
  double CachedShareOf(std::int32_t file) const;
  // What is cached, how far apart reads are, what can be mapped.
  void LookAtFiles();
  // `skipped`: tensors that are left alone.
  void ChooseBatches(const std::vector<std::vector<ByteRange>>& ranges,
                     const std::vector<bool>& skipped);
  absl::Status SubmitNext();
  absl::Status Open(std::int32_t tensor);
  absl::Status OpenOverlapping();
  absl::StatusOr<std::byte*> PlaceOf(const Segment& segment, std::vector<at::Tensor>& held);
  // Finds places for the segments that go into staging; their reads, with the place of each as its
  // tag. The size of the buffer.
  Index PlaceInStaging(InFlight& next, std::vector<ReadJob>& jobs) const;
  // The same where they lie as in the file.
  Index PlaceInWindow(InFlight& next, std::vector<ReadJob>& jobs) const;
  absl::StatusOr<std::vector<StagedPart>> PartsOf(const InFlight& next);
  absl::Status WritePlaced(const std::vector<StagedPart>& parts, const std::byte* staging,
                           std::int32_t file) const;
  absl::Status Land(const InFlight& read);
  // `staged`: the bytes of read.staging, here or on the device.
  absl::Status LandSegments(const InFlight& read, const at::Tensor& staged);
  absl::StatusOr<bool> Advance(double seconds);
  absl::Status Fail(const absl::Status& status);
  const FileTensor& TensorAt(std::int32_t tensor) const {
    return files_.tensors()[static_cast<std::size_t>(tensor)];
  }

  ReloadSession& session_;
  const std::shared_ptr<const BoundPlan> plan_;
  const CheckpointFiles files_;
  const FileLoadOptions options_;
  std::vector<Index> gaps_;      // per file
  std::vector<bool> can_map_;    // per file
  std::vector<bool> is_mapped_;  // per tensor
  bool are_cached_ = true;
  bool is_small_ = false;  // batches are
  int num_threads_ = 0;
  std::size_t max_in_flight_ = 0;
  std::vector<ReadBatch> batches_;
  std::size_t next_batch_ = 0;
  std::vector<bool> is_open_;  // per tensor
  StagingBuffers buffers_;
  FileLoadStats stats_;
  double start_ = 0;
  bool is_over_ = false;
  // Last, so that their threads are gone before the memory they write to.
  std::deque<InFlight> in_flight_;
  std::unique_ptr<RangeReader> reader_;
};

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_FILE_LOAD_H_
