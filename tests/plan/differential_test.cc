// Random programs: what a plan leaves in live memory against what the program leaves,
// byte for byte, and everything else a plan says about itself.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "plan/load_plan_builder.h"
#include "tests/plan/byte_oracle.h"
#include "tests/plan/plan_executor.h"
#include "tests/plan/random_programs.h"
#include "tests/testing/plan_files.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"

namespace loadplan::testing {
namespace {

// Of all programs of a run: a test in which nearly everything falls back shows nothing.
struct Tally {
  size_t programs = 0;
  size_t refused = 0;
  size_t saved = 0;  // written and read before they were used
  size_t whole = 0;  // programs in which every name falls back
  std::map<EntryKind, size_t> names;
  size_t compared_bytes = 0;
  size_t dests = 0;
};

class Comparison {
 public:
  Comparison(const RandomProgram& program, Tally& tally)
      : program_(program),
        log_(program.input.log),
        oracle_(program.input, program.initial),
        tally_(tally) {}

  void Run(std::mt19937& generator) {
    ++tally_.programs;
    absl::StatusOr<LoadPlan> plan = BuildLoadPlan(program_.input);
    if (!plan.ok()) {
      ++tally_.refused;
      CheckRefusal(plan.status());
      return;
    }
    if (generator() % 2 == 0) {  // a plan out of a file is no other plan
      ++tally_.saved;
      absl::StatusOr<PlanFile> file = SavedAndRead(*plan, log_);
      ASSERT_THAT(file, IsOk());
      plan = std::move(file->plan);
    }
    plan_ = &*plan;
    execution_ = Execute(*plan, log_, program_.initial, generator);
    for (size_t n = 0; n < plan->entries().size(); ++n) {
      const EntryKind kind = plan->entries()[n].kind;
      ++tally_.names[kind];
      if (kind == EntryKind::kFallback) fallbacks_ |= NameMask{1} << n;
    }
    is_whole_ = fallbacks_ == (NameMask{1} << plan->entries().size()) - 1;
    tally_.whole += is_whole_ ? 1 : 0;
    CheckBytes();
    CheckOverlaps();
    CheckFallbacks();
    CheckKinds();
    CheckCoverage();
    CheckReads();
    CheckDests();
  }

 private:
  // Whether items may be cut and geometry may stop the builder: then names fall back
  // for reasons that a byte oracle does not see.
  bool may_be_irregular() const { return program_.has_casts || oracle_.has_repeated_write(); }

  template <typename F>
  void ForEachTargetByte(const F& f) const {
    for (size_t s = 0; s < log_.storages.size(); ++s) {
      if (log_.storages[s].kind != StorageKind::kTarget) continue;
      const std::vector<OracleByte>& bytes = oracle_.bytes(static_cast<StorageId>(s));
      for (size_t i = 0; i < bytes.size(); ++i) f(s, i, bytes[i]);
    }
  }

