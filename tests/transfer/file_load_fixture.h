// FileLoadTest: a rank's targets, their plan and a session, for tests that load them from files.
#ifndef LOADPLAN_TESTS_TRANSFER_FILE_LOAD_FIXTURE_H_
#define LOADPLAN_TESTS_TRANSFER_FILE_LOAD_FIXTURE_H_

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/lifecycle/live_log.h"
#include "tests/testing/status_matchers.h"
#include "tests/transfer/written_files.h"
#include "transfer/file_load.h"

namespace loadplan::testing {

inline absl::Status LoadAll(FileLoad& load) {
  while (true) {
    const absl::StatusOr<bool> done = load.Step(0.01);
    if (!done.ok()) return done.status();
    if (*done) return absl::OkStatus();
  }
}

inline constexpr Index kRows = 512;
inline constexpr Index kColumns = 4096;

// What a rank of several does: `rows` <- half the rows of `r`; `columns` <- a column slice of `c`;
// `half` (bfloat16) <- `h`; `norm` <- `n`; `product` <- `a * b`.
class FileLoadTest : public ::testing::Test {
 protected:
  FileLoadTest() {
    for (const auto& [name, shape] :
         std::vector<std::pair<std::string, std::vector<std::int64_t>>>{{"n", {kColumns}},
                                                                        {"r", {kRows, kColumns}},
                                                                        {"c", {kRows, kColumns}},
                                                                        {"h", {kRows, kColumns}},
                                                                        {"a", {1000}},
                                                                        {"b", {1000}}}) {
      tensors_.emplace_back(name, at::randn(shape));
    }
    Reset();
  }
  void Reset() {
    log_.emplace();
    const View rows = log_->Target("rows", {kRows / 2, kColumns});
    const View columns = log_->Target("columns", {kRows, kColumns / 8});
    const View half = log_->Target("half", {kRows, kColumns}, kBFloat16);
    const View norm = log_->Target("norm", {kColumns});
    const View product = log_->Target("product", {1000});
    log_->Copy(norm, log_->Source("n", {kColumns}));
    log_->Copy(rows, log_->Source("r", {kRows, kColumns}).Slice(0, kRows / 2, kRows));
    log_->Copy(columns, log_->Source("c", {kRows, kColumns}).Slice(1, 512, 1024));
    log_->Copy(half, log_->Source("h", {kRows, kColumns}));
    const View a = log_->Source("a", {1000});
    log_->Copy(product, log_->Multiply(a, log_->Source("b", {1000})));
    plan_ = log_->Bind().value();
    session_.emplace();
    ASSERT_THAT(session_->Start({}), IsOk());
    ASSERT_THAT(session_->Begin(plan_, log_->live()), IsOk());
  }
  absl::StatusOr<std::unique_ptr<FileLoad>> Start(const std::vector<std::string>& paths,
                                                  const FileLoadOptions& options = {}) {
    return FileLoad::Start(*session_, plan_, paths, options);
  }
  void ExpectNewBytes() {
    EXPECT_TRUE(at::equal(log_->target(0), tensors_[1].second.slice(0, kRows / 2)));
    EXPECT_TRUE(at::equal(log_->target(1), tensors_[2].second.slice(1, 512, 1024)));
    EXPECT_TRUE(at::equal(log_->target(2), tensors_[3].second.to(at::kBFloat16)));
    EXPECT_TRUE(at::equal(log_->target(3), tensors_[0].second));
    EXPECT_TRUE(at::equal(log_->target(4), tensors_[4].second * tensors_[5].second));
  }
  bool IsOld(std::size_t target) {
    const at::Tensor& now = log_->target(target);
    return at::equal(now, at::full_like(now, 77));
  }

  WrittenFiles written_;
  WrittenFiles::Tensors tensors_;
  std::optional<LiveLog> log_;
  std::shared_ptr<const BoundPlan> plan_;
  std::optional<ReloadSession> session_;
};

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_TRANSFER_FILE_LOAD_FIXTURE_H_
