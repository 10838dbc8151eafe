// CheckpointFiles: safetensors files, open, with what they hold.
#ifndef LOADPLAN_TRANSFER_CHECKPOINT_FILES_H_
#define LOADPLAN_TRANSFER_CHECKPOINT_FILES_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "geometry/index.h"
#include "transfer/owned_fd.h"

namespace loadplan {

struct FileTensor {
  std::string name;
  // As torch sees it: a tensor of F4 has half as many items of two values each in its last
  // dimension.
  DimVector shape;
  std::optional<at::ScalarType> dtype;  // nullopt: torch has none for it
  std::string file_dtype;
  std::int32_t file = 0;
  Index offset = 0;  // of its first byte in the file
  Index nbytes = 0;
};

// "as F4 of shape [8, 1], for which torch has no dtype"; where `tensor.dtype` is nullopt.
std::string WhyNoDtype(const FileTensor& tensor);

// Files stay open: one that is replaced under its name is read as it was.
class CheckpointFiles {
 public:
  // `paths`: safetensors files, folders (with an index, or whose *.safetensors files are taken in
  // order of their names), indices (*.index.json). Reads headers only.
  //
  // Errors name the file, and the tensor where it is about one. NotFound: no such file, a folder
  // without any. InvalidArgument: a header or index as it must not be, a name that two files hold,
  // a name that the index places in a file without it.
  static absl::StatusOr<CheckpointFiles> Open(std::span<const std::string> paths);

  // In order of the files, and in each in order of the data.
  const std::vector<FileTensor>& tensors() const { return tensors_; }
  std::size_t num_files() const { return files_.size(); }
  const std::string& path(std::int32_t file) const { return At(file).path; }
  int fd(std::int32_t file) const { return At(file).fd.get(); }

  // What the files are and when they were written, the same in whatever order they were opened.
  // Processes that opened other files, or the same ones at another time, have another text.
  std::string Description() const;

  // DataLoss, naming the file, where it has another size or time than when it was opened.
  absl::Status CheckUnchanged(std::int32_t file) const;

 private:
  struct Stamp {
    Index nbytes = 0;
    Index seconds = 0;  // of the last modification
    Index nanoseconds = 0;

    friend bool operator==(const Stamp&, const Stamp&) = default;
  };
  struct File {
    std::string path;
    OwnedFd fd;
    Stamp stamp;
  };

  static absl::StatusOr<Stamp> StampOf(const std::string& path, int fd);
  const File& At(std::int32_t file) const { return files_[static_cast<std::size_t>(file)]; }
  absl::Status AddFolder(const std::string& path);
  absl::Status AddIndex(const std::string& path);
  absl::Status AddFile(const std::string& path);
  absl::Status CheckNames() const;

  std::vector<File> files_;
  std::vector<FileTensor> tensors_;
};

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_CHECKPOINT_FILES_H_
