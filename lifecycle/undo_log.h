// UndoLog: the bytes that an atomic update overwrites, kept until the update has ended well.
//
//   UndoLog log({});
//   log.Keep(storage, region);   // before the region is written
//   ...
//   log.PutBack();               // every kept byte is where it was
#ifndef LOADPLAN_LIFECYCLE_UNDO_LOG_H_
#define LOADPLAN_LIFECYCLE_UNDO_LOG_H_

#include <ATen/core/Tensor.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "geometry/export.h"
#include "geometry/strided_layout.h"

namespace loadplan {

struct UndoOptions {
  // So many bytes are kept in host memory, those after them in a file. Below 0: a quarter of the
  // machine's memory.
  Index memory_nbytes = -1;
  // Where the file is made; it has no name there and goes with the process. "": $TMPDIR, or /tmp.
  std::string directory;
};

// Not safe to call from several threads at once.
class LOADPLAN_API UndoLog {
 public:
  explicit UndoLog(UndoOptions options);

  // Keeps the bytes of `region` in the storage of `tensor` as they are now. Regions that are kept
  // one by one must be disjoint; after KeepWhole of their storage they are not kept again.
  // Storages without memory (meta) are skipped.
  // Errors: ResourceExhausted where neither memory nor file take them; Internal as in CopyMapped.
  absl::Status Keep(const at::Tensor& tensor, const StridedLayout& region);
  // Keeps the whole storage of `tensor`, with the bytes from before for regions of it that were
  // kept. Does nothing for a storage that is kept whole. FailedPrecondition: it is not mapped.
  absl::Status KeepWhole(const at::Tensor& tensor);

  // Forgets storages that nothing but this log holds any more.
  void DropUnshared();

  // Writes back every kept byte, reads all of them again, and forgets them. Errors: DataLoss where
  // a byte is not what it was; Internal where bytes cannot be written or read. Goes on after an
  // error with what is left, and returns the first.
  absl::Status PutBack();

  bool empty() const { return kept_.empty(); }
  Index memory_nbytes() const { return memory_nbytes_; }
  Index file_nbytes() const { return file_nbytes_; }

 private:
  struct Kept {
    at::Tensor tensor;     // keeps the storage
    StridedLayout region;  // in bytes of the storage
    at::Tensor bytes;      // packed, on the host; undefined where they lie in the file
    Index file_offset = 0;
  };
  struct CloseFile {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  absl::Status Hold(Kept kept);
  absl::Status WriteToFile(Kept& kept);
  absl::StatusOr<at::Tensor> BytesOf(const Kept& kept) const;
  absl::Status PutBackOne(const Kept& kept) const;

  const Index memory_limit_;
  const std::string directory_;
  std::unique_ptr<std::FILE, CloseFile> file_;
  Index memory_nbytes_ = 0;
  Index file_nbytes_ = 0;
  std::vector<Kept> kept_;
  absl::flat_hash_map<const c10::StorageImpl*, bool> is_whole_;
};

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_UNDO_LOG_H_