  void CheckRefusal(const absl::Status& status) const {
    if (status.code() == absl::StatusCode::kInvalidArgument) {
      EXPECT_EQ(program_.input.overlaps, OverlapPolicy::kError) << status;
      EXPECT_TRUE(!oracle_.overlaps().empty() || may_be_irregular()) << status;
      return;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    bool is_expected = oracle_.has_nameless_refusal() || may_be_irregular();
    ForEachTargetByte([&](size_t, size_t, const OracleByte& byte) {
      is_expected |= byte.is_lost && byte.names == 0;
    });
    EXPECT_TRUE(is_expected) << status;
  }

  void CheckBytes() {
    ForEachTargetByte([&](size_t s, size_t i, const OracleByte& byte) {
      SCOPED_TRACE("storage " + std::to_string(s) + " byte " + std::to_string(i));
      const int count = execution_.write_counts[s][i];
      EXPECT_LE(count, 1);
      // A call of the loader with a fallback name repeats all copies of that name.
      if ((byte.ever_copied & fallbacks_) != 0) {
        EXPECT_EQ(count, 0) << "both the plan and the loader write it";
        return;
      }
      if (byte.is_garbage || (is_whole_ && byte.names == 0)) return;
      // The names of a copy that cannot be followed are taken too many.
      if (may_be_irregular() && fallbacks_ != 0 && byte.names == 0 && count == 0) return;
      EXPECT_EQ(int{execution_.storages[s][i]}, int{byte.value});
      ++tally_.compared_bytes;
    });
  }

  void CheckOverlaps() const {
    if (may_be_irregular()) return;
    std::map<std::tuple<int, int, StorageId>, Index> found;
    for (const NameOverlap& overlap : plan_->overlaps()) {
      EXPECT_TRUE(
          found.emplace(std::tuple(overlap.first, overlap.second, overlap.storage), overlap.nbytes)
              .second);
    }
    EXPECT_EQ(found, oracle_.overlaps());
  }

  void CheckFallbacks() const {
    NameMask wanted = oracle_.refused();
    for (const auto& [name, reason] : program_.input.fallbacks) wanted |= NameMask{1} << name;
    bool is_tainted = wanted != 0 || may_be_irregular();
    if (program_.input.overlaps == OverlapPolicy::kFallback) {
      for (const auto& [key, nbytes] : oracle_.overlaps()) {
        is_tainted = true;
        if (may_be_irregular()) continue;
        wanted |= NameMask{1} << std::get<0>(key) | NameMask{1} << std::get<1>(key);
      }
    }
    EXPECT_EQ(wanted & ~fallbacks_, NameMask{0});
    ForEachTargetByte([&](size_t, size_t, const OracleByte& byte) {
      is_tainted |= byte.is_lost || byte.is_garbage;
    });
    if (!is_tainted) {
      EXPECT_EQ(fallbacks_, NameMask{0}) << plan_->Report();
    }
    for (const PlanEntry& entry : plan_->entries()) {
      EXPECT_TRUE(entry.kind != EntryKind::kFallback || !entry.reason.empty());
      EXPECT_TRUE(entry.kind != EntryKind::kFallback || entry.num_writes == 0);
    }
  }

  void CheckKinds() const {
    NameMask needed = 0;
    NameMask computed = 0;
    ForEachTargetByte([&](size_t, size_t, const OracleByte& byte) {
      needed |= byte.names;
      if (byte.is_computed) computed |= byte.names;
    });
    for (size_t n = 0; n < plan_->entries().size(); ++n) {
      if ((fallbacks_ >> n & 1) != 0) continue;
      const EntryKind expected = (computed >> n & 1) != 0 ? EntryKind::kDerived
                                 : (needed >> n & 1) != 0 ? EntryKind::kDirect
                                                          : EntryKind::kUnneeded;
      EXPECT_EQ(ToString(plan_->entries()[n].kind), ToString(expected)) << "name " << n;
    }
  }

  void CheckCoverage() const {
    if (may_be_irregular()) return;
    std::vector<Index> found(plan_->targets().size());
    for (const UncoveredTarget& target : plan_->uncovered()) {
      EXPECT_GT(target.nbytes, 0);
      found[static_cast<size_t>(target.target)] = target.nbytes;
    }
    for (size_t t = 0; t < found.size(); ++t) {
      const TargetTensor& target = plan_->targets()[t];
      std::set<Index> distinct;
      for (const Index offset : ItemOffsets(target.layout)) {
        for (Index i = 0; i < target.layout.itemsize(); ++i) distinct.insert(offset + i);
      }
      // Live bytes copied onto themselves are no write where the whole piece is; one that
      // moves others too (a transpose in place) keeps its fixed points.
      Index untouched = 0;
      Index fixed = 0;
      for (const Index offset : distinct) {
        const OracleByte& byte = oracle_.bytes(target.storage)[static_cast<size_t>(offset)];
        if (!byte.is_written || byte.is_uninitialised)
          ++untouched;
        else if (byte.live_origin == (static_cast<std::int64_t>(target.storage) << 32) + offset) {
          ++fixed;
        }
      }
      EXPECT_GE(found[t], untouched) << target.name;
      EXPECT_LE(found[t], untouched + fixed) << target.name;
    }
  }

  void CheckReads() const {
    for (size_t n = 0; n < plan_->sources().size(); ++n) {
      if ((fallbacks_ >> n & 1) != 0) continue;
      const SourceTensor& source = plan_->sources()[n];
      std::set<Index> elements;
      Index sum = 0;
      for (const Box& box : plan_->Reads(static_cast<std::int32_t>(n))) {
        ASSERT_TRUE(box.IsWithin(source.shape)) << box;
        DimVector strides(source.shape.size(), 1);
        for (size_t d = strides.size(); d-- > 1;) strides[d - 1] = strides[d] * source.shape[d];
        Index offset = 0;
        for (size_t d = 0; d < strides.size(); ++d) {
          offset += box.intervals()[d].start * strides[d];
        }
        for (const Index e :
             ItemOffsets(StridedLayout::Unchecked(offset, box.shape(), strides, 1))) {
          elements.insert(e);
          ++sum;
        }
      }
      EXPECT_EQ(elements, execution_.read_elements[n]) << source.name;
      EXPECT_EQ(static_cast<Index>(elements.size()), sum) << "boxes of a name meet";
    }
  }

  void CheckDests() {
    for (size_t n = 0; n < plan_->sources().size(); ++n) {
      const auto entry = static_cast<std::int32_t>(n);
      const std::optional<std::vector<Bytes>> storages =
          ExecuteDests(*plan_, entry, program_.initial);
      if (!storages) continue;
      ASSERT_FALSE(storages->empty()) << "a box and its region differ in size";
      ++tally_.dests;
      ForEachTargetByte([&](size_t s, size_t i, const OracleByte& byte) {
        const bool is_own = byte.names == NameMask{1} << n;
        const std::uint8_t expected = is_own ? byte.value : program_.initial[s][i];
        EXPECT_EQ(int{(*storages)[s][i]}, int{expected})
            << plan_->sources()[n].name << " storage " << s << " byte " << i;
      });
    }
  }

  const RandomProgram& program_;
  const RecordLog& log_;
  const ByteOracle oracle_;
  Tally& tally_;
  const LoadPlan* plan_ = nullptr;
  Execution execution_;
  NameMask fallbacks_ = 0;
  bool is_whole_ = false;
};

int NumPrograms() {
  const char* env = std::getenv("LOADPLAN_TEST_PROGRAMS");
  return env != nullptr ? std::stoi(env) : 20000;
}

TEST(PlanDifferentialPropertyTest, LeavesTheBytesOfTheProgram) {
  Tally tally;
  ForEachRandom(NumPrograms(), [&](std::mt19937& generator) {
    const RandomProgram program = MakeRandomProgram(generator);
    Comparison(program, tally).Run(generator);
    if (::testing::Test::HasFailure()) std::printf("%s", Describe(program.input).c_str());
  });
  RecordProperty("programs", std::to_string(tally.programs));
  std::string text;
  for (const auto& [kind, count] : tally.names) {
    text += " " + std::string(ToString(kind)) + " " + std::to_string(count);
  }
  std::printf(
      "%zu programs, %zu refused, %zu from files, %zu whole fallbacks, names:%s; %zu bytes, %zu "
      "dests\n",
      tally.programs, tally.refused, tally.saved, tally.whole, text.c_str(), tally.compared_bytes,
      tally.dests);
  // The generator still reaches what it is for.
  EXPECT_LT(tally.refused * 5, tally.programs);
  EXPECT_GT(tally.names[EntryKind::kDirect], tally.names[EntryKind::kFallback]);
}

}  // namespace
}  // namespace loadplan::testing
