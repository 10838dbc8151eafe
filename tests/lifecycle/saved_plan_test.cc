#include "lifecycle/saved_plan.h"

#include <ATen/ATen.h>

#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "backend/operator_codec.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/lifecycle/live_log.h"
#include "tests/testing/status_matchers.h"

namespace loadplan::testing {
namespace {

using ::testing::HasSubstr;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

const PlanFileInfo kInfo{"0.1.0", "2.14.0", "AVX2", "rank 1 of 8", "None", {}, 0.5};

std::vector<LiveTarget> NewModel() {
  std::vector<LiveTarget> live = {{"w", at::full({2, 3}, 77.f)}, {"v", at::full({3}, 77.f)}};
  live.push_back({"w.tied", live[0].tensor});
  return live;
}

// `w` <- `x` and a row of padding; `v` <- `a * b`.
class SavedPlanTest : public ::testing::Test {
 protected:
  SavedPlanTest() {
    const View w = log_.Target("w", {2, 3});
    const View v = log_.Target("v", {3});
    log_.live().push_back({"w.tied", log_.target(0)});
    log_.log().Alias("w.tied", w);
    log_.Copy(w.Slice(0, 0, 1), log_.Source("x", {1, 3}));
    const View a = log_.Source("a", {3});
    log_.Copy(v, log_.Multiply(a, log_.Source("b", {3})));
    log_.Copy(w.Slice(0, 1, 2), log_.Constant(at::zeros({1, 3})));
    plan_ = log_.Bind().value();
  }
  ~SavedPlanTest() override { std::remove(path_.c_str()); }

  absl::StatusOr<std::shared_ptr<const BoundPlan>> Load(std::vector<LiveTarget> live,
                                                        const PlanFileInfo& info = kInfo) {
    if (absl::Status status = SavePlan(*plan_, kInfo, path_); !status.ok()) return status;
    absl::StatusOr<PlanFile> file = ReadPlanFile(path_);
    if (!file.ok()) return file.status();
    return BindPlan(*std::move(file), std::move(live), info);
  }

