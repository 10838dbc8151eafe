// WrittenFiles: safetensors files in a temporary folder, written byte by byte.
#ifndef LOADPLAN_TESTS_TRANSFER_WRITTEN_FILES_H_
#define LOADPLAN_TESTS_TRANSFER_WRITTEN_FILES_H_

#include <ATen/ATen.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

namespace loadplan::testing {

class WrittenFiles {
 public:
  using Tensors = std::vector<std::pair<std::string, at::Tensor>>;

  WrittenFiles() {
    std::string pattern = (std::filesystem::temp_directory_path() / "loadplan-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~WrittenFiles() { std::filesystem::remove_all(folder_); }
  WrittenFiles(const WrittenFiles&) = delete;
  WrittenFiles& operator=(const WrittenFiles&) = delete;

  const std::filesystem::path& folder() const { return folder_; }

  // In this order, without padding: offsets may be odd. Returns the path.
  std::string Write(const Tensors& tensors, std::string file = "") {
    std::string header = "{";
    std::string data;
    for (const auto& [name, tensor] : tensors) {
      if (header.size() > 1) header += ", ";
      header +=
          "\"" + name + "\": {\"dtype\": \"" + CodeOf(tensor.scalar_type()) + "\", \"shape\": [";
      for (std::int64_t d = 0; d < tensor.dim(); ++d) {
        header += (d == 0 ? "" : ", ") + std::to_string(tensor.size(d));
      }
      header += "], \"data_offsets\": [" + std::to_string(data.size()) + ", ";
      const at::Tensor bytes = tensor.contiguous();
      data.append(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
      header += std::to_string(data.size()) + "]}";
    }
    return WriteRaw(header + "}", data, std::move(file));
  }
  std::string WriteRaw(const std::string& header, const std::string& data, std::string file = "") {
    if (file.empty()) file = "file" + std::to_string(num_files_++) + ".safetensors";
    const std::filesystem::path path = folder_ / file;
    std::ofstream stream(path, std::ios::binary);
    std::uint64_t nbytes = header.size();
    for (int i = 0; i < 8; ++i, nbytes >>= 8) stream.put(static_cast<char>(nbytes & 0xff));
    stream << header << data;
    return path.string();
  }
  std::string WriteText(const std::string& text, const std::string& file) {
    std::ofstream(folder_ / file, std::ios::binary) << text;
    return (folder_ / file).string();
  }

 private:
  static std::string CodeOf(at::ScalarType dtype) {
    switch (dtype) {
      case at::kFloat:
        return "F32";
      case at::kHalf:
        return "F16";
      case at::kBFloat16:
        return "BF16";
      default:
        return "U8";
    }
  }

  std::filesystem::path folder_;
  int num_files_ = 0;
};

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_TRANSFER_WRITTEN_FILES_H_
