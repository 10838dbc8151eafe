#include "transfer/checkpoint_files.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lifecycle/annotate.h"
#include "transfer/checkpoint_index.h"
#include "transfer/read_fully.h"
#include "transfer/safetensors_header.h"

namespace loadplan {
namespace {

constexpr const char* kIndexName = "model.safetensors.index.json";

absl::Status InFile(const std::string& path, const absl::Status& status) {
  return Prefixed(absl::StrCat("`", path, "` "), status);
}

std::optional<at::ScalarType> ScalarTypeOf(std::string_view dtype) {
  struct Pair {
    std::string_view dtype;
    at::ScalarType scalar_type;
  };
  static constexpr Pair kPairs[] = {{"BOOL", at::kBool},
                                    {"U8", at::kByte},
                                    {"I8", at::kChar},
                                    {"U16", at::kUInt16},
                                    {"I16", at::kShort},
                                    {"U32", at::kUInt32},
                                    {"I32", at::kInt},
                                    {"U64", at::kUInt64},
                                    {"I64", at::kLong},
                                    {"F16", at::kHalf},
                                    {"BF16", at::kBFloat16},
                                    {"F32", at::kFloat},
                                    {"F64", at::kDouble},
                                    {"C64", at::kComplexFloat},
                                    {"F4", at::kFloat4_e2m1fn_x2},
                                    {"F8_E4M3", at::kFloat8_e4m3fn},
                                    {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz},
                                    {"F8_E5M2", at::kFloat8_e5m2},
                                    {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz},
                                    {"F8_E8M0", at::kFloat8_e8m0fnu}};
  for (const Pair& pair : kPairs) {
    if (pair.dtype == dtype) return pair.scalar_type;
  }
  return std::nullopt;
}

FileTensor ToFileTensor(SafetensorsEntry entry, std::int32_t file, Index data_start) {
  FileTensor tensor{std::move(entry.name),
                    std::move(entry.shape),
                    ScalarTypeOf(entry.dtype),
                    std::move(entry.dtype),
                    file,
                    data_start + entry.bytes.start,
                    entry.bytes.nbytes()};
  if (tensor.dtype != at::kFloat4_e2m1fn_x2) return tensor;
  if (tensor.shape.empty() || tensor.shape.back() % 2 != 0) {
    tensor.dtype = std::nullopt;  // its rows share bytes
  } else {
    tensor.shape.back() /= 2;
  }
  return tensor;
}

absl::StatusOr<std::string> ReadText(int fd, Index offset, Index nbytes) {
  std::string text(static_cast<std::size_t>(nbytes), '\0');
  absl::Status status = ReadFully(fd, offset, nbytes, reinterpret_cast<std::byte*>(text.data()));
  if (!status.ok()) return status;
  return text;
}

absl::StatusOr<OwnedFd> OpenFile(const std::string& path) {
  // A pipe without a writer is no file either, and is not waited for.
  OwnedFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() >= 0) return fd;
  return absl::NotFoundError(
      absl::StrCat("`", path, "` cannot be opened: ", std::generic_category().message(errno)));
}

}  // namespace

std::string WhyNoDtype(const FileTensor& tensor) {
  return absl::StrCat("as ", tensor.file_dtype, " of shape [", absl::StrJoin(tensor.shape, ", "),
                      "], for which torch has no dtype");
}

absl::StatusOr<CheckpointFiles::Stamp> CheckpointFiles::StampOf(const std::string& path, int fd) {
  struct stat found {};
  if (fstat(fd, &found) != 0 || !S_ISREG(found.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat("`", path, "` is no file that can be read"));
  }
  return Stamp{found.st_size, found.st_mtim.tv_sec, found.st_mtim.tv_nsec};
}

absl::StatusOr<CheckpointFiles> CheckpointFiles::Open(std::span<const std::string> paths) {
  CheckpointFiles files;
  for (const std::string& path : paths) {
    std::error_code ignored;
    absl::Status status;
    if (std::filesystem::is_directory(path, ignored)) {
      status = files.AddFolder(path);
    } else {
      status = absl::EndsWith(path, ".index.json") ? files.AddIndex(path) : files.AddFile(path);
    }
    if (!status.ok()) return status;
  }
  if (absl::Status status = files.CheckNames(); !status.ok()) return status;
  return files;
}

