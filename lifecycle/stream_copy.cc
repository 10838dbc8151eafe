#include "lifecycle/stream_copy.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lifecycle/byte_copy.h"

namespace loadplan {
namespace {

constexpr std::size_t kLine = 64;
// A run that starts or ends within a line writes that line twice, once past the caches. From here
// on the lines between are worth it.
constexpr std::size_t kLongRun = 1024;

void StreamRun(std::byte* to, const std::byte* from, std::size_t nbytes) {
  const bool is_of_lines = reinterpret_cast<std::uintptr_t>(to) % kLine == 0 && nbytes % kLine == 0;
  if (nbytes >= kLongRun || is_of_lines) return StreamBytes(to, from, nbytes);
  std::memcpy(to, from, nbytes);
}

void StreamDims(const StridedMap& map, std::size_t dim, std::byte* to, const std::byte* from) {
  if (dim == map.shape().size()) {
    return StreamRun(to, from, static_cast<std::size_t>(map.to().itemsize));
  }
  const Index to_stride = map.to().byte_strides[dim];
  const Index from_stride = map.from().byte_strides[dim];
  for (Index i = 0; i < map.shape()[dim]; ++i) {
    StreamDims(map, dim + 1, to + i * to_stride, from + i * from_stride);
  }
}

}  // namespace

void StreamBytes(std::byte* to, const std::byte* from, std::size_t nbytes) {
#if defined(__SSE2__)
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % kLine;
  if (nbytes >= head + kLine) {
    std::memcpy(to, from, head);
    std::size_t at = head;
    for (; at + kLine <= nbytes; at += kLine) {
      const auto* const source = reinterpret_cast<const __m128i*>(from + at);
      auto* const line = reinterpret_cast<__m128i*>(to + at);
      const __m128i a = _mm_loadu_si128(source);
      const __m128i b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2);
      const __m128i d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(line, a);
      _mm_stream_si128(line + 1, b);
      _mm_stream_si128(line + 2, c);
      _mm_stream_si128(line + 3, d);
    }
    to += at;
    from += at;
    nbytes -= at;
  }
#endif
  std::memcpy(to, from, nbytes);
}

void StreamFence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

void StreamInLoops(const StridedMap& map, std::byte* to, const std::byte* from) {
  if (map.empty() || map.to().itemsize < static_cast<Index>(kLine)) {
    return CopyInLoops(map, to, from);
  }
  StreamDims(map, 0, to + map.to().byte_offset, from + map.from().byte_offset);
  StreamFence();  // other threads see it with what this one does next
}

}  // namespace loadplan
