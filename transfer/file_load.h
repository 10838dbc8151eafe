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
// Every tensor's needed ranges are known before anything is read. They are cut into batches of
// whole tensors, some of which are in flight. Of a tensor nothing is written before all its bytes
// are there, and its file is seen to be as it was when its header was read. There are three ways:
//
// - mapped: a file in the page cache, for what goes as it is to memory of the CPU. Nothing is read:
//   all of a tensor is mapped under one lease, and threads copy from there. See Note [Mapped
//   files].
// - direct: long parts of tensors, of a file that is not in the page cache. Read past it into
//   staging in large pages, which costs the processor next to nothing.
// - buffered: the rest, read through the page cache into staging. What lies in the file between two
//   segments and is cheaper to read than to step over is read along.
//
// What lies in staging and is copied as it is to memory of the CPU is written by the threads that
// have read; the session lands the rest. Batches in flight are together no larger than
// `max_staging_nbytes`. A tensor that is larger alone is mapped where the file can be leased, cold
// or not. Else it is cut over several batches: the one kind that can be left half written.
//
// The session is told of a write when its batch is submitted: a load that fails may name bytes as
// undefined that no thread came to write.
//
// The reader below knows ranges and memory, the session names and plans. Ranks of a node that read
// disjoint ranges and exchange them would stand in between.

struct FileLoadOptions {
  int num_threads = 0;  // 0: chosen
  // Past the page cache: everything, or nothing; else what is long and no whole tensor, which other
  // ranks of the machine may read as well.
  std::optional<bool> direct;
  Index max_staging_nbytes = Index{256} << 20;
  // Bytes read along between two ranges; -1: by cost, and files in the page cache may be mapped.
  Index gap = -1;
  // Names in the files that the plan does not declare are left alone; else they are an error.
  bool skips_undeclared = false;
};

struct FileLoadStats {
  Index names_done = 0;
  Index num_names = 0;
  Index needed_nbytes = 0;    // by the plan, of the names in these files
  Index planned_nbytes = 0;   // to be read, with gaps
  Index read_nbytes = 0;      // so far, as the reader counts
  Index in_place_nbytes = 0;  // from the file to their place, with no staging between
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
  static bool IsPlaced(const StagedPart& part) { return part.placed.has_value(); }
  struct InFlight {
    ReadBatch batch;
    std::shared_ptr<ReadGroup> group;
    at::Tensor staging;
    std::shared_ptr<const std::vector<StagedPart>> parts;
    // Parallel to the segments: where in `staging`; -1: in its place.
    std::vector<Index> places;
    // Of those places: a session that fails lets go of some, and threads may be reading into them.
    std::vector<at::Tensor> held;
    Index in_place_nbytes = 0;
  };
  // Of a tensor, see Note [How files are read].
  enum class Way : std::uint8_t { kNone, kMapped, kDirect, kBuffered };
  struct FileFacts {
    bool is_cached = false;
    bool can_lease = false;
    bool can_map = false;      // it can be leased, and all of it is in the page cache
    bool can_go_past = false;  // direct reads are worth it
    Index gap = 0;             // between two ranges, that is read along
  };
  using Ranges = std::vector<std::vector<ByteRange>>;  // per tensor

  FileLoad(ReloadSession& session, std::shared_ptr<const BoundPlan> plan, CheckpointFiles files,
           const FileLoadOptions& options);

  absl::Status Prepare();
  absl::Status CheckTensor(const FileTensor& tensor, std::int32_t* entry) const;
  // How much of its tensors lies in the page cache and is read from there.
  double CachedShareOf(std::int32_t file) const;
  void LookAtFiles();
  Way ChooseWay(std::int32_t tensor, std::int32_t entry,
                const std::vector<ByteRange>& ranges) const;
  void ChooseBatches(const Ranges& ranges);
  // Batches of the tensors that are mapped, or of those that are read.
  std::vector<ReadBatch> BatchesOf(const Ranges& ranges, bool mapped);
  // A batch that could not be mapped, and those that were to be mapped after it: they are read.
  void ReadInstead(const ReadBatch& refused);
  // Whether the next batch may be submitted.
  bool HasRoom() const;
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
  // Runs of one tensor from segment `first` on, which is moved on, of about `most` bytes.
  static std::vector<ByteRun> NextRuns(const InFlight& next, Index most, std::size_t& first);
  AfterRead WritesOf(const InFlight& next, const std::byte* staging) const;
  // `status` with the tensors that it is about.
  absl::Status Explain(const absl::Status& status, const InFlight& read) const;
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
  std::vector<FileFacts> facts_;  // per file
  std::vector<Way> ways_;         // per tensor
  std::vector<bool> is_cut_;      // likewise: over several batches
  bool are_cached_ = true;
  bool is_small_ = false;  // batches are
  int num_threads_ = 0;
  std::size_t max_in_flight_ = 0;
  BatchLimits read_limits_;
  std::deque<ReadBatch> batches_;  // not submitted
  Index staged_nbytes_ = 0;        // of the batches in flight
  std::vector<bool> is_open_;      // per tensor
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
