#include "plan/byte_codec.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"

namespace loadplan {

static_assert(std::endian::native == std::endian::little, "plan files are little-endian");

void ByteWriter::Unsigned(std::uint64_t value) {
  while (value >= 0x80) {
    bytes_.push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  bytes_.push_back(static_cast<char>(value));
}

void ByteWriter::Fixed(std::uint64_t value, int nbytes) {
  bytes_.append(reinterpret_cast<const char*>(&value), static_cast<std::size_t>(nbytes));
}

void ByteWriter::Double(double value) { Fixed64(std::bit_cast<std::uint64_t>(value)); }

void ByteWriter::String(std::string_view value) {
  Count(value.size());
  bytes_.append(value);
}

void ByteReader::Fail(std::string_view why) {
  if (!ok()) return;
  status_ = absl::InvalidArgumentError(
      absl::StrCat(std::string(what_), " is damaged at byte ", at_, ": ", std::string(why)));
}

void ByteReader::ExpectEnd() {
  if (ok() && at_ != bytes_.size()) {
    Fail(absl::StrCat(bytes_.size() - at_, " bytes are left over"));
  }
}

std::uint64_t ByteReader::Unsigned() {
  std::uint64_t value = 0;
  for (int shift = 0; ok(); shift += 7) {
    if (at_ == bytes_.size()) {
      Fail("a number is cut off");
      break;
    }
    const auto byte = static_cast<unsigned char>(bytes_[at_++]);
    // The tenth byte has room for the last bit alone.
    if (shift == 63 && byte > 1) {
      Fail("a number does not fit into 64 bits");
      break;
    }
    value |= static_cast<std::uint64_t>(byte & 0x7F) << shift;
    if (byte < 0x80) return value;
  }
  return 0;
}

std::int64_t ByteReader::Signed() {
  const std::uint64_t folded = Unsigned();
  return static_cast<std::int64_t>((folded >> 1) ^ (~(folded & 1) + 1));
}

Index ByteReader::Bounded(Index max, std::string_view what) {
  const std::uint64_t value = Unsigned();
  if (ok() && value <= static_cast<std::uint64_t>(std::max(max, Index{0})) && max >= 0) {
    return static_cast<Index>(value);
  }
  Fail(absl::StrCat(std::string(what), " is ", value, ", expected at most ", max));
  return 0;
}

std::size_t ByteReader::Count(std::size_t min_nbytes) {
  const std::uint64_t count = Unsigned();
  const std::size_t left = bytes_.size() - at_;
  if (ok() && count <= left / std::max<std::size_t>(min_nbytes, 1)) return count;
  Fail(absl::StrCat(count, " items cannot lie in the ", left, " bytes that are left"));
  return 0;
}

std::string_view ByteReader::Raw(std::size_t nbytes) {
  if (!ok()) return {};
  if (nbytes > bytes_.size() - at_) {
    Fail(absl::StrCat(nbytes, " bytes are announced and ", bytes_.size() - at_, " are left"));
    return {};
  }
  at_ += nbytes;
  return bytes_.substr(at_ - nbytes, nbytes);
}

std::uint64_t ByteReader::Fixed(std::size_t nbytes) {
  const std::string_view raw = Raw(nbytes);
  std::uint64_t value = 0;
  if (!raw.empty()) std::memcpy(&value, raw.data(), raw.size());
  return value;
}

double ByteReader::Double() { return std::bit_cast<double>(Fixed64()); }

std::string_view ByteReader::String() {
  const std::uint64_t size = Unsigned();
  return Raw(std::min<std::uint64_t>(size, std::numeric_limits<std::size_t>::max()));
}

std::uint64_t Checksum(std::string_view bytes) {
  constexpr std::uint64_t kPrime = 1099511628211ULL;
  std::uint64_t hash = 1469598103934665603ULL ^ bytes.size();
  std::size_t at = 0;
  // Each step can be undone, so that one word that differs always shows.
  for (; at + 8 <= bytes.size(); at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, 8);
    hash = (hash ^ word) * kPrime;
    hash ^= hash >> 29;
  }
  for (; at < bytes.size(); ++at) {
    hash = (hash ^ static_cast<unsigned char>(bytes[at])) * kPrime;
  }
  return hash ^ (hash >> 32);
}

bool IsUtf8(std::string_view bytes) {
  for (std::size_t at = 0; at < bytes.size();) {
    const auto lead = static_cast<unsigned char>(bytes[at]);
    if (lead < 0x80) {
      ++at;
      continue;
    }
    const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (lead < 0xC2 || lead > 0xF4 || length > bytes.size() - at) return false;
    std::uint32_t point = lead & (0xFFU >> (length + 1));
    for (std::size_t k = 1; k < length; ++k) {
      const auto next = static_cast<unsigned char>(bytes[at + k]);
      if ((next & 0xC0U) != 0x80U) return false;
      point = (point << 6) | (next & 0x3FU);
    }
    const bool is_long = (length == 3 && point < 0x800) || (length == 4 && point < 0x10000);
    if (is_long || point > 0x10FFFF || (point >= 0xD800 && point <= 0xDFFF)) return false;
    at += length;
  }
  return true;
}

}  // namespace loadplan
