#include "transfer/safetensors_header.h"

#include <simdjson.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace loadplan {
namespace {

using simdjson::dom::element;
using simdjson::dom::object;

constexpr std::size_t kMaxRank = 64;  // torch's own limit

// Names of hostile files are of any length.
std::string Quoted(std::string_view name) {
  constexpr std::size_t kShown = 200;
  return absl::StrCat("`", std::string(name.substr(0, kShown)),
                      name.size() > kShown ? "...`" : "`");
}

absl::Status Malformed(std::string_view name, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(Quoted(name), " ", std::string(what)));
}

// A number that an Index can hold.
std::optional<Index> ToIndex(const element& value) {
  std::uint64_t number = 0;
  if (value.get(number) != simdjson::SUCCESS) return std::nullopt;
  if (number > static_cast<std::uint64_t>(std::numeric_limits<Index>::max())) return std::nullopt;
  return static_cast<Index>(number);
}

std::optional<DimVector> ToDims(const element& value) {
  simdjson::dom::array array;
  if (value.get(array) != simdjson::SUCCESS) return std::nullopt;
  DimVector dims;
  for (const element extent : array) {
    const std::optional<Index> index = ToIndex(extent);
    if (!index.has_value() || dims.size() == kMaxRank) return std::nullopt;
    dims.push_back(*index);
  }
  return dims;
}

// Bytes of a tensor; nullopt where they are too many, or end within a byte.
std::optional<Index> NbytesOf(const DimVector& shape, Index bits) {
  std::optional<Index> total = bits;
  for (const Index extent : shape) {
    if (!(total = CheckedMultiply(*total, extent)).has_value()) return std::nullopt;
  }
  if (*total % 8 != 0) return std::nullopt;
  return *total / 8;
}

absl::StatusOr<SafetensorsEntry> ParseEntry(std::string_view name, const element& value,
                                            Index data_nbytes) {
  object fields;
  if (value.get(fields) != simdjson::SUCCESS) return Malformed(name, "is described by no object");
  std::optional<std::string> dtype;
  std::optional<DimVector> shape;
  std::optional<DimVector> offsets;
  for (const auto& [key, field] : fields) {
    if (key != "dtype" && key != "shape" && key != "data_offsets") continue;
    const bool is_again =
        key == "dtype" ? dtype.has_value() : (key == "shape" ? shape : offsets).has_value();
    if (is_again) return Malformed(name, absl::StrCat("has two `", std::string(key), "`"));
    if (key == "dtype") {
      std::string_view text;
      if (field.get(text) != simdjson::SUCCESS)
        return Malformed(name, "has a dtype that is no text");
      dtype = std::string(text);
    } else {
      std::optional<DimVector>& dims = key == "shape" ? shape : offsets;
      dims = ToDims(field);
      if (dims.has_value()) continue;
      return Malformed(name, absl::StrCat("has a `", std::string(key),
                                          "` that is no list of numbers from 0 to 2^63 - 1"));
    }
  }
  if (!dtype.has_value() || !shape.has_value() || !offsets.has_value()) {
    return Malformed(name, "lacks one of `dtype`, `shape` and `data_offsets`");
  }
  const std::optional<Index> bits = SafetensorsDTypeBits(*dtype);
  if (!bits.has_value()) {
    return Malformed(name,
                     absl::StrCat("has a dtype that the format does not know: ", Quoted(*dtype)));
  }
  if (offsets->size() != 2 || (*offsets)[0] > (*offsets)[1] || (*offsets)[1] > data_nbytes) {
    return Malformed(name,
                     absl::StrFormat("has `data_offsets` that are no range within the %d bytes "
                                     "of data; the file was cut short or is damaged",
                                     data_nbytes));
  }
  SafetensorsEntry entry{
      std::string(name), *std::move(dtype), *std::move(shape), {(*offsets)[0], (*offsets)[1]}};
  const std::optional<Index> nbytes = NbytesOf(entry.shape, *bits);
  if (!nbytes.has_value()) {
    return Malformed(name, "has a shape whose bytes cannot be counted: too many, or no whole byte");
  }
  if (*nbytes != entry.bytes.nbytes()) {
    return Malformed(name, absl::StrFormat("has %d bytes of data, expected %d for its shape and "
                                           "dtype",
                                           entry.bytes.nbytes(), *nbytes));
  }
  return entry;
}

