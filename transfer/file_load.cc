#include "transfer/file_load.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lifecycle/annotate.h"
#include "lifecycle/attempt.h"

namespace loadplan {
namespace {

// Of the starts of reads in staging: what any item wants, and a page, for direct reads.
constexpr Index kAlignment = 16;
constexpr Index kPage = 4096;
// More than the memory of a thread is to hold, which is to stay in its cache.
constexpr Index kMaxScratch = Index{4} << 20;
// Of batches out of the page cache, in flight: more memory is in no cache, and has to be made
// first.
constexpr Index kMaxCached = Index{32} << 20;
// A segment that is shorter goes through staging: a place costs more to find than a copy.
constexpr Index kMinInPlace = Index{1} << 16;
constexpr Index kMax = std::numeric_limits<Index>::max();

double Now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

Index RoundUp(Index value, Index unit) { return (value + unit - 1) / unit * unit; }

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
      ways_(files_.tensors().size(), Way::kNone),
      is_cut_(files_.tensors().size(), false),
      is_open_(files_.tensors().size(), false),
      buffers_(AnyOnCuda(*plan_->targets), CopiesOf(*plan_->targets), options.max_staging_nbytes),
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
        RangeReader::Options{load->num_threads_, options.direct.value_or(false),
                             /*advises=*/!load->are_cached_});
    return status;
  };
  if (absl::Status status = Attempt(prepare); !status.ok()) {
    load->is_over_ = true;
    return session.FailWith(status);
  }
  return load;
}

absl::StatusOr<bool> FileLoad::Step(double seconds) {
  return Attempt([&] { return Advance(seconds); },
                 [&](const absl::Status& raised) -> absl::StatusOr<bool> {
                   return is_over_ ? raised : Fail(raised);
                 });
}

bool FileLoad::HasRoom() const {
  if (in_flight_.empty()) return true;
  const ReadBatch& next = batches_.front();
  const Index staged = next.is_mapped ? 0 : next.nbytes;
  const Index most =
      is_small_ ? std::min(kMaxCached, options_.max_staging_nbytes) : options_.max_staging_nbytes;
  return in_flight_.size() < max_in_flight_ && (staged == 0 || staged_nbytes_ + staged <= most);
}

absl::StatusOr<bool> FileLoad::Advance(double seconds) {
  const double stop = Now() + seconds;
  while (!is_over_) {
    while (!batches_.empty() && HasRoom()) {
      if (absl::Status status = SubmitNext(); !status.ok()) return Fail(status);
    }
    if (in_flight_.empty()) {
      stats_ = stats();
      is_over_ = true;
      break;
    }
    InFlight& first = in_flight_.front();
    if (!reader_->WaitFor(*first.group, std::max(0.0, stop - Now()))) return false;
    absl::Status status = reader_->StatusOf(*first.group);
    if (first.batch.is_mapped && absl::IsUnavailable(status)) {
      ReadInstead(first.batch);
    } else {
      status = status.ok() ? Land(first) : Explain(status, first);
      if (!status.ok()) return Fail(status);
    }
    if (first.staging.defined()) buffers_.GiveBack(std::move(first.staging));
    if (!first.batch.is_mapped) staged_nbytes_ -= first.batch.nbytes;
    in_flight_.pop_front();
    const bool has_more = !in_flight_.empty() || !batches_.empty();
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
  const std::string& name = TensorAt(segment.tensor).name;
  // Bytes that are not live, or that cannot be kept from being written one by one anyway.
  const std::int32_t entry = *plan_->plan().Find(name);
  const bool is_fallback =
      plan_->plan().entries()[static_cast<std::size_t>(entry)].kind == EntryKind::kFallback;
  if (!is_fallback && !is_cut_[static_cast<std::size_t>(segment.tensor)]) return nullptr;
  absl::StatusOr<std::optional<ByteSide>> place = session_.InPlace(name, segment.bytes);
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
    const Segment& segment = next.batch.segments[i];
    const FileTensor& tensor = TensorAt(segment.tensor);
    const Index offset = tensor.offset + segment.bytes.start;
    const Index gap = offset - file_stop;
    const bool is_direct = ways_[static_cast<std::size_t>(segment.tensor)] == Way::kDirect;
    const Index most = is_direct ? 0 : facts_[static_cast<std::size_t>(tensor.file)].gap;
    if (file_stop >= 0 && gap >= 0 && gap <= most && jobs.back().past_cache == is_direct) {
      used += gap;
      jobs.back().nbytes += gap;
    } else {
      if (!jobs.empty() && jobs.back().past_cache) used = RoundUp(used, kPage);
      // Items are aligned as they are in the tensor, and rows of it lie at equal distances.
      const bool goes_on = last < i && next.batch.segments[last].tensor == segment.tensor;
      if (is_direct) {
        used = RoundUp(used, kPage) + offset % kPage;
      } else if (goes_on) {
        used = next.places[last] + RoundUp(next.batch.segments[last].bytes.nbytes(), kAlignment);
      } else {
        used = RoundUp(used, kAlignment) + segment.bytes.start % kAlignment;
      }
      jobs.push_back(
          {files_.fd(tensor.file), &files_.path(tensor.file), offset, 0, nullptr, used, is_direct});
    }
    next.places[i] = used;
    used += segment.bytes.nbytes();
    jobs.back().nbytes += segment.bytes.nbytes();
    file_stop = offset + segment.bytes.nbytes();
    last = i;
  }
  return jobs.empty() || !jobs.back().past_cache ? used : RoundUp(used, kPage);
}

