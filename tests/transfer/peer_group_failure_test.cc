// Ranks that fail at once. Each is a thread here, and the store is theirs.
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"
#include "transfer/peer_group.h"

namespace loadplan {
namespace {

using ::loadplan::testing::IsOk;
using ::testing::Each;
using ::testing::Eq;

// Takes its time to write, so that whoever looks first and writes then is too late.
class SlowStore : public c10d::HashStore {
 public:
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    c10d::HashStore::set(key, value);
  }
};

TEST(PeerGroupFailureTest, RanksThatFailAtOnceComeToTheSameFailure) {
  constexpr int kRanks = 3;
  const auto store = c10::make_intrusive<SlowStore>();
  std::vector<std::string> raised(kRanks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, kRanks);
      PeerGroup peers(group, std::chrono::milliseconds(5000));
      ASSERT_THAT(peers.BeginWatch("exchange"), IsOk());
      const absl::Status own = absl::InternalError(std::to_string(rank));
      raised[static_cast<std::size_t>(rank)] = std::string(peers.Fail(own).message());
    });
  }
  for (std::thread& rank : ranks) rank.join();
  std::vector<char> last;
  for (const std::string& text : raised) last.push_back(text.back());
  EXPECT_THAT(last, Each(Eq(last.front()))) << ::testing::PrintToString(raised);
}

}  // namespace
}  // namespace loadplan
