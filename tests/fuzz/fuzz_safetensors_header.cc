#include <cstdint>
#include <cstdlib>
#include <vector>

#include "tests/fuzz/fuzz_targets.h"
#include "transfer/safetensors_header.h"

namespace loadplan::testing {
namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

// What the reader of ranges takes for granted.
void Parse(std::string_view json, Index data_nbytes) {
  const auto entries = ParseSafetensorsHeader(json, data_nbytes);
  if (!entries.ok()) return;
  Index at = 0;
  for (const SafetensorsEntry& entry : *entries) {
    Require(entry.bytes.start == at && entry.bytes.stop >= at);
    at = entry.bytes.stop;
    const std::optional<Index> bits = SafetensorsDTypeBits(entry.dtype);
    Require(bits.has_value());
    std::optional<Index> total = bits;
    for (const Index extent : entry.shape) {
      Require(extent >= 0);
      total = total.has_value() ? CheckedMultiply(*total, extent) : total;
    }
    Require(!total.has_value() || (*total + 7) / 8 == entry.bytes.nbytes());
  }
  Require(at == data_nbytes);
}

}  // namespace

void FuzzSafetensorsHeader(std::string_view bytes) {
  const auto size = static_cast<Index>(bytes.size());
  const auto header = SafetensorsHeaderNbytes(bytes.substr(0, kSafetensorsPrefix), size);
  if (header.ok()) {
    const std::string_view rest = bytes.substr(kSafetensorsPrefix);
    Parse(rest.substr(0, static_cast<std::size_t>(*header)), size - kSafetensorsPrefix - *header);
  }
  // As JSON before data of a size that no file would have to hold.
  if (bytes.size() < 2) return;
  const auto low = static_cast<unsigned char>(bytes[0]);
  const auto high = static_cast<unsigned char>(bytes[1]);
  Parse(bytes.substr(2), low + 256 * high);
}

}  // namespace loadplan::testing
