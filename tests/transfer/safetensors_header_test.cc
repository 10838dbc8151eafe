#include "transfer/safetensors_header.h"

#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using ::loadplan::testing::ForEachRandom;
using ::loadplan::testing::IsOk;
using ::loadplan::testing::IsOkAndHolds;
using ::loadplan::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

TEST(SafetensorsHeaderTest, ListsTensorsInOrderOfTheirData) {
  const auto entries = ParseSafetensorsHeader(
      R"({"__metadata__": {"format": "pt"},
          "w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [3, 15]},
          "odd": {"shape": [3], "data_offsets": [0, 3], "dtype": "U8", "more": [1, {}]},
          "empty": {"dtype": "F32", "shape": [4, 0], "data_offsets": [3, 3]},
          "scalar": {"dtype": "F8_E8M0", "shape": [], "data_offsets": [15, 16]}})",
      16);
  ASSERT_THAT(entries, IsOk());
  ASSERT_EQ(entries->size(), 4U);
  EXPECT_EQ((*entries)[0].name, "odd");
  EXPECT_EQ((*entries)[1].name, "empty");
  EXPECT_EQ((*entries)[2].name, "w");
  EXPECT_EQ((*entries)[2].dtype, "BF16");
  EXPECT_THAT((*entries)[2].shape, ElementsAre(2, 3));
  EXPECT_EQ((*entries)[2].bytes, (ByteRange{3, 15}));
  EXPECT_THAT((*entries)[3].shape, ElementsAre());
  EXPECT_THAT(ParseSafetensorsHeader("{}   ", 0), IsOk());  // padded with spaces, as writers do
}

TEST(SafetensorsHeaderTest, KnowsEveryDtypeOfTheFormat) {
  const std::pair<const char*, Index> cases[] = {
      {"BOOL", 8},    {"U8", 8},   {"I8", 8},      {"F8_E4M3", 8}, {"F8_E5M2", 8},
      {"F8_E8M0", 8}, {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U16", 16},
      {"I16", 16},    {"F16", 16}, {"BF16", 16},   {"U32", 32},    {"I32", 32},
      {"F32", 32},    {"U64", 64}, {"I64", 64},    {"F64", 64},    {"C64", 64}};
  for (const auto& [dtype, bits] : cases) {
    EXPECT_EQ(SafetensorsDTypeBits(dtype), bits) << dtype;
    const Index nbytes = 8 * bits / 8;
    const std::string json = R"({"w": {"dtype": ")" + std::string(dtype) +
                             R"(", "shape": [4, 2], "data_offsets": [0, )" +
                             std::to_string(nbytes) + "]}}";
    EXPECT_THAT(ParseSafetensorsHeader(json, nbytes), IsOk()) << dtype;
  }
  EXPECT_EQ(SafetensorsDTypeBits("F128"), std::nullopt);
}

struct BadHeader {
  std::string json;  // `@` stands for a good tensor of 4 bytes at 0
  std::string says;
  Index data_nbytes = 4;
};

