#include "transfer/file_load.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lifecycle/annotate.h"
#include "lifecycle/arrival.h"
#include "lifecycle/attempt.h"
#include "transfer/leased_window.h"
#include "transfer/page_cache.h"

namespace loadplan {
namespace {

constexpr Index kMinInFlight = 4;
constexpr Index kMinBatch = Index{1} << 16;
// A segment that is shorter goes through staging: a place costs more to find than a copy.
constexpr Index kMinInPlace = Index{1} << 16;
// Of the starts of reads in staging: what any item wants.
constexpr Index kAlignment = 16;
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
constexpr int kMaxThreads = 8;

// One more read of a file in the page cache: a call. One more of a solid-state disk that has
// hundreds of reads to do: its share of the disk, not the time that one takes. The second is for
// disks of 1 to 7 GB/s and 80 thousand to a million short reads a second, whose gaps go from 1 to
// 90 KB; see docs/transfer.md. bench/load_files.py --gaps shows what other limits cost.
constexpr ReadCost kCached{0.5e-6, 8e9};
constexpr ReadCost kOnDisk{13e-6, 1.25e9};

double Now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

Index RoundUp(Index value) { return (value + kAlignment - 1) / kAlignment * kAlignment; }

// Copies out of the page cache keep a processor busy each; reads of a disk wait. Past the page
// cache nothing is fetched ahead: there are as many reads at a time as threads.
int ChooseThreads(bool are_cached, bool direct) {
  if (direct) return 2 * kMaxThreads;
  const int processors = static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(processors, are_cached ? 2 : 4, kMaxThreads);
}

bool AnyOnCuda(const TargetSet& targets) {
  return std::ranges::any_of(targets.storages(), [](const at::Tensor& t) { return t.is_cuda(); });
}

// The session has begun, and has reported what is wrong with it.
std::optional<CopyDevice> CopiesOf(const TargetSet& targets) {
  return ChooseCopyDevice(targets).value_or(std::nullopt);
}

}  // namespace

FileLoad::FileLoad(ReloadSession& session, std::shared_ptr<const BoundPlan> plan,
                   CheckpointFiles files, const FileLoadOptions& options)
    : session_(session),
      plan_(std::move(plan)),
      files_(std::move(files)),
      options_(options),
      is_mapped_(files_.tensors().size(), false),
      is_open_(files_.tensors().size(), false),
      buffers_(AnyOnCuda(*plan_->targets), CopiesOf(*plan_->targets)),
      start_(Now()) {}

FileLoad::~FileLoad() {
  if (!is_over_) (void)Cancel("it was given up");
}

absl::StatusOr<std::unique_ptr<FileLoad>> FileLoad::Start(ReloadSession& session,
                                                          std::shared_ptr<const BoundPlan> plan,
                                                          std::span<const std::string> paths,
                                                          const FileLoadOptions& options) {
  absl::StatusOr<CheckpointFiles> files = CheckpointFiles::Open(paths);
  if (!files.ok()) return files.status();
  std::unique_ptr<FileLoad> load(
      new FileLoad(session, std::move(plan), *std::move(files), options));
  const auto prepare = [&] {
    absl::Status status = load->Prepare();
    if (!status.ok()) return status;
    load->reader_ = std::make_unique<RangeReader>(
        RangeReader::Options{load->num_threads_, options.direct, /*advises=*/!load->are_cached_});
    return status;
  };
  if (absl::Status status = Attempt(prepare); !status.ok()) {
    load->is_over_ = true;
    return session.FailWith(status);
  }
  return load;
}

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
  const bool can_map = options_.gap < 0 && !buffers_.pins_memory() && !buffers_.goes_to_device();
  for (std::size_t i = 0; i < files_.num_files(); ++i) {
    const auto file = static_cast<std::int32_t>(i);
    const double share = CachedShareOf(file);
    const bool is_cached = share > 0.5;
    are_cached_ = are_cached_ && is_cached;
    const Index by_cost = (is_cached ? kCached : kOnDisk).gap();
    gaps_.push_back(options_.gap >= 0 ? std::max(options_.gap, kMinGap) : by_cost);
    can_map_.push_back(can_map && share == 1 && LeasedWindow::IsPossible(files_.fd(file)));
  }
}

