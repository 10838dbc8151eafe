// What host processes see of loads out of files and buckets.
#ifndef LOADPLAN_OPS_FILE_LOAD_CLASS_H_
#define LOADPLAN_OPS_FILE_LOAD_CLASS_H_

#include <torch/custom_class.h>
#include <torch/library.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/raise.h"
#include "transfer/bucket.h"
#include "transfer/file_load.h"

namespace loadplan {

class FileLoadClass : public torch::CustomClassHolder {
 public:
  // `owner` keeps the session.
  FileLoadClass(c10::intrusive_ptr<torch::CustomClassHolder> owner, std::unique_ptr<FileLoad> load)
      : owner_(std::move(owner)), load_(std::move(load)) {}

  bool step(double seconds) { return Value(load_->Step(seconds)); }
  // The host has an error of its own to raise.
  void cancel(const std::string& reason) { (void)load_->Cancel(reason); }
  // Names done, names, needed bytes, planned bytes, read bytes, bytes in place; seconds.
  std::tuple<std::vector<std::int64_t>, double> stats() const;

 private:
  c10::intrusive_ptr<torch::CustomClassHolder> owner_;
  std::unique_ptr<FileLoad> load_;
};

void DefineFileLoad(torch::Library& library);

// (threads, direct, staging bytes, gap, skips undeclared).
FileLoadOptions DecodeOptions(const std::vector<std::int64_t>& numbers);

// `dims` holds the extents of all shapes, one after the other.
std::vector<BucketItem> DecodeBucket(std::vector<std::string> names,
                                     const std::vector<std::int64_t>& dims,
                                     const std::vector<std::int64_t>& ranks,
                                     const std::vector<std::int64_t>& dtypes,
                                     const std::vector<std::int64_t>& offsets);

// What files hold: names, extents of all shapes, ranks, dtypes.
std::tuple<std::vector<std::string>, std::vector<std::int64_t>, std::vector<std::int64_t>,
           std::vector<std::int64_t>>
ReadMetadata(std::vector<std::string> paths);

}  // namespace loadplan

#endif  // LOADPLAN_OPS_FILE_LOAD_CLASS_H_
