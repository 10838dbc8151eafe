// Logs that no pass leaves behind are refused in words.
#include "plan/records.h"

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/log_builder.h"
#include "tests/testing/status_matchers.h"

namespace loadplan::testing {
namespace {

using ::testing::HasSubstr;

// p <- w, one operator and one refusal on w: well formed.
RecordLog GoodLog() {
  LogBuilder log;
  const View p = log.Target("p", {4}, kFloat32);
  const View w = log.Source("w", {4}, kFloat32);
  log.Copy(p, w);
  log.Node("aten::exp", {w}, {4});
  log.Refuse("aten::item", "its value is read", "", {w});
  return std::move(log.input().log);
}

struct MalformedCase {
  std::string name;
  std::function<void(RecordLog&)> spoil;
  std::string words;
};

std::ostream& operator<<(std::ostream& stream, const MalformedCase& c) { return stream << c.name; }

class MalformedLogTest : public ::testing::TestWithParam<MalformedCase> {};

TEST_P(MalformedLogTest, IsRefused) {
  RecordLog log = GoodLog();
  ASSERT_THAT(ValidateLog(log), IsOk());
  GetParam().spoil(log);
  EXPECT_THAT(ValidateLog(log),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(GetParam().words)));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, MalformedLogTest,
    ::testing::ValuesIn(std::vector<MalformedCase>{
        {"UnknownSource", [](RecordLog& log) { log.copies[0].from = 9; },
         "copy record 0 names a storage that is not in the log"},
        {"UnknownDestination", [](RecordLog& log) { log.copies[0].to = -1; },
         "copy record 0 names a storage that is not in the log"},
        {"DtypesWithoutCast", [](RecordLog& log) { log.copies[0].to_dtype = kBFloat16; },
         "copy record 0 goes from float32 to bfloat16 and is no cast"},
        {"WritesOutside", [](RecordLog& log) { log.storages[0].nbytes = 15; },
         "copy record 0 writes outside storage 0"},
        {"ReadsOutside", [](RecordLog& log) { log.storages[1].nbytes = 15; },
         "copy record 0 reads outside storage 1"},
        {"WritesAnOutput", [](RecordLog& log) { log.copies[0].to = 2; },
         "copy record 0 writes into storage 2, an operator's output"},
        {"OutputOfNoNode", [](RecordLog& log) { log.storages[2].ref = 1; },
         "storage 2 is an output of a node that is not in the log"},
        {"NodeBeyondTheEnd", [](RecordLog& log) { log.nodes[0].time = 2; },
         "`aten::exp` has no place among the copies"},
        {"NodeReadsOutside", [](RecordLog& log) { log.nodes[0].inputs[0].storage = 7; },
         "`aten::exp` reads outside storage 7"},
        {"RefusalBeforeTheStart", [](RecordLog& log) { log.refusals[0].time = -1; },
         "`aten::item` has no place among the copies"},
    }),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace loadplan::testing