  const std::string path_ = ::testing::TempDir() + "saved_plan_test.loadplan";
  LiveLog log_;
  std::shared_ptr<const BoundPlan> plan_;
};

TEST_F(SavedPlanTest, LandsTheSameBytesInAnotherModel) {
  const std::vector<LiveTarget> model = NewModel();
  const auto bound = Load({model[2], model[1], model[0]});  // in any order
  ASSERT_THAT(bound, IsOk());
  ReloadSession session;
  ASSERT_THAT(session.Start({}), IsOk());
  ASSERT_THAT(session.Begin(*bound, model), IsOk());
  const at::Tensor x = at::randn({1, 3});
  const at::Tensor a = at::randn({3});
  const at::Tensor b = at::randn({3});
  ASSERT_THAT(session.Deliver("b", b), IsOk());
  ASSERT_THAT(session.Deliver("x", x), IsOk());
  ASSERT_THAT(session.Deliver("a", a), IsOk());
  ASSERT_THAT(session.PrepareFinish(std::nullopt, model), IsOk());
  ASSERT_THAT(session.Finish(), IsOk());
  EXPECT_TRUE(at::equal(model[0].tensor, at::cat({x, at::zeros({1, 3})})));
  EXPECT_TRUE(at::equal(model[1].tensor, a * b));
  EXPECT_TRUE(at::equal(log_.target(0), at::full({2, 3}, 77.f))) << "the first model";
}

struct Difference {
  std::string name;
  std::function<void(std::vector<LiveTarget>&, PlanFileInfo&)> make;
  std::string words;
};
std::ostream& operator<<(std::ostream& stream, const Difference& difference) {
  return stream << difference.name;
}

class OtherModel : public SavedPlanTest, public ::testing::WithParamInterface<Difference> {};

TEST_P(OtherModel, IsRefusedWithTheFirstDifference) {
  std::vector<LiveTarget> model = NewModel();
  PlanFileInfo info = kInfo;
  GetParam().make(model, info);
  EXPECT_THAT(Load(model, info), StatusIs(kPrecondition, HasSubstr(GetParam().words)));
}

using Model = std::vector<LiveTarget>;
INSTANTIATE_TEST_SUITE_P(
    , OtherModel,
    ::testing::Values(
        Difference{"library", [](Model&, PlanFileInfo& now) { now.library_version = "0.2.0"; },
                   "saved by loadplan 0.1.0, and this is loadplan 0.2.0; plan again"},
        Difference{"torch", [](Model&, PlanFileInfo& now) { now.torch_version = "2.14.1"; },
                   "runs 1 operators again, as torch 2.14.0 ran them, and this is torch 2.14.1"},
        Difference{"processor", [](Model&, PlanFileInfo& now) { now.processor = "AVX512"; },
                   "with the vector instructions AVX2, and here it has AVX512"},
        Difference{"tag", [](Model&, PlanFileInfo& now) { now.tag = "rank 3 of 8"; },
                   "saved with the tag `rank 1 of 8`, and is loaded with `rank 3 of 8`"},
        Difference{"missing", [](Model& model, PlanFileInfo&) { model.erase(model.begin() + 1); },
                   "target `v` is planned, and the model has no such target"},
        Difference{"new",
                   [](Model& model, PlanFileInfo&) {
                     model.push_back({"n", at::ones(1)});
                   },
                   "the model has target `n`, which the plan does not know"},
        Difference{
            "dtype",
            [](Model& model, PlanFileInfo&) { model[1].tensor = at::ones({3}, at::kDouble); },
            "target `v`: the plan was made for dtype float32, and the model has float64"},
        Difference{"shape", [](Model& model, PlanFileInfo&) { model[1].tensor = at::ones({4}); },
                   "target `v`: the plan was made for shape [3], and the model has [4]"},
        Difference{"strides",
                   [](Model& model, PlanFileInfo&) {
                     model[0].tensor = at::ones({3, 2}).t();
                     model[2].tensor = model[0].tensor;
                   },
                   "target `w`: the plan was made for strides [3, 1], and the model has [1, 2]"},
        Difference{"untied",
                   [](Model& model, PlanFileInfo&) {
                     model[2].tensor = at::ones({2, 3});
                   },
                   "target `w.tied`: the plan was made for a storage shared with `w`, and the "
                   "model has one of its own"},
        Difference{"tied",
                   [](Model& model, PlanFileInfo&) { model[1].tensor = model[0].tensor[0]; },
                   "target `v`: the plan was made for a storage of its own, and the model has one "
                   "shared with `w`"},
        Difference{"offset",
                   [](Model& model, PlanFileInfo&) { model[1].tensor = at::ones({4}).slice(0, 1); },
                   "target `v`: the plan was made for a storage offset of 0 bytes"},
        Difference{
            "storage",
            [](Model& model, PlanFileInfo&) { model[1].tensor = at::ones({4}).slice(0, 0, 3); },
            "target `v`: the plan was made for a storage of 12 bytes, and the model has 16"},
        Difference{"device",
                   [](Model& model, PlanFileInfo&) { model[1].tensor = at::empty({3}, at::kMeta); },
                   "target `v`: the plan was made for device cpu, and the model has meta"}),
    [](const auto& param_info) { return param_info.param.name; });

TEST_F(SavedPlanTest, TorchMayDifferWhereNothingRunsAgain) {
  LiveLog log;
  const View w = log.Target("w", {3});
  log.Copy(w, log.Source("x", {3}));
  const absl::StatusOr<std::string> bytes = EncodeBoundPlan(**log.Bind(), kInfo);
  ASSERT_THAT(bytes, IsOk());
  PlanFileInfo later = kInfo;
  later.torch_version = "2.15.0";
  later.processor = "NEON";
  EXPECT_THAT(BindPlan(*DecodePlanFile(*bytes, DTypeByName), log.live(), later), IsOk());
}

TEST_F(SavedPlanTest, RefusesToSaveWhatNoOtherProcessCouldCheck) {
  auto traced = std::make_shared<TracedPlan>();
  const at::Tensor map = at::ones({4});
  traced->externals.push_back(
      {c10::weak_intrusive_ptr<c10::StorageImpl>(map.storage().getWeakStorageImpl()),
       "a tensor of shape [4] and dtype float32"});
  const BoundPlan bound(traced, plan_->targets);
  EXPECT_THAT(SavePlan(bound, kInfo, path_),
              StatusIs(kPrecondition,
                       HasSubstr("its loader read a tensor of shape [4] and dtype float32 that is "
                                 "no target")));
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(SavedPlanTest, NamesThePathThatItCannotUse) {
  EXPECT_THAT(SavePlan(*plan_, kInfo, "/nowhere/plan.loadplan"),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("`/nowhere/plan.loadplan` cannot be written: No such file")));
  EXPECT_THAT(ReadPlanFile("/nowhere/plan.loadplan"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("cannot be read: No such file")));
}

// Blobs that say something else than the plan beside them.
TEST_F(SavedPlanTest, RefusesAnOperatorOfAnotherShape) {
  PlanFile file = DecodePlanFile(*EncodeBoundPlan(*plan_, kInfo), DTypeByName).value();
  OperatorNode other = *plan_->traced->nodes.begin()->second;
  other.slots[0].meta.sizes = {4};
  file.extras.programs[0].blob = *EncodeOperator(other);
  EXPECT_THAT(BindPlan(std::move(file), NewModel(), kInfo),
              StatusIs(kInvalid, HasSubstr("the inputs of `aten::mul.Tensor` contradict")));
}

TEST_F(SavedPlanTest, RefusesAConstantOfAnotherSize) {
  PlanFile file = DecodePlanFile(*EncodeBoundPlan(*plan_, kInfo), DTypeByName).value();
  file.extras.constants[0].blob = *EncodeTensor(at::zeros({1}));
  EXPECT_THAT(BindPlan(std::move(file), NewModel(), kInfo),
              StatusIs(kInvalid, HasSubstr("a captured tensor is not as large")));
}

}  // namespace
}  // namespace loadplan::testing