Index FileLoad::PlaceInWindow(InFlight& next, std::vector<ReadJob>& jobs) const {
  for (std::size_t i = 0; i < next.places.size(); ++i) {
    const Segment& segment = next.batch.segments[i];
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
  next.batch = std::move(batches_.front());
  batches_.pop_front();
  const std::vector<Segment>& segments = next.batch.segments;
  if (!segments.empty()) {
    absl::Status status = files_.CheckUnchanged(TensorAt(segments.front().tensor).file);
    if (!status.ok()) return Explain(status, next);
  }
  std::vector<ReadJob> jobs;
  for (const Segment& segment : segments) {
    if (absl::Status status = Open(segment.tensor); !status.ok()) return status;
    absl::StatusOr<std::byte*> place = nullptr;
    if (!next.batch.is_mapped) place = PlaceOf(segment, next.held);
    if (!place.ok()) return place.status();
    next.places.push_back(*place == nullptr ? 0 : -1);
    if (*place == nullptr) continue;
    const FileTensor& tensor = TensorAt(segment.tensor);
    jobs.push_back({files_.fd(tensor.file), &files_.path(tensor.file),
                    tensor.offset + segment.bytes.start, segment.bytes.nbytes(), *place});
    next.in_place_nbytes += segment.bytes.nbytes();
  }
  std::vector<ReadJob> staged;
  const Index nbytes =
      next.batch.is_mapped ? PlaceInWindow(next, staged) : PlaceInStaging(next, staged);
  absl::StatusOr<std::vector<StagedPart>> found = PartsOf(next);
  if (!found.ok()) return found.status();
  next.parts = std::make_shared<const std::vector<StagedPart>>(*std::move(found));
  const bool are_placed = std::ranges::all_of(*next.parts, IsPlaced);
  // Then a small batch needs no buffer of its own: the thread's stays in its cache.
  const Index most = std::min(kMaxScratch, options_.max_staging_nbytes / num_threads_);
  const bool in_scratch =
      is_small_ && are_placed && jobs.empty() && nbytes <= std::max(read_limits_.nbytes, most);
  if (next.batch.is_mapped && are_placed) {
    for (const StagedPart& part : *next.parts) next.in_place_nbytes += part.placed->nbytes;
    next.group = reader_->SubmitMapped(staged, WritesOf(next, nullptr), next.in_place_nbytes);
  } else if (next.batch.is_mapped) {
    // Some place of it went meanwhile.
    ReadInstead(next.batch);
    return absl::OkStatus();
  } else {
    std::byte* base = nullptr;
    if (nbytes > 0 && !in_scratch) {
      next.staging = buffers_.Take(nbytes);
      base = static_cast<std::byte*>(next.staging.mutable_data_ptr());
      for (ReadJob& job : staged) job.to = base + job.tag;
    }
    // What is staged comes last: it is to be in a cache when it is written.
    jobs.insert(jobs.end(), staged.begin(), staged.end());
    next.group = reader_->Submit(jobs, WritesOf(next, base), in_scratch ? nbytes : 0);
    staged_nbytes_ += next.batch.nbytes;
  }
  in_flight_.push_back(std::move(next));
  return absl::OkStatus();
}

std::vector<ByteRun> FileLoad::NextRuns(const InFlight& next, Index most, std::size_t& first) {
  const std::vector<Segment>& segments = next.batch.segments;
  const std::int32_t tensor = segments[first].tensor;
  std::vector<ByteRun> runs;
  Index nbytes = 0;
  for (; first < segments.size() && segments[first].tensor == tensor && nbytes < most; ++first) {
    const ByteRange& bytes = segments[first].bytes;
    if (next.places[first] < 0) continue;
    nbytes += bytes.nbytes();
    if (!runs.empty() && runs.back().to + runs.back().nbytes == bytes.start &&
        runs.back().from + runs.back().nbytes == next.places[first]) {
      runs.back().nbytes += bytes.nbytes();
    } else {
      runs.push_back({bytes.start, next.places[first], bytes.nbytes()});
    }
  }
  return runs;
}

absl::StatusOr<std::vector<FileLoad::StagedPart>> FileLoad::PartsOf(const InFlight& next) {
  const std::vector<Segment>& segments = next.batch.segments;
  const bool is_host = !buffers_.pins_memory() && !buffers_.goes_to_device();
  std::vector<StagedPart> parts;
  for (std::size_t first = 0; first < segments.size();) {
    const std::size_t first_part = parts.size();
    const std::int32_t tensor = segments[first].tensor;
    const std::string& name = TensorAt(tensor).name;
    // Threads write a part each. What the session lands comes in one, because it converts in one go
    // what lies in one piece.
    const bool has_places = is_host && session_.HasPlaces(name);
    while (first < segments.size() && segments[first].tensor == tensor) {
      for (StridedMap& held : ToMaps(NextRuns(next, has_places ? kMaxSegment : kMax, first))) {
        std::optional<PlacedPart> placed;
        if (has_places) {
          absl::StatusOr<std::optional<PlacedPart>> found = session_.PlacesOf(name, held);
          if (!found.ok()) return found.status();
          placed = *std::move(found);
        }
        parts.push_back({tensor, std::move(held), std::move(placed)});
      }
    }
    // All of a tensor or nothing: what the session lands comes after another look at the file.
    const std::span<StagedPart> added = std::span(parts).subspan(first_part);
    if (!std::ranges::all_of(added, IsPlaced)) {
      for (StagedPart& part : added) part.placed.reset();
    }
  }
  return parts;
}

// In threads of the reader.
AfterRead FileLoad::WritesOf(const InFlight& next, const std::byte* staging) const {
  AfterRead then;
  if (next.parts->empty()) return then;
  const std::int32_t file = TensorAt(next.batch.segments.front().tensor).file;
  then.check = [this, file] { return files_.CheckUnchanged(file); };
  then.write = [staging, parts = next.parts](std::size_t i, const std::byte* base) {
    const StagedPart& part = (*parts)[i];
    if (part.placed.has_value()) part.placed->Write(staging != nullptr ? staging : base);
  };
  then.num_writes = next.parts->size();
  return then;
}

absl::Status FileLoad::Explain(const absl::Status& status, const InFlight& read) const {
  const std::vector<Segment>& segments = read.batch.segments;
  const Index failed_at = read.group == nullptr ? -1 : read.group->failed_at;
  // The tensor that the byte is of, or which it was read along for.
  const auto found = std::ranges::find_if(segments, [&](const Segment& segment) {
    return failed_at < TensorAt(segment.tensor).offset + segment.bytes.stop;
  });
  if (found == segments.end()) return status;
  const std::string& name = TensorAt(found->tensor).name;
  std::string what = absl::StrCat("; nothing was written of `", name, "`");
  if (is_cut_[static_cast<std::size_t>(found->tensor)]) {
    what = absl::StrCat("; some of `", name,
                        "`, which is larger than max_staging_bytes allows, may ", "be written");
  } else if (segments.back().tensor != segments.front().tensor) {
    what += ", nor of what was read with it";
  }
  return Annotate(status, what);
}

absl::Status FileLoad::Land(const InFlight& read) {
  const std::vector<Segment>& segments = read.batch.segments;
  // What threads have written was seen to be unchanged before.
  const bool is_written = std::ranges::none_of(read.places, [](Index at) { return at < 0; }) &&
                          std::ranges::all_of(*read.parts, IsPlaced);
  if (!segments.empty() && !is_written) {
    absl::Status status = files_.CheckUnchanged(TensorAt(segments.front().tensor).file);
    if (!status.ok()) {
      return Annotate(status, absl::StrCat("; of `", TensorAt(segments.front().tensor).name,
                                           "` and what was read with it nothing counts as landed"));
    }
  }
  at::Tensor staged = read.staging;
  if (staged.defined()) {
    absl::StatusOr<at::Tensor> readable = buffers_.Readable(staged);
    if (!readable.ok()) return readable.status();
    staged = *std::move(readable);
  }
  if (buffers_.goes_to_device()) session_.BeginBatch();
  absl::Status status = LandSegments(read, staged);
  if (buffers_.goes_to_device()) {
    const absl::Status end = session_.EndBatch();
    if (status.ok()) status = end;
  }
  if (status.ok()) stats_.in_place_nbytes += read.in_place_nbytes;
  return status;
}

absl::Status FileLoad::LandSegments(const InFlight& read, const at::Tensor& staged) {
  const std::vector<Segment>& segments = read.batch.segments;
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
  for (const std::int32_t tensor : read.batch.finishes) {
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
