#include "lifecycle/undo_log.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lifecycle/attempt.h"
#include "lifecycle/byte_copy.h"
#include "lifecycle/mapped_memory.h"

namespace loadplan {
namespace {

Index QuarterOfMemory() {
  return static_cast<Index>(sysconf(_SC_PHYS_PAGES)) / 4 *
         static_cast<Index>(sysconf(_SC_PAGESIZE));
}

std::string TemporaryDirectory() {
  const char* const set = std::getenv("TMPDIR");
  return set != nullptr && *set != '\0' ? set : "/tmp";
}

// The region's bytes, packed, as the map's `to`.
StridedMap MapToPacked(const StridedLayout& region) {
  return PackedTo(StridedMap::Identity(region));
}
StridedMap MapFromPacked(const StridedLayout& region) {
  return PackedFrom(StridedMap::Identity(region));
}

absl::StatusOr<at::Tensor> Pack(const at::Tensor& tensor, const StridedLayout& region) {
  at::Tensor bytes = NewBytes(region.nbytes(), at::kCPU);
  absl::Status status =
      CopyMapped(MapToPacked(region), {}, ByteSide::OfStorage(bytes), ByteSide::OfStorage(tensor));
  if (!status.ok()) return status;
  return bytes;
}

const c10::StorageImpl* StorageOf(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

// Unlinked at once: it goes with the process.
std::FILE* OpenUnnamed(const std::string& directory) {
  std::string path = absl::StrCat(directory, "/loadplan-undo-XXXXXX");
  const int descriptor = mkstemp(path.data());
  if (descriptor < 0) return nullptr;
  unlink(path.c_str());
  std::FILE* const file = fdopen(descriptor, "w+b");
  if (file == nullptr) close(descriptor);
  return file;
}

// `io` is pread or pwrite; whole or not at all.
template <typename Io, typename Byte>
bool TransferAll(Io io, int descriptor, Byte* data, std::size_t nbytes, Index offset) {
  while (nbytes > 0) {
    const ssize_t done = io(descriptor, data, nbytes, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    data += done;
    nbytes -= static_cast<std::size_t>(done);
    offset += static_cast<Index>(done);
  }
  return true;
}

}  // namespace

UndoLog::UndoLog(UndoOptions options)
    : memory_limit_(options.memory_nbytes < 0 ? QuarterOfMemory() : options.memory_nbytes),
      directory_(options.directory.empty() ? TemporaryDirectory() : std::move(options.directory)) {}

absl::Status UndoLog::Keep(const at::Tensor& tensor, const StridedLayout& region) {
  if (region.empty() || tensor.is_meta()) return absl::OkStatus();
  const auto [found, is_new] = is_whole_.emplace(StorageOf(tensor), false);
  if (found->second) return absl::OkStatus();
  absl::StatusOr<at::Tensor> bytes = Pack(tensor, region);
  if (!bytes.ok()) return bytes.status();
  return Hold({tensor, region, *std::move(bytes)});
}

absl::Status UndoLog::KeepWhole(const at::Tensor& tensor) {
  const auto nbytes = static_cast<Index>(tensor.storage().nbytes());
  if (nbytes == 0 || tensor.is_meta()) return absl::OkStatus();
  const auto [found, is_new] = is_whole_.emplace(StorageOf(tensor), false);
  if (found->second) return absl::OkStatus();
  const StridedLayout all = StridedLayout::Unchecked(0, {nbytes}, {1}, 1);
  if (!IsMapped(tensor)) {
    is_whole_.erase(found);
    return absl::FailedPreconditionError(
        absl::StrCat("a tensor of ", nbytes,
                     " bytes that an atomic update has to keep has no memory; wake the "
                     "engine first"));
  }
  absl::StatusOr<at::Tensor> bytes = Pack(tensor, all);
  if (!bytes.ok()) return bytes.status();
  const std::size_t num_before = kept_.size();
  std::vector<std::size_t> pieces;  // of this storage
  for (std::size_t i = 0; !is_new && i < num_before; ++i) {
    const Kept& kept = kept_[i];
    if (StorageOf(kept.tensor) != StorageOf(tensor)) continue;
    pieces.push_back(i);
    absl::StatusOr<at::Tensor> before = BytesOf(kept);
    if (!before.ok()) return before.status();
    absl::Status status = CopyMapped(MapFromPacked(kept.region), {}, ByteSide::OfStorage(*bytes),
                                     ByteSide::OfStorage(*before));
    if (!status.ok()) return status;
  }
  // Kept as a whole before the pieces are dropped: a full disk must not lose them.
  if (absl::Status status = Hold({tensor, all, *std::move(bytes)}); !status.ok()) return status;
  found->second = true;
  for (const std::size_t i : pieces) {
    if (kept_[i].bytes.defined()) memory_nbytes_ -= kept_[i].region.nbytes();
    kept_[i] = {};
  }
  if (!pieces.empty())
    std::erase_if(kept_, [](const Kept& kept) { return !kept.tensor.defined(); });
  return absl::OkStatus();
}

void UndoLog::DropUnshared() {
  std::erase_if(kept_, [this](const Kept& kept) {
    if (kept.tensor.storage().use_count() > 1) return false;
    if (kept.bytes.defined()) memory_nbytes_ -= kept.region.nbytes();
    is_whole_.erase(StorageOf(kept.tensor));  // another storage may get its address
    return true;
  });
}

absl::Status UndoLog::Hold(Kept kept) {
  if (memory_nbytes_ + kept.region.nbytes() <= memory_limit_) {
    memory_nbytes_ += kept.region.nbytes();
  } else if (absl::Status status = WriteToFile(kept); !status.ok()) {
    return status;
  }
  kept_.push_back(std::move(kept));
  return absl::OkStatus();
}

absl::Status UndoLog::WriteToFile(Kept& kept) {
  if (file_ == nullptr) file_.reset(OpenUnnamed(directory_));
  const bool done =
      file_ != nullptr && TransferAll(pwrite, fileno(file_.get()),
                                      static_cast<const char*>(kept.bytes.const_data_ptr()),
                                      kept.bytes.nbytes(), file_nbytes_);
  if (!done) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the bytes that an atomic update overwrites could not be kept: ", kept.region.nbytes(),
        " bytes after ", memory_nbytes_, " in memory and ", file_nbytes_, " in a file in `",
        directory_, "` (", std::strerror(errno),
        "); free space there, point TMPDIR elsewhere, or raise LOADPLAN_ATOMIC_MEMORY"));
  }
  kept.file_offset = file_nbytes_;
  file_nbytes_ += kept.region.nbytes();
  kept.bytes.reset();
  return absl::OkStatus();
}