// Entries are sorted by place.
absl::Status CheckPlaces(const std::vector<SafetensorsEntry>& entries, Index data_nbytes) {
  Index stop = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const SafetensorsEntry& entry = entries[i];
    if (entry.bytes.start < stop) {
      return Malformed(entry.name, absl::StrCat("shares bytes with ", Quoted(entries[i - 1].name)));
    }
    if (entry.bytes.start > stop) {
      return Malformed(entry.name,
                       absl::StrFormat("leaves a hole before it: bytes [%d, %d) of the data belong "
                                       "to nobody",
                                       stop, entry.bytes.start));
    }
    stop = entry.bytes.stop;
  }
  if (stop == data_nbytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "%d bytes of data follow the header, but it describes %d", data_nbytes, stop));
}

}  // namespace

std::optional<Index> SafetensorsDTypeBits(std::string_view dtype) {
  struct Size {
    std::string_view dtype;
    Index bits;
  };
  static constexpr Size kSizes[] = {
      {"BOOL", 8},        {"U8", 8},      {"I8", 8},      {"U16", 16},        {"I16", 16},
      {"U32", 32},        {"I32", 32},    {"U64", 64},    {"I64", 64},        {"F16", 16},
      {"BF16", 16},       {"F32", 32},    {"F64", 64},    {"C64", 64},        {"F4", 4},
      {"F6_E2M3", 6},     {"F6_E3M2", 6}, {"F8_E4M3", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2", 8},
      {"F8_E5M2FNUZ", 8}, {"F8_E8M0", 8}};
  for (const Size& size : kSizes) {
    if (size.dtype == dtype) return size.bits;
  }
  return std::nullopt;
}

absl::StatusOr<Index> SafetensorsHeaderNbytes(std::string_view prefix, Index file_nbytes) {
  std::uint64_t nbytes = 0;
  for (std::size_t i = 0; i < kSafetensorsPrefix && i < prefix.size(); ++i) {
    nbytes |= std::uint64_t{static_cast<unsigned char>(prefix[i])} << (8 * i);
  }
  const Index most = std::min(kMaxSafetensorsHeader, file_nbytes - kSafetensorsPrefix);
  if (prefix.size() < kSafetensorsPrefix || most < 2 || nbytes < 2 ||
      nbytes > static_cast<std::uint64_t>(most)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "is no safetensors file: a header of %d bytes in %d bytes", nbytes, file_nbytes));
  }
  return static_cast<Index>(nbytes);
}

absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensorsHeader(std::string_view json,
                                                                     Index data_nbytes) {
  simdjson::dom::parser parser;
  object header;
  // The parser reads behind the text: it makes a padded copy.
  if (const auto error = parser.parse(json.data(), json.size()).get(header);
      error != simdjson::SUCCESS) {
    return absl::InvalidArgumentError(absl::StrCat("has a header that is no JSON object: ",
                                                   std::string(simdjson::error_message(error))));
  }
  std::vector<SafetensorsEntry> entries;
  absl::flat_hash_set<std::string_view> names;  // views into the parsed header
  for (const auto& [key, value] : header) {
    const std::string_view name(key.data(), key.size());
    if (!names.insert(name).second) return Malformed(name, "is declared twice");
    if (name == "__metadata__") {
      if (!value.is_object()) return Malformed(name, "is no object");
      continue;
    }
    absl::StatusOr<SafetensorsEntry> entry = ParseEntry(name, value, data_nbytes);
    if (!entry.ok()) return entry.status();
    entries.push_back(*std::move(entry));
  }
  std::ranges::sort(entries, [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    if (a.bytes.start != b.bytes.start) return a.bytes.start < b.bytes.start;
    // Empty tensors come before the one whose bytes start there.
    return a.bytes.stop != b.bytes.stop ? a.bytes.stop < b.bytes.stop : a.name < b.name;
  });
  if (absl::Status status = CheckPlaces(entries, data_nbytes); !status.ok()) return status;
  return entries;
}

}  // namespace loadplan