// Nothing is written, nor opened in the session, before every tensor has been looked at.
absl::Status FileLoad::Prepare() {
  LookAtFiles();
  std::vector<std::vector<ByteRange>> ranges(files_.tensors().size());
  std::vector<bool> skipped(files_.tensors().size(), false);
  for (std::size_t i = 0; i < files_.tensors().size(); ++i) {
    const FileTensor& tensor = files_.tensors()[i];
    std::int32_t entry = -1;
    if (absl::Status status = CheckTensor(tensor, &entry); !status.ok()) return status;
    if (entry < 0) {
      skipped[i] = true;
      continue;
    }
    const auto file = static_cast<std::size_t>(tensor.file);
    const Index read_nbytes = plan_->plan().ReadNbytes(entry);
    is_mapped_[i] = can_map_[file] && session_.HasPlaces(tensor.name);
    ranges[i] = NeededRanges(plan_->plan(), entry, is_mapped_[i] ? kWindowGap : gaps_[file]);
    if (is_mapped_[i]) {
      stats_.planned_nbytes += read_nbytes;
    } else {
      for (const ByteRange& range : ranges[i]) stats_.planned_nbytes += range.nbytes();
    }
    stats_.needed_nbytes += read_nbytes;
    ++stats_.num_names;
  }
  for (std::size_t i = 0; i < files_.tensors().size(); ++i) {
    if (skipped[i]) continue;
    if (absl::Status status = session_.CheckArriving(files_.tensors()[i].name); !status.ok()) {
      return Prefixed(absl::StrCat("`", files_.path(files_.tensors()[i].file), "`: "), status);
    }
  }
  ChooseBatches(ranges, skipped);
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

void FileLoad::ChooseBatches(const std::vector<std::vector<ByteRange>>& ranges,
                             const std::vector<bool>& skipped) {
  // A GPU wants large copies.
  is_small_ = are_cached_ && !buffers_.pins_memory();
  const Index wanted = is_small_ ? kCachedBatch : kDiskBatch;
  num_threads_ =
      options_.num_threads > 0 ? options_.num_threads : ChooseThreads(are_cached_, options_.direct);
  // A small batch is one thread's, and soon read: there are more, lest threads wait for this one.
  const Index in_flight = std::max(kMinInFlight, is_small_ ? 4 * Index{num_threads_} : 0);
  max_in_flight_ = static_cast<std::size_t>(
      std::clamp(options_.max_staging_nbytes / kMinBatch, kMinInFlight, in_flight));
  const Index allowed =
      std::max(kMinBatch, options_.max_staging_nbytes / static_cast<Index>(max_in_flight_));
  std::vector<bool> not_mapped = skipped;
  std::vector<bool> not_read = skipped;
  for (std::size_t i = 0; i < skipped.size(); ++i) {
    (is_mapped_[i] ? not_read : not_mapped)[i] = true;
  }
  batches_ = MakeBatches(files_, ranges, not_mapped, kWindow);
  for (ReadBatch& batch : batches_) batch.is_mapped = !batch.segments.empty();
  std::ranges::move(MakeBatches(files_, ranges, not_read, {std::min(wanted, allowed)}),
                    std::back_inserter(batches_));
}

absl::StatusOr<bool> FileLoad::Step(double seconds) {
  return Attempt([&] { return Advance(seconds); },
                 [&](const absl::Status& raised) -> absl::StatusOr<bool> {
                   return is_over_ ? raised : Fail(raised);
                 });
}

absl::StatusOr<bool> FileLoad::Advance(double seconds) {
  const double stop = Now() + seconds;
  while (!is_over_) {
    while (in_flight_.size() < max_in_flight_ && next_batch_ < batches_.size()) {
      if (absl::Status status = SubmitNext(); !status.ok()) return Fail(status);
    }
    if (in_flight_.empty()) {
      stats_ = stats();
      is_over_ = true;
      break;
    }
    const InFlight& first = in_flight_.front();
    if (!reader_->WaitFor(*first.group, std::max(0.0, stop - Now()))) return false;
    absl::Status status = reader_->StatusOf(*first.group);
    if (status.ok()) {
      status = Land(first);
    } else {
      status = Annotate(status,
                        absl::StrCat("; of `", TensorAt(first.batch->segments.front().tensor).name,
                                     "` and what was read with it nothing counts as landed"));
    }
    if (!status.ok()) return Fail(status);
    if (first.staging.defined()) buffers_.GiveBack(first.staging);
    in_flight_.pop_front();
    const bool has_more = !in_flight_.empty() || next_batch_ < batches_.size();
    if (has_more && Now() >= stop) return false;
  }
  return true;
}

absl::Status FileLoad::Open(std::int32_t tensor) {
  if (is_open_[static_cast<std::size_t>(tensor)]) return absl::OkStatus();
  is_open_[static_cast<std::size_t>(tensor)] = true;
  const FileTensor& held = TensorAt(tensor);
  const at::IntArrayRef shape(held.shape.data(), held.shape.size());
  return session_.BeginParts(held.name, shape, *held.dtype);
}

absl::StatusOr<std::byte*> FileLoad::PlaceOf(const Segment& segment,
                                             std::vector<at::Tensor>& held) {
  if (segment.bytes.nbytes() < kMinInPlace) return nullptr;
  absl::StatusOr<std::optional<ByteSide>> place =
      session_.InPlace(TensorAt(segment.tensor).name, segment.bytes);
  if (!place.ok()) return place.status();
  if (!place->has_value() || !(*place)->tensor.is_cpu()) return nullptr;
  held.push_back((*place)->tensor);
  return static_cast<std::byte*>((*place)->tensor.storage().mutable_data()) + (*place)->byte_offset;
}

Index FileLoad::PlaceInStaging(InFlight& next, std::vector<ReadJob>& jobs) const {
  Index used = 0;
  Index file_stop = -1;  // of the read before
  std::size_t last = next.places.size();
  for (std::size_t i = 0; i < next.places.size(); ++i) {
    if (next.places[i] < 0) {
      file_stop = -1;
      continue;
    }
    const Segment& segment = next.batch->segments[i];
    const FileTensor& tensor = TensorAt(segment.tensor);
    const Index offset = tensor.offset + segment.bytes.start;
    const Index gap = offset - file_stop;
    if (file_stop >= 0 && gap >= 0 && gap <= gaps_[static_cast<std::size_t>(tensor.file)]) {
      used += gap;
      jobs.back().nbytes += gap;
    } else {
      // Items are aligned as they are in the tensor, and rows of it lie at equal distances.
      const bool goes_on = last < i && next.batch->segments[last].tensor == segment.tensor;
      used = goes_on ? next.places[last] + RoundUp(next.batch->segments[last].bytes.nbytes())
                     : RoundUp(used) + segment.bytes.start % kAlignment;
      jobs.push_back({files_.fd(tensor.file), &files_.path(tensor.file), offset, 0, nullptr, used});
    }
    next.places[i] = used;
    used += segment.bytes.nbytes();
    jobs.back().nbytes += segment.bytes.nbytes();
    file_stop = offset + segment.bytes.nbytes();
    last = i;
  }
  return used;
}

Index FileLoad::PlaceInWindow(InFlight& next, std::vector<ReadJob>& jobs) const {
  for (std::size_t i = 0; i < next.places.size(); ++i) {
    const Segment& segment = next.batch->segments[i];
    const FileTensor& tensor = TensorAt(segment.tensor);
    const Index offset = tensor.offset + segment.bytes.start;
    next.places[i] = jobs.empty() ? 0 : offset - jobs.front().offset;
    jobs.push_back({files_.fd(tensor.file), &files_.path(tensor.file), offset,
                    segment.bytes.nbytes(), nullptr, next.places[i]});
  }
  return jobs.back().tag + jobs.back().nbytes;
}

absl::Status FileLoad::SubmitNext() {
  InFlight next;
  next.batch = &batches_[next_batch_++];
  const std::vector<Segment>& segments = next.batch->segments;
  if (!segments.empty()) {
    absl::Status status = files_.CheckUnchanged(TensorAt(segments.front().tensor).file);
    if (!status.ok()) return status;
  }
  std::vector<ReadJob> in_place;
  for (const Segment& segment : segments) {
    if (absl::Status status = Open(segment.tensor); !status.ok()) return status;
    absl::StatusOr<std::byte*> place = nullptr;
    if (!next.batch->is_mapped) place = PlaceOf(segment, next.held);
    if (!place.ok()) return place.status();
    next.places.push_back(*place == nullptr ? 0 : -1);
    if (*place == nullptr) continue;
    const FileTensor& tensor = TensorAt(segment.tensor);
    in_place.push_back({files_.fd(tensor.file), &files_.path(tensor.file),
                        tensor.offset + segment.bytes.start, segment.bytes.nbytes(), *place});
    stats_.in_place_nbytes += segment.bytes.nbytes();
  }
  std::vector<ReadJob> staged;
  const Index nbytes =
      next.batch->is_mapped ? PlaceInWindow(next, staged) : PlaceInStaging(next, staged);
  absl::StatusOr<std::vector<StagedPart>> found = PartsOf(next);
  if (!found.ok()) return found.status();
  next.parts = std::make_shared<const std::vector<StagedPart>>(*std::move(found));
  const std::vector<StagedPart>& parts = *next.parts;
  const auto is_placed = [](const StagedPart& part) { return part.placed.has_value(); };
  // Then a small batch needs no buffer of its own: the thread's stays in its cache.
  const bool in_scratch =
      (is_small_ || next.batch->is_mapped) && std::ranges::all_of(parts, is_placed);
  if (nbytes > 0 && !in_scratch) {
    next.staging = buffers_.Take(nbytes);
    auto* const base = static_cast<std::byte*>(next.staging.mutable_data_ptr());
    for (ReadJob& job : staged) job.to = base + job.tag;
  }
  AfterRead then;
  if (std::ranges::any_of(parts, is_placed)) {
    const std::byte* base =
        in_scratch ? nullptr : static_cast<const std::byte*>(next.staging.const_data_ptr());
    const std::int32_t file = TensorAt(segments.front().tensor).file;
    then = [this, base, file, held = next.parts](const std::byte* scratch) {
      return WritePlaced(*held, base != nullptr ? base : scratch, file);
    };
  }
  if (next.batch->is_mapped && in_scratch) {
    Index copied = 0;
    for (const StagedPart& part : parts) copied += part.placed->nbytes;
    stats_.in_place_nbytes += copied;
    next.group = reader_->SubmitMapped(staged, std::move(then), copied);
  } else {
    // What is staged comes last: it is to be in a cache when it is written.
    in_place.insert(in_place.end(), staged.begin(), staged.end());
    next.group = reader_->Submit(in_place, std::move(then), in_scratch ? nbytes : 0);
  }
  in_flight_.push_back(std::move(next));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<FileLoad::StagedPart>> FileLoad::PartsOf(const InFlight& next) {
  const std::vector<Segment>& segments = next.batch->segments;
  const bool is_host = !buffers_.pins_memory() && !buffers_.goes_to_device();
  std::vector<StagedPart> parts;
  for (std::size_t first = 0; first < segments.size();) {
    const std::int32_t tensor = segments[first].tensor;
    std::vector<ByteRun> runs;
    for (; first < segments.size() && segments[first].tensor == tensor; ++first) {
      const ByteRange& bytes = segments[first].bytes;
      if (next.places[first] < 0) continue;
      runs.push_back({bytes.start, next.places[first], bytes.nbytes()});
    }
    for (StridedMap& held : ToMaps(runs)) {
      std::optional<PlacedPart> placed;
      if (is_host) {
        absl::StatusOr<std::optional<PlacedPart>> found =
            session_.PlacesOf(TensorAt(tensor).name, held);
        if (!found.ok()) return found.status();
        placed = *std::move(found);
      }
      parts.push_back({tensor, std::move(held), std::move(placed)});
    }
  }
  return parts;
}

// In a thread of the reader.
absl::Status FileLoad::WritePlaced(const std::vector<StagedPart>& parts, const std::byte* staging,
                                   std::int32_t file) const {
  if (absl::Status status = files_.CheckUnchanged(file); !status.ok()) return status;
  for (const StagedPart& part : parts) {
    if (part.placed.has_value()) part.placed->Write(staging);
  }
  return absl::OkStatus();
}

absl::Status FileLoad::Land(const InFlight& read) {
  const std::vector<Segment>& segments = read.batch->segments;
  if (!segments.empty()) {
    absl::Status status = files_.CheckUnchanged(TensorAt(segments.front().tensor).file);
    if (!status.ok()) return status;
  }
  at::Tensor staged = read.staging;
  if (staged.defined()) {
    absl::StatusOr<at::Tensor> readable = buffers_.Readable(staged);
    if (!readable.ok()) return readable.status();
    staged = *std::move(readable);
  }
  if (buffers_.goes_to_device()) session_.BeginBatch();
  const absl::Status status = LandSegments(read, staged);
  if (!buffers_.goes_to_device()) return status;
  const absl::Status end = session_.EndBatch();
  return status.ok() ? end : status;
}

absl::Status FileLoad::LandSegments(const InFlight& read, const at::Tensor& staged) {
  const std::vector<Segment>& segments = read.batch->segments;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (read.places[i] >= 0) continue;
    const std::string& name = TensorAt(segments[i].tensor).name;
    absl::Status status = session_.DeliveredInPlace(name, segments[i].bytes);
    if (!status.ok()) return status;
  }
  for (const StagedPart& part : *read.parts) {
    const std::string& name = TensorAt(part.tensor).name;
    absl::Status status = part.placed.has_value()
                              ? session_.DeliveredPart(name, part.held, *part.placed)
                              : session_.DeliverPart(name, part.held, ByteSide::OfStorage(staged));
    if (!status.ok()) return status;
  }
  for (const std::int32_t tensor : read.batch->finishes) {
    if (absl::Status status = Open(tensor); !status.ok()) return status;
    absl::Status status = session_.CompleteParts(TensorAt(tensor).name);
    if (!status.ok()) return status;
    ++stats_.names_done;
  }
  return absl::OkStatus();
}

absl::Status FileLoad::Fail(const absl::Status& status) {
  reader_->Cancel();
  stats_ = stats();
  is_over_ = true;
  in_flight_.clear();
  return session_.FailWith(status);
}

absl::Status FileLoad::Cancel(const std::string& reason) {
  if (is_over_) return absl::OkStatus();
  return Fail(absl::CancelledError(absl::StrCat("`load_files` did not finish: ", reason)));
}

FileLoadStats FileLoad::stats() const {
  FileLoadStats stats = stats_;
  if (is_over_) return stats;
  if (reader_ != nullptr) stats.read_nbytes = reader_->nbytes_read();
  stats.seconds = Now() - start_;
  return stats;
}

}  // namespace loadplan
