// ByteWriter and ByteReader: numbers and strings as bytes, and back from bytes that nobody
// vouches for. What plan files are made of; no torch.
#ifndef LOADPLAN_PLAN_BYTE_CODEC_H_
#define LOADPLAN_PLAN_BYTE_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "geometry/index.h"

namespace loadplan {

// Whole numbers take seven bits a byte, lowest first, the eighth says that more follow; signed
// ones are folded (0, -1, 1, -2, ... become 0, 1, 2, 3, ...). Fixed-width numbers are
// little-endian. A string is its length and its bytes.
class ByteWriter {
 public:
  void Unsigned(std::uint64_t value);
  void Signed(std::int64_t value) {
    Unsigned((static_cast<std::uint64_t>(value) << 1) ^ static_cast<std::uint64_t>(value >> 63));
  }
  void Count(std::size_t count) { Unsigned(count); }
  void Fixed32(std::uint32_t value) { Fixed(value, 4); }
  void Fixed64(std::uint64_t value) { Fixed(value, 8); }
  void Double(double value);
  void String(std::string_view value);
  void Raw(std::string_view bytes) { bytes_.append(bytes); }

  const std::string& bytes() const { return bytes_; }
  std::string Take() { return std::move(bytes_); }

 private:
  void Fixed(std::uint64_t value, int nbytes);

  std::string bytes_;
};

// Reads what a ByteWriter wrote. The first thing that is wrong is kept, and everything read
// after it is 0 or empty, so that a decoder checks once for many reads:
//
//   ByteReader in(bytes, "section `targets`");
//   for (std::size_t left = in.Count(3); left > 0 && in.ok(); --left) { ... in.String() ... }
//   return in.status();   // InvalidArgument: section `targets` is damaged at byte 17: ...
class ByteReader {
 public:
  // Neither `bytes` nor `what` is copied.
  ByteReader(std::string_view bytes, std::string_view what) : bytes_(bytes), what_(what) {}

  std::uint64_t Unsigned();
  std::int64_t Signed();
  // Fails where the number is negative or above `max`.
  Index Bounded(Index max, std::string_view what);
  // How many items follow. Fails where they could not fit into what is left, `min_nbytes` each:
  // no memory is taken on a file's word.
  std::size_t Count(std::size_t min_nbytes);
  std::uint32_t Fixed32() { return static_cast<std::uint32_t>(Fixed(4)); }
  std::uint64_t Fixed64() { return Fixed(8); }
  double Double();
  // A view into the bytes that the reader was given.
  std::string_view String();
  std::string_view Raw(std::size_t nbytes);

  bool ok() const { return status_.ok(); }
  const absl::Status& status() const { return status_; }
  // Keeps the first failure only. `why` is a clause: "`x` has the negative extent -3".
  void Fail(std::string_view why);
  // Fails where bytes are left.
  void ExpectEnd();

 private:
  std::uint64_t Fixed(std::size_t nbytes);

  std::string_view bytes_;
  std::string_view what_;
  std::size_t at_ = 0;
  absl::Status status_;
};

// Sensitive to every bit and its place; a guard against accidents, not against intent.
std::uint64_t Checksum(std::string_view bytes);

// Whether the bytes are well-formed UTF-8, as names in Python are.
bool IsUtf8(std::string_view bytes);

}  // namespace loadplan

#endif  // LOADPLAN_PLAN_BYTE_CODEC_H_
