#include "lifecycle/layout_snapshot.h"

#include <ATen/ATen.h>
#include <sys/mman.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lifecycle/undo_log.h"
#include "tests/testing/status_matchers.h"

namespace loadplan {
namespace {

using ::loadplan::testing::IsOk;
using ::loadplan::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct ChangeCase {
  std::string name;
  std::function<at::Tensor(const at::Tensor&)> change;
  std::string words;
};
std::ostream& operator<<(std::ostream& stream, const ChangeCase& c) { return stream << c.name; }

class LayoutChangeTest : public ::testing::TestWithParam<ChangeCase> {};

TEST_P(LayoutChangeTest, IsToldInWords) {
  const at::Tensor live = at::zeros({4, 6}).slice(0, 0, 2);
  const std::vector<LiveTarget> before = {{"w", live}};
  const LayoutSnapshot snapshot = LayoutSnapshot::Of(before);
  const std::vector<LiveTarget> after = {{"w", GetParam().change(live)}};
  EXPECT_THAT(snapshot.Check(after),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("`w`"), HasSubstr(GetParam().words))));
}

// Not inside the macro, whose own names a lambda would shadow.
std::vector<ChangeCase> Changes() {
  return {
      {"Moved", [](const at::Tensor& t) { return t.clone(); }, "lies in another storage"},
      {"Dtype", [](const at::Tensor& t) { return t.view(at::kInt); },
       "expected dtype Float, got Int"},
      {"Shape",
       [](const at::Tensor& t) {
         return t.view({3, 4});
       },
       "expected shape [2, 6], got [3, 4]"},
      {"Strides",
       [](const at::Tensor& t) {
         return t.as_strided({2, 6}, {1, 2});
       },
       "expected strides [6, 1], got [1, 2]"},
      {"Offset",
       [](const at::Tensor& t) {
         return t.as_strided({2, 6}, {6, 1}, 6);
       },
       "expected storage offset 0, got 6"},
      {"Device", [](const at::Tensor& t) { return t.to(at::kMeta); },
       "expected device cpu, got meta"},
  };
}

INSTANTIATE_TEST_SUITE_P(Cases, LayoutChangeTest, ::testing::ValuesIn(Changes()),
                         [](const auto& test) { return test.param.name; });

TEST(LayoutSnapshotTest, AcceptsNewBytesAndNewNames) {
  const at::Tensor live = at::zeros({2, 3});
  const std::vector<LiveTarget> targets = {{"w", live}};
  const LayoutSnapshot snapshot = LayoutSnapshot::Of(targets);
  live.fill_(1);
  const std::vector<LiveTarget> now = {{"v", at::zeros({1})}, {"w", live.view({2, 3})}};
  EXPECT_THAT(snapshot.Check(now), IsOk());
}

TEST(LayoutSnapshotTest, MissesATargetThatIsGone) {
  const std::vector<LiveTarget> targets = {{"w", at::zeros({2})}};
  EXPECT_THAT(LayoutSnapshot::Of(targets).Check({}),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("no longer a target")));
}

TEST(LayoutSnapshotTest, SeesAStorageWhoseMemoryWasReplaced) {
  const at::Tensor live = at::zeros({2, 3});
  const std::vector<LiveTarget> targets = {{"w", live}};
  const LayoutSnapshot snapshot = LayoutSnapshot::Of(targets);
  at::Tensor other = at::zeros({2, 3});
  live.storage().set_data_ptr(other.storage().set_data_ptr(c10::DataPtr()));
  EXPECT_THAT(snapshot.Check(targets),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("another address")));
}

TEST(LayoutSnapshotTest, SeesAStorageWhoseMemoryIsGone) {
  const at::Tensor live = at::zeros({2, 3});
  const std::vector<LiveTarget> targets = {{"w", live}};
  const LayoutSnapshot snapshot = LayoutSnapshot::Of(targets);
  live.storage().set_data_ptr(c10::DataPtr(nullptr, at::kCPU));
  EXPECT_THAT(snapshot.Check(targets),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("`w` has no memory")));
}

TEST(LayoutSnapshotTest, SeesMemoryThatIsNoLongerMapped) {
  constexpr std::size_t kNbytes = 1 << 16;
  void* const memory =
      mmap(nullptr, kNbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const at::Tensor live = at::from_blob(memory, {static_cast<int64_t>(kNbytes)}, at::kByte);
  const std::vector<LiveTarget> targets = {{"w", live}};
  const LayoutSnapshot snapshot = LayoutSnapshot::Of(targets);
  EXPECT_THAT(snapshot.Check(targets), IsOk());
  // One page in the middle is enough.
  ASSERT_EQ(munmap(static_cast<char*>(memory) + kNbytes / 2, 4096), 0);
  EXPECT_THAT(snapshot.Check(targets),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("`w` has no memory")));
  UndoLog undo({});
  EXPECT_THAT(undo.KeepWhole(live),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("has no memory")));
  munmap(memory, kNbytes);
}

TEST(LayoutSnapshotTest, KeepsNoMemoryAlive) {
  at::Tensor live = at::zeros({2, 3});
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(live.storage().getWeakStorageImpl());
  std::vector<LiveTarget> targets = {{"w", live}};
  const LayoutSnapshot snapshot = LayoutSnapshot::Of(targets);
  targets.clear();
  live.reset();
  EXPECT_TRUE(storage.expired());
}

}  // namespace
}  // namespace loadplan
