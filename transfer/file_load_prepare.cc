// The parts of FileLoad that run before anything is read: what is read, and how.
#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lifecycle/annotate.h"
#include "lifecycle/arrival.h"
#include "transfer/file_load.h"
#include "transfer/leased_window.h"
#include "transfer/page_cache.h"

namespace loadplan {
namespace {

constexpr Index kMinInFlight = 4;
constexpr Index kMinBatch = Index{1} << 16;
constexpr Index kMinGap = 256;
// Batches, where the bound on staging allows them: out of the page cache what is still in a cache
// of the processor when it lands; from a disk few and large reads. Measured by
// bench/load_files.py --batches.
constexpr Index kCachedBatch = Index{1} << 20;
constexpr Index kDiskBatch = Index{16} << 20;
// Of a mapped file: long enough that mapping costs nothing, short enough that a writer waits for
// milliseconds and that the last ones keep all threads busy.
constexpr BatchLimits kWindow{.nbytes = Index{8} << 20, .span = Index{32} << 20};
// Gaps that are stepped over there: a touched page brings its neighbours.
constexpr Index kWindowGap = Index{1} << 16;
// Ranges of a tensor that are shorter on average go through the page cache, which is then as fast.
constexpr Index kMinDirect = Index{4} << 20;
constexpr int kMaxThreads = 8;

// One more read of a file in the page cache: a call. One more of a solid-state disk that has
// hundreds of reads to do: its share of the disk, not the time that one takes. The second is for
// disks of 1 to 7 GB/s and 80 thousand to a million short reads a second, whose gaps go from 1 to
// 90 KB; see docs/transfer.md. bench/load_files.py --gaps shows what other limits cost.
constexpr ReadCost kCached{0.5e-6, 8e9};
constexpr ReadCost kOnDisk{13e-6, 1.25e9};

// Copies out of the page cache keep a processor busy each; reads of a disk wait. Past the page
// cache nothing is fetched ahead: there are as many reads at a time as threads.
int ChooseThreads(bool are_cached, bool direct) {
  if (direct) return 2 * kMaxThreads;
  const int processors = static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(processors, are_cached ? 2 : 4, kMaxThreads);
}

}  // namespace

absl::Status FileLoad::CheckTensor(const FileTensor& tensor, std::int32_t* entry) const {
  const auto refuse = [&](const std::string& what) {
    return absl::InvalidArgumentError(
        absl::StrCat("`", files_.path(tensor.file), "` holds `", tensor.name, "` ", what));
  };
  const std::optional<std::int32_t> found = plan_->plan().Find(tensor.name);
  *entry = found.value_or(-1);
  if (!found.has_value()) {
    if (options_.skips_undeclared) return absl::OkStatus();
    return refuse(
        "which was not declared when the plan was made; plan again with the metadata of these "
        "files, or leave such names alone with undeclared=\"skip\"");
  }
  if (!tensor.dtype.has_value()) {
    return refuse(WhyNoDtype(tensor));
  }
  const at::IntArrayRef shape(tensor.shape.data(), tensor.shape.size());
  const SourceTensor& source = plan_->plan().sources()[static_cast<std::size_t>(*found)];
  absl::Status status = CheckDeclaredAs(source, shape, *tensor.dtype);
  if (status.ok()) return status;
  return Prefixed(absl::StrCat("`", files_.path(tensor.file), "`: "), status);
}

double FileLoad::CachedShareOf(std::int32_t file) const {
  if (options_.direct) return 0;
  ByteRange data;
  for (const FileTensor& tensor : files_.tensors()) {
    if (tensor.file != file) continue;
    if (data.empty()) data.start = tensor.offset;
    data.stop = tensor.offset + tensor.nbytes;
  }
  return CachedShare(files_.fd(file), data);
}

void FileLoad::LookAtFiles() {
  const bool can_lease = options_.gap < 0 && !options_.direct.value_or(false) &&
                         !buffers_.pins_memory() && !buffers_.goes_to_device();
  for (std::size_t i = 0; i < files_.num_files(); ++i) {
    const auto file = static_cast<std::int32_t>(i);
    const double share = CachedShareOf(file);
    FileFacts facts;
    facts.is_cached = share > 0.5;
    are_cached_ = are_cached_ && facts.is_cached;
    const Index by_cost = (facts.is_cached ? kCached : kOnDisk).gap();
    facts.gap = options_.gap >= 0 ? std::max(options_.gap, kMinGap) : by_cost;
    facts.can_lease = can_lease && LeasedWindow::IsPossible(files_.fd(file));
    facts.can_map = facts.can_lease && share == 1;
    facts.can_go_past =
        !options_.direct.has_value() && !facts.is_cached && IsOnLocalFileSystem(files_.fd(file));
    facts_.push_back(facts);
  }
}

FileLoad::Way FileLoad::ChooseWay(std::int32_t tensor, std::int32_t entry,
                                  const std::vector<ByteRange>& ranges) const {
  const FileTensor& held = TensorAt(tensor);
  const FileFacts& facts = facts_[static_cast<std::size_t>(held.file)];
  Index nbytes = 0;
  for (const ByteRange& range : ranges) nbytes += range.nbytes();
  const bool is_large = nbytes > options_.max_staging_nbytes;
  if ((facts.can_map || (facts.can_lease && is_large)) && session_.HasPlaces(held.name)) {
    return Way::kMapped;
  }
  // What is read along is for other ranks, too.
  const bool is_own = nbytes < held.nbytes && nbytes == plan_->plan().ReadNbytes(entry);
  const bool is_long = nbytes >= kMinDirect * static_cast<Index>(ranges.size());
  return facts.can_go_past && is_own && is_long ? Way::kDirect : Way::kBuffered;
}

// Nothing is written, nor opened in the session, before every tensor has been looked at.
absl::Status FileLoad::Prepare() {
  LookAtFiles();
  Ranges ranges(files_.tensors().size());
  for (std::size_t i = 0; i < files_.tensors().size(); ++i) {
    const FileTensor& tensor = files_.tensors()[i];
    std::int32_t entry = -1;
    if (absl::Status status = CheckTensor(tensor, &entry); !status.ok()) return status;
    if (entry < 0) continue;
    const Index read_nbytes = plan_->plan().ReadNbytes(entry);
    ranges[i] =
        NeededRanges(plan_->plan(), entry, facts_[static_cast<std::size_t>(tensor.file)].gap);
    ways_[i] = ChooseWay(static_cast<std::int32_t>(i), entry, ranges[i]);
    if (ways_[i] == Way::kMapped) {
      ranges[i] = NeededRanges(plan_->plan(), entry, kWindowGap);
      stats_.planned_nbytes += read_nbytes;
    } else {
      for (const ByteRange& range : ranges[i]) stats_.planned_nbytes += range.nbytes();
    }
    stats_.needed_nbytes += read_nbytes;
    ++stats_.num_names;
  }
  for (std::size_t i = 0; i < files_.tensors().size(); ++i) {
    if (ways_[i] == Way::kNone) continue;
    if (absl::Status status = session_.CheckArriving(files_.tensors()[i].name); !status.ok()) {
      return Prefixed(absl::StrCat("`", files_.path(files_.tensors()[i].file), "`: "), status);
    }
  }
  ChooseBatches(ranges);
  return OpenOverlapping();
}

// Names that write the same bytes go through the loader in the order in which they are begun: that
// of the files, whichever has its last byte first.
absl::Status FileLoad::OpenOverlapping() {
  const LoadPlan& plan = plan_->plan();
  for (std::size_t i = 0; !plan.overlaps().empty() && i < files_.tensors().size(); ++i) {
    const std::optional<std::int32_t> entry = plan.Find(files_.tensors()[i].name);
    if (!entry.has_value()) continue;
    if (plan.entries()[static_cast<std::size_t>(*entry)].kind != EntryKind::kFallback) continue;
    if (absl::Status status = Open(static_cast<std::int32_t>(i)); !status.ok()) return status;
  }
  return absl::OkStatus();
}

void FileLoad::ChooseBatches(const Ranges& ranges) {
  // A GPU wants large copies.
  is_small_ = are_cached_ && !buffers_.pins_memory();
  const Index wanted = is_small_ ? kCachedBatch : kDiskBatch;
  num_threads_ = options_.num_threads > 0
                     ? options_.num_threads
                     : ChooseThreads(are_cached_, options_.direct.value_or(false));
  // A small batch is one thread's, and soon read: there are more, lest threads wait for this one.
  const Index in_flight = std::max(kMinInFlight, is_small_ ? 4 * Index{num_threads_} : 0);
  max_in_flight_ = static_cast<std::size_t>(
      std::clamp(options_.max_staging_nbytes / kMinBatch, kMinInFlight, in_flight));
  const Index allowed =
      std::max(kMinBatch, options_.max_staging_nbytes / static_cast<Index>(max_in_flight_));
  read_limits_ = {.nbytes = std::min(wanted, allowed),
                  .most = std::max(kMinBatch, options_.max_staging_nbytes)};
  for (const bool mapped : {true, false}) {
    std::ranges::move(BatchesOf(ranges, mapped), std::back_inserter(batches_));
  }
}

std::vector<ReadBatch> FileLoad::BatchesOf(const Ranges& ranges, bool mapped) {
  std::vector<bool> skipped;
  for (std::size_t i = 0; i < ways_.size(); ++i) {
    skipped.push_back(ways_[i] == Way::kNone || (ways_[i] == Way::kMapped) != mapped);
    if (skipped.back()) continue;
    Index nbytes = 0;
    for (const ByteRange& range : ranges[i]) nbytes += range.nbytes();
    is_cut_[i] = !mapped && nbytes > read_limits_.most;
  }
  std::vector<ReadBatch> batches =
      MakeBatches(files_, ranges, skipped, mapped ? kWindow : read_limits_);
  for (ReadBatch& batch : batches) batch.is_mapped = mapped && !batch.segments.empty();
  return batches;
}

void FileLoad::ReadInstead(const ReadBatch& refused) {
  // Of whole tensors, of which nothing was written.
  std::vector<std::int32_t> tensors = refused.finishes;
  std::deque<ReadBatch> others;
  for (ReadBatch& batch : batches_) {
    if (batch.is_mapped) {
      std::ranges::copy(batch.finishes, std::back_inserter(tensors));
    } else {
      others.push_back(std::move(batch));
    }
  }
  Ranges ranges(files_.tensors().size());
  const std::vector<Way> kept = std::exchange(ways_, std::vector<Way>(ways_.size(), Way::kNone));
  for (const std::int32_t tensor : tensors) {
    const auto i = static_cast<std::size_t>(tensor);
    const std::int32_t entry = *plan_->plan().Find(TensorAt(tensor).name);
    ranges[i] = NeededRanges(plan_->plan(), entry,
                             facts_[static_cast<std::size_t>(TensorAt(tensor).file)].gap);
    ways_[i] = Way::kBuffered;
    stats_.planned_nbytes -= plan_->plan().ReadNbytes(entry);
    for (const ByteRange& range : ranges[i]) stats_.planned_nbytes += range.nbytes();
  }
  const std::vector<ReadBatch> batches = BatchesOf(ranges, /*mapped=*/false);
  batches_.assign(batches.begin(), batches.end());
  std::ranges::move(others, std::back_inserter(batches_));
  for (std::size_t i = 0; i < ways_.size(); ++i) {
    if (ways_[i] == Way::kNone) ways_[i] = kept[i];
  }
}

}  // namespace loadplan