absl::Status CheckpointFiles::AddFolder(const std::string& path) {
  const std::filesystem::path folder(path);
  std::error_code error;
  if (std::filesystem::exists(folder / kIndexName, error)) return AddIndex(folder / kIndexName);
  std::vector<std::string> found;
  for (const auto& item : std::filesystem::directory_iterator(folder, error)) {
    if (item.path().extension() == ".safetensors") found.push_back(item.path().string());
  }
  if (error || found.empty()) {
    return absl::NotFoundError(
        absl::StrCat("`", path, "` holds neither ", kIndexName, " nor a *.safetensors file"));
  }
  std::ranges::sort(found);
  for (const std::string& file : found) {
    if (absl::Status status = AddFile(file); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckpointFiles::AddIndex(const std::string& path) {
  absl::StatusOr<OwnedFd> fd = OpenFile(path);
  if (!fd.ok()) return fd.status();
  const absl::StatusOr<Stamp> stamp = StampOf(path, fd->get());
  if (!stamp.ok()) return stamp.status();
  if (stamp->nbytes > kMaxSafetensorsHeader) {
    return absl::InvalidArgumentError(
        absl::StrCat("`", path, "` is no index: it has ", stamp->nbytes, " bytes"));
  }
  const absl::StatusOr<std::string> text = ReadText(fd->get(), 0, stamp->nbytes);
  if (!text.ok()) return InFile(path, text.status());
  const absl::StatusOr<std::vector<IndexedFile>> index = ParseCheckpointIndex(*text);
  if (!index.ok()) return InFile(path, index.status());
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  for (const IndexedFile& indexed : *index) {
    const std::size_t first = tensors_.size();
    if (absl::Status status = AddFile(folder / indexed.file); !status.ok()) return status;
    absl::flat_hash_set<std::string_view> held;
    for (std::size_t i = first; i < tensors_.size(); ++i) held.insert(tensors_[i].name);
    for (const std::string& name : indexed.names) {
      if (held.contains(name)) continue;
      return absl::InvalidArgumentError(absl::StrCat("`", path, "` places `", name, "` in `",
                                                     indexed.file, "`, which does not hold it"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckpointFiles::AddFile(const std::string& path) {
  absl::StatusOr<OwnedFd> fd = OpenFile(path);
  if (!fd.ok()) return fd.status();
  const absl::StatusOr<Stamp> stamp = StampOf(path, fd->get());
  if (!stamp.ok()) return stamp.status();
  const absl::StatusOr<std::string> prefix =
      ReadText(fd->get(), 0, std::min(stamp->nbytes, kSafetensorsPrefix));
  if (!prefix.ok()) return InFile(path, prefix.status());
  const absl::StatusOr<Index> nbytes = SafetensorsHeaderNbytes(*prefix, stamp->nbytes);
  if (!nbytes.ok()) return InFile(path, nbytes.status());
  const absl::StatusOr<std::string> json = ReadText(fd->get(), kSafetensorsPrefix, *nbytes);
  if (!json.ok()) return InFile(path, json.status());
  const Index data_start = kSafetensorsPrefix + *nbytes;
  absl::StatusOr<std::vector<SafetensorsEntry>> entries =
      ParseSafetensorsHeader(*json, stamp->nbytes - data_start);
  if (!entries.ok()) return Prefixed(absl::StrCat("`", path, "`: "), entries.status());
  const auto file = static_cast<std::int32_t>(files_.size());
  files_.push_back({path, *std::move(fd), *stamp});
  for (SafetensorsEntry& entry : *entries) {
    tensors_.push_back(ToFileTensor(std::move(entry), file, data_start));
  }
  return absl::OkStatus();
}

absl::Status CheckpointFiles::CheckNames() const {
  absl::flat_hash_map<std::string_view, std::int32_t> files;
  for (const FileTensor& tensor : tensors_) {
    const auto [found, is_new] = files.emplace(tensor.name, tensor.file);
    if (is_new) continue;
    return absl::InvalidArgumentError(absl::StrCat("`", tensor.name, "` is declared twice: in `",
                                                   path(found->second), "` and in `",
                                                   path(tensor.file), "`"));
  }
  return absl::OkStatus();
}

std::string CheckpointFiles::Description() const {
  std::vector<std::string> of_file;
  for (const File& file : files_) {
    // Two files may be of one size and one tick of the clock. The number stays as long as it is
    // open.
    struct stat found {};
    (void)fstat(file.fd.get(), &found);
    of_file.push_back(absl::StrCat(found.st_ino, " ", file.stamp.nbytes, " ", file.stamp.seconds,
                                   " ", file.stamp.nanoseconds, "\n"));
  }
  for (const FileTensor& tensor : tensors_) {
    absl::StrAppend(&of_file[static_cast<std::size_t>(tensor.file)], tensor.offset, " ",
                    tensor.name, "\n");
  }
  std::ranges::sort(of_file);
  return absl::StrJoin(of_file, "\n");
}

absl::Status CheckpointFiles::CheckUnchanged(std::int32_t file) const {
  const absl::StatusOr<Stamp> now = StampOf(path(file), fd(file));
  if (now.ok() && *now == At(file).stamp) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("`", path(file), "` was changed while it was read; load it again"));
}

}  // namespace loadplan