absl::StatusOr<at::Tensor> UndoLog::BytesOf(const Kept& kept) const {
  if (kept.bytes.defined()) return kept.bytes;
  at::Tensor bytes = NewBytes(kept.region.nbytes(), at::kCPU);
  if (!TransferAll(pread, fileno(file_.get()), static_cast<char*>(bytes.mutable_data_ptr()),
                   bytes.nbytes(), kept.file_offset)) {
    return absl::InternalError(absl::StrCat("old bytes could not be read back from the file in `",
                                            directory_, "`: ", std::strerror(errno)));
  }
  return bytes;
}

absl::Status UndoLog::PutBackOne(const Kept& kept) const {
  absl::StatusOr<at::Tensor> bytes = BytesOf(kept);
  if (!bytes.ok()) return bytes.status();
  absl::Status status = CopyMapped(MapFromPacked(kept.region), {}, ByteSide::OfStorage(kept.tensor),
                                   ByteSide::OfStorage(*bytes));
  if (!status.ok()) return status;
  absl::StatusOr<at::Tensor> now = Pack(kept.tensor, kept.region);
  if (!now.ok()) return now.status();
  if (std::memcmp(bytes->const_data_ptr(), now->const_data_ptr(), bytes->nbytes()) != 0) {
    return absl::DataLossError(absl::StrCat("old bytes were put back into ", ToString(kept.region),
                                            " of a storage, and others were read from it"));
  }
  return absl::OkStatus();
}

absl::Status UndoLog::PutBack() {
  absl::Status first;
  for (const Kept& kept : kept_) first.Update(Attempt([&] { return PutBackOne(kept); }));
  kept_.clear();
  is_whole_.clear();
  file_.reset();
  memory_nbytes_ = file_nbytes_ = 0;
  return first;
}

}  // namespace loadplan