TEST(SafetensorsHeaderTest, RefusesInWords) {
  const std::string good = R"("w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]})";
  const auto one = [](const std::string& fields) { return R"({"w": {)" + fields + "}}"; };
  const std::string u8 = R"("dtype": "U8", )";
  const std::vector<BadHeader> cases = {
      {"", "no JSON object"},
      {"[1]", "no JSON object"},
      {"{\"w\": ", "no JSON object"},
      {"{@} x", "no JSON object"},
      {std::string(200000, '['), "no JSON object"},
      {"{\"\xff\": 1}", "no JSON object"},
      {"{@, @}", "`w` is declared twice"},
      {"{@, \"__metadata__\": 3}", "`__metadata__` is no object"},
      {R"({"w": 4})", "`w` is described by no object"},
      {one(u8 + R"("shape": [4])"), "`w` lacks one of"},
      {one(u8 + u8 + R"("shape": [4], "data_offsets": [0, 4])"), "`w` has two `dtype`"},
      {one(u8 + R"("shape": [4], "shape": [4], "data_offsets": [0, 4])"), "`w` has two `shape`"},
      {one(R"("dtype": 3, "shape": [4], "data_offsets": [0, 4])"), "a dtype that is no text"},
      {one(R"("dtype": "F128", "shape": [4], "data_offsets": [0, 4])"), "does not know: `F128`"},
      {one(u8 + R"("shape": 4, "data_offsets": [0, 4])"), "`shape` that is no list"},
      {one(u8 + R"("shape": [-4], "data_offsets": [0, 4])"), "`shape` that is no list"},
      {one(u8 + R"("shape": [4.0], "data_offsets": [0, 4])"), "`shape` that is no list"},
      {one(u8 + R"("shape": ["4"], "data_offsets": [0, 4])"), "`shape` that is no list"},
      {one(u8 + R"("shape": [9223372036854775808], "data_offsets": [0, 4])"), "no list"},
      {one(u8 + R"("shape": [4], "data_offsets": [0, 18446744073709551616])"), "no JSON object"},
      {one(u8 + R"("shape": [4], "data_offsets": [4])"), "`data_offsets` that are no range"},
      {one(u8 + R"("shape": [4], "data_offsets": [4, 0])"), "`data_offsets` that are no range"},
      {one(u8 + R"("shape": [4], "data_offsets": [0, 5])"), "no range within the 4 bytes"},
      {one(u8 + R"("shape": [3], "data_offsets": [0, 4])"), "has 4 bytes of data, expected 3"},
      {one(u8 + R"("shape": [4611686018427387904, 4], "data_offsets": [0, 4])"), "be counted"},
      {one(u8 + R"("shape": [4611686018427387904, 4, 0], "data_offsets": [0, 0])"), "be counted"},
      {one(R"("dtype": "F4", "shape": [3], "data_offsets": [0, 2])"), "no whole byte"},
      {R"({@, "v": {"dtype": "U8", "shape": [3], "data_offsets": [3, 6]}})",
       "`v` shares bytes with `w`", 6},
      {R"({@, "v": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}})", "shares bytes with"},
      {R"({@, "v": {"dtype": "U8", "shape": [1], "data_offsets": [5, 6]}})",
       "`v` leaves a hole before it: bytes [4, 5)", 6},
      {"{@}", "7 bytes of data follow the header, but it describes 4", 7},
      {R"({")" + std::string(5000, 'n') + R"(": 1})", "nnn...`"},
  };
  for (BadHeader bad : cases) {
    for (std::size_t at; (at = bad.json.find('@')) != std::string::npos;) {
      bad.json.replace(at, 1, good);
    }
    EXPECT_THAT(ParseSafetensorsHeader(bad.json, bad.data_nbytes),
                StatusIs(kInvalid, HasSubstr(bad.says)))
        << bad.json.substr(0, 300);
  }
}

TEST(SafetensorsHeaderTest, ReadsTheLengthOfTheHeader) {
  EXPECT_THAT(SafetensorsHeaderNbytes(std::string("\x00\x01\0\0\0\0\0\0", 8), 1000),
              IsOkAndHolds(256));
  const std::pair<std::string, Index> cases[] = {
      {"", 0},
      {std::string("\x10\0\0\0", 4), 4},
      {std::string("\x01\0\0\0\0\0\0\0", 8), 1000},   // not even {}
      {std::string("\x00\x01\0\0\0\0\0\0", 8), 263},  // more than there is
      {std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8), 1000},
      {std::string("\0\0\0\x40\0\0\0\0", 8), Index{1} << 40}};  // over the format's limit
  for (const auto& [prefix, nbytes] : cases) {
    EXPECT_THAT(SafetensorsHeaderNbytes(prefix, nbytes),
                StatusIs(kInvalid, HasSubstr("is no safetensors file")));
  }
}

// Whatever comes in, what comes out has the promised shape.
TEST(SafetensorsHeaderPropertyTest, DamagedHeadersAreRefusedOrSound) {
  const std::string good = R"({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},)"
                           R"( "b": {"dtype": "F32", "shape": [2, 2], "data_offsets": [4, 20]}})";
  ForEachRandom(3000, [&](std::mt19937& gen) {
    std::string json = good;
    for (auto n = 1 + gen() % 3; n > 0; --n) {
      const std::size_t at = gen() % json.size();
      const std::string alphabet = R"(0123456789"{}[],:-e.)";
      json[at] = gen() % 4 == 0 ? static_cast<char>(gen()) : alphabet[gen() % alphabet.size()];
    }
    const auto entries = ParseSafetensorsHeader(json, 20);
    if (!entries.ok()) return;
    Index stop = 0;
    for (const SafetensorsEntry& entry : *entries) {
      ASSERT_EQ(entry.bytes.start, stop) << json;
      Index bits = *SafetensorsDTypeBits(entry.dtype);
      for (const Index extent : entry.shape) bits *= extent;
      ASSERT_EQ(8 * entry.bytes.nbytes(), bits) << json;
      stop = entry.bytes.stop;
    }
    ASSERT_EQ(stop, 20) << json;
  });
}

}  // namespace
}  // namespace loadplan
