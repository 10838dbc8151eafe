#include "ops/file_load_class.h"

#include "transfer/checkpoint_files.h"

namespace loadplan {

using Ints = std::vector<std::int64_t>;

void DefineFileLoad(torch::Library& library) {
  library.class_<FileLoadClass>("FileLoad")
      .def("step", &FileLoadClass::step)
      .def("cancel", &FileLoadClass::cancel)
      .def("stats", &FileLoadClass::stats);
}

std::tuple<Ints, double> FileLoadClass::stats() const {
  const FileLoadStats stats = load_->stats();
  return {{stats.names_done, stats.num_names, stats.needed_nbytes, stats.planned_nbytes,
           stats.read_nbytes, stats.in_place_nbytes},
          stats.seconds};
}

FileLoadOptions DecodeOptions(const Ints& numbers) {
  TORCH_CHECK_VALUE(numbers.size() == 5, "5 options of a load are needed");
  FileLoadOptions options;
  options.num_threads = static_cast<int>(numbers[0]);
  if (numbers[1] >= 0) options.direct = numbers[1] != 0;
  options.max_staging_nbytes = numbers[2];
  options.gap = numbers[3];
  options.skips_undeclared = numbers[4] != 0;
  return options;
}

std::vector<BucketItem> DecodeBucket(std::vector<std::string> names, const Ints& dims,
                                     const Ints& ranks, const Ints& dtypes, const Ints& offsets) {
  std::vector<BucketItem> items;
  items.reserve(names.size());
  auto dim = dims.begin();
  for (std::size_t i = 0; i < names.size(); ++i) {
    items.push_back({std::move(names[i]), Ints(dim, dim + ranks[i]),
                     static_cast<at::ScalarType>(dtypes[i]), offsets[i]});
    dim += ranks[i];
  }
  return items;
}

std::tuple<std::vector<std::string>, Ints, Ints, Ints> ReadMetadata(
    std::vector<std::string> paths) {
  const CheckpointFiles files = Value(CheckpointFiles::Open(paths));
  std::tuple<std::vector<std::string>, Ints, Ints, Ints> result;
  auto& [names, dims, ranks, dtypes] = result;
  for (const FileTensor& tensor : files.tensors()) {
    TORCH_CHECK_VALUE(tensor.dtype.has_value(), "`", files.path(tensor.file), "` holds `",
                      tensor.name, "` ", WhyNoDtype(tensor));
    names.push_back(tensor.name);
    dims.insert(dims.end(), tensor.shape.begin(), tensor.shape.end());
    ranks.push_back(static_cast<std::int64_t>(tensor.shape.size()));
    dtypes.push_back(static_cast<std::int64_t>(*tensor.dtype));
  }
  return result;
}

}  // namespace loadplan
