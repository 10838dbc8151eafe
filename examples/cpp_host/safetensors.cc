#include "safetensors.h"

#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string_view>

namespace {

class MappedFile {
 public:
  explicit MappedFile(const std::string& path) {
    const int file = open(path.c_str(), O_RDONLY);
    struct stat status = {};
    if (file < 0 || fstat(file, &status) != 0) throw std::runtime_error("cannot open " + path);
    nbytes_ = static_cast<std::size_t>(status.st_size);
    // Private: tensors look writable, and the file must stay as it is.
    address_ = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    close(file);
    if (address_ == MAP_FAILED) throw std::runtime_error("cannot map " + path);
  }
  ~MappedFile() { munmap(address_, nbytes_); }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  char* data() const { return static_cast<char*>(address_); }
  std::size_t nbytes() const { return nbytes_; }

 private:
  void* address_ = nullptr;
  std::size_t nbytes_ = 0;
};

// The header is one JSON object of objects, without escapes in the files that this reads.
class Header {
 public:
  explicit Header(std::string_view text) : rest_(text) { Expect('{'); }

  bool AtEnd() { return Peek() == '}'; }
  std::string_view String() {
    Expect('"');
    const std::size_t stop = rest_.find('"');
    if (stop == std::string_view::npos) throw std::runtime_error("the header ends in a string");
    const std::string_view text = rest_.substr(0, stop);
    rest_.remove_prefix(stop + 1);
    return text;
  }
  std::vector<int64_t> Numbers() {
    std::vector<int64_t> numbers;
    for (Expect('['); Peek() != ']'; Skip(',')) {
      int64_t number = 0;
      if (Peek() < '0' || Peek() > '9') throw std::runtime_error("the header lacks a number");
      while (!rest_.empty() && rest_[0] >= '0' && rest_[0] <= '9') {
        number = number * 10 + (rest_[0] - '0');
        rest_.remove_prefix(1);
      }
      numbers.push_back(number);
    }
    Expect(']');
    return numbers;
  }
  char Peek() {
    while (!rest_.empty() && std::strchr(" \n\t\r", rest_[0]) != nullptr) rest_.remove_prefix(1);
    return rest_.empty() ? '}' : rest_[0];
  }
  void Skip(char c) {
    if (Peek() == c) rest_.remove_prefix(1);
  }
  void Expect(char c) {
    if (rest_.empty() || Peek() != c)
      throw std::runtime_error("the header is no safetensors header");
    rest_.remove_prefix(1);
  }

 private:
  std::string_view rest_;
};

at::ScalarType DtypeOf(std::string_view name) {
  if (name == "F32") return at::kFloat;
  if (name == "F16") return at::kHalf;
  if (name == "BF16") return at::kBFloat16;
  if (name == "I64") return at::kLong;
  throw std::runtime_error("no such dtype here: " + std::string(name));
}

}  // namespace

std::vector<std::pair<std::string, at::Tensor>> ReadSafetensors(const std::string& path) {
  const auto file = std::make_shared<MappedFile>(path);
  std::uint64_t header_nbytes = 0;
  if (file->nbytes() < sizeof header_nbytes) throw std::runtime_error(path + " is too short");
  std::memcpy(&header_nbytes, file->data(), sizeof header_nbytes);
  if (header_nbytes > file->nbytes() - 8) throw std::runtime_error(path + " is too short");
  char* const data = file->data() + 8 + header_nbytes;
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  Header header({file->data() + 8, header_nbytes});
  for (; !header.AtEnd(); header.Skip(',')) {
    const std::string name(header.String());
    at::ScalarType dtype = at::kFloat;
    std::vector<int64_t> shape;
    std::vector<int64_t> offsets;
    header.Expect(':');
    for (header.Expect('{'); !header.AtEnd(); header.Skip(',')) {
      const std::string_view key = header.String();
      header.Expect(':');
      if (key == "shape") {
        shape = header.Numbers();
      } else if (key == "data_offsets") {
        offsets = header.Numbers();
      } else if (const std::string_view value = header.String(); key == "dtype") {
        dtype = DtypeOf(value);
      }
    }
    header.Expect('}');
    if (name == "__metadata__") continue;
    int64_t nbytes = static_cast<int64_t>(c10::elementSize(dtype));
    for (const int64_t extent : shape) nbytes *= extent;
    if (offsets.size() != 2 || offsets[1] - offsets[0] != nbytes ||
        static_cast<std::size_t>(offsets[1]) > file->nbytes() - 8 - header_nbytes) {
      throw std::runtime_error(path + " places `" + name + "` wrongly");
    }
    // Each tensor keeps the mapping.
    tensors.emplace_back(name, at::from_blob(
                                   data + offsets[0], shape, [file](void*) {}, dtype));
  }
  return tensors;
}
