#include "plan/byte_codec.h"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"

namespace loadplan::testing {
namespace {

using ::testing::HasSubstr;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

TEST(ByteCodecTest, GivesBackWhatWasWritten) {
  const std::vector<std::int64_t> numbers = {0,
                                             1,
                                             -1,
                                             63,
                                             -64,
                                             64,
                                             1 << 20,
                                             std::numeric_limits<std::int64_t>::max(),
                                             std::numeric_limits<std::int64_t>::min()};
  ByteWriter out;
  for (const std::int64_t number : numbers) out.Signed(number);
  for (const std::int64_t number : numbers) out.Unsigned(static_cast<std::uint64_t>(number));
  out.Fixed32(0xDEADBEEF);
  out.Fixed64(0x0123456789ABCDEF);
  out.Double(-0.25);
  out.String(std::string("a\0b", 3));
  ByteReader in(out.bytes(), "it");
  for (const std::int64_t number : numbers) EXPECT_EQ(in.Signed(), number);
  for (const std::int64_t number : numbers) {
    EXPECT_EQ(in.Unsigned(), static_cast<std::uint64_t>(number));
  }
  EXPECT_EQ(in.Fixed32(), 0xDEADBEEF);
  EXPECT_EQ(in.Fixed64(), 0x0123456789ABCDEF);
  EXPECT_EQ(in.Double(), -0.25);
  EXPECT_EQ(in.String(), std::string("a\0b", 3));
  in.ExpectEnd();
  EXPECT_THAT(in.status(), IsOk());
}

TEST(ByteCodecTest, SmallNumbersTakeOneByte) {
  ByteWriter out;
  out.Signed(-64);
  out.Signed(63);
  out.Count(127);
  EXPECT_EQ(out.bytes().size(), 3u);
}

TEST(ByteCodecTest, KeepsTheFirstFailureAndReadsNothingAfterIt) {
  ByteReader in(std::string_view("\x05"
                                 "abc\x01",
                                 5),
                "the bytes");
  EXPECT_EQ(in.String(), "");
  EXPECT_EQ(in.Unsigned(), 0u);
  in.ExpectEnd();
  EXPECT_THAT(in.status(), StatusIs(kInvalid,
                                    "the bytes is damaged at byte 1: 5 bytes are "
                                    "announced and 4 are left"));
}

TEST(ByteCodecTest, RefusesNumbersThatAreCutOffOrTooLarge) {
  ByteReader cut(std::string_view("\x80\x80", 2), "it");
  EXPECT_EQ(cut.Unsigned(), 0u);
  EXPECT_THAT(cut.status(), StatusIs(kInvalid, HasSubstr("cut off")));
  const std::string ten = std::string(9, '\x80') + "\x02";
  ByteReader large(ten, "it");
  EXPECT_EQ(large.Unsigned(), 0u);
  EXPECT_THAT(large.status(), StatusIs(kInvalid, HasSubstr("does not fit into 64 bits")));
}

TEST(ByteCodecTest, TakesNoCountOnItsWord) {
  ByteWriter out;
  out.Count(1'000'000'000);
  out.Raw("abcd");
  ByteReader in(out.bytes(), "it");
  EXPECT_EQ(in.Count(1), 0u);
  EXPECT_THAT(in.status(), StatusIs(kInvalid, HasSubstr("cannot lie in the 4 bytes")));
}

TEST(ByteCodecTest, ReportsWhatIsLeftOver) {
  ByteReader in("ab", "it");
  in.Raw(1);
  in.ExpectEnd();
  EXPECT_THAT(in.status(), StatusIs(kInvalid, HasSubstr("1 bytes are left over")));
}

TEST(ByteCodecTest, BoundsWhatItIsToldToBound) {
  ByteWriter out;
  out.Unsigned(std::numeric_limits<std::uint64_t>::max());
  ByteReader in(out.bytes(), "it");
  EXPECT_EQ(in.Bounded(3, "a kind"), 0);
  EXPECT_THAT(in.status(), StatusIs(kInvalid, HasSubstr("a kind is 18446744073709551615, expected "
                                                        "at most 3")));
}

TEST(ChecksumTest, ShowsEachBitAndItsPlace) {
  const std::string bytes = "twenty-one bytes, or so";
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string other = bytes;
      other[at] = static_cast<char>(other[at] ^ (1 << bit));
      EXPECT_NE(Checksum(other), Checksum(bytes)) << at << " " << bit;
    }
  }
  EXPECT_NE(Checksum(std::string(8, '\0')), Checksum(std::string(9, '\0')));
  EXPECT_NE(Checksum("12345678abcdefgh"), Checksum("abcdefgh12345678"));
}

TEST(Utf8Test, KnowsWhatIsWellFormed) {
  for (const char* good :
       {"", "w.weight", "größe", "重み", "\xF0\x9F\x98\x80", "\xF4\x8F\xBF\xBF"}) {
    EXPECT_TRUE(IsUtf8(good)) << good;
  }
  for (const char* bad : {"\x80", "\xC0\x80", "\xC3", "\xE0\x80\x80", "\xED\xA0\x80",
                          "\xF0\x80\x80\x80", "\xF4\x90\x80\x80", "\xFF", "a\xE9"}) {
    EXPECT_FALSE(IsUtf8(bad)) << bad;
  }
}

}  // namespace
}  // namespace loadplan::testing
