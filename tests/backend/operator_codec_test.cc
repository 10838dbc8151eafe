#include "backend/operator_codec.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "plan/byte_codec.h"
#include "tests/testing/seed.h"
#include "tests/testing/status_matchers.h"

namespace loadplan::testing {
namespace {

using ::testing::HasSubstr;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

at::Tensor AgainOf(const at::Tensor& tensor) {
  const absl::StatusOr<std::string> bytes = EncodeTensor(tensor);
  EXPECT_THAT(bytes, IsOk());
  const absl::StatusOr<at::Tensor> again = DecodeTensor(*bytes, at::kCPU);
  EXPECT_THAT(again, IsOk());
  return again.ok() ? *again : at::Tensor();
}

TEST(TensorCodecTest, GivesBackValuesShapesStridesAndDtypes) {
  const at::Tensor base = at::arange(24, at::kFloat).view({4, 6});
  const std::vector<at::Tensor> tensors = {base,
                                           base.t(),
                                           base.slice(1, 1, 5, 2),
                                           base.select(0, 2),
                                           at::zeros({0, 3}),
                                           at::ones({}),
                                           base.expand({2, 4, 6}),
                                           base.to(at::kBFloat16),
                                           base.to(at::kFloat8_e4m3fn),
                                           base.to(at::kInt).gt(5),
                                           at::complex(base, base),
                                           at::scalar_tensor(7, at::kLong)};
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor again = AgainOf(tensor);
    EXPECT_EQ(again.sizes(), tensor.sizes());
    EXPECT_EQ(again.strides(), tensor.strides());
    EXPECT_EQ(again.scalar_type(), tensor.scalar_type());
    const auto bytes = [](const at::Tensor& t) { return t.contiguous().view(at::kByte); };
    if (tensor.dim() > 0) {
      EXPECT_TRUE(at::equal(bytes(again), bytes(tensor))) << tensor;
    }
  }
  EXPECT_FALSE(AgainOf(at::Tensor()).defined());
  EXPECT_EQ(AgainOf(at::ones({}).fill_(3)).item().toDouble(), 3);
}

TEST(TensorCodecTest, KeepsWhatDecidesPromotion) {
  at::Tensor number = at::scalar_tensor(2.5, at::kDouble);
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  EXPECT_TRUE(AgainOf(number).unsafeGetTensorImpl()->is_wrapped_number());
}

TEST(TensorCodecTest, RefusesTensorsWithoutPlainMemory) {
  EXPECT_THAT(
      EncodeTensor(at::empty({2}, at::kMeta)),
      StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("shape [2] has no plain memory")));
}

TEST(TensorCodecTest, RefusesBytesThatAreNoTensor) {
  EXPECT_THAT(DecodeTensor("", at::kCPU), StatusIs(kInvalid, HasSubstr("cut off")));
  std::string bytes = *EncodeTensor(at::ones({4}));
  EXPECT_THAT(DecodeTensor(bytes + "x", at::kCPU), StatusIs(kInvalid, HasSubstr("left over")));
  const std::size_t extent = bytes.find('\x08', 11);
  ASSERT_NE(extent, std::string::npos);
  bytes[extent] = 10;  // five elements, of the bytes of four
  EXPECT_THAT(DecodeTensor(bytes, at::kCPU),
              StatusIs(kInvalid, HasSubstr("does not fit its bytes")));
}

// `op` with `arguments`; undefined tensors among them are inputs of the run.
OperatorNode NodeOf(const std::string& name, const std::string& overload,
                    std::vector<c10::IValue> arguments, const at::Tensor& input,
                    const at::Tensor& result) {
  OperatorNode node{*c10::Dispatcher::singleton().findSchema({name, overload}),
                    std::move(arguments),
                    {},
                    0,
                    {},
                    at::ScalarType::Float};
  for (std::size_t i = 0; i < node.arguments.size(); ++i) {
    const c10::IValue& argument = node.arguments[i];
    if (!argument.isTensor() || argument.toTensor().defined()) continue;
    node.slots.push_back({i, -1, false, MetaOf(input)});
    ++node.num_inputs;
  }
  node.results.push_back(MetaOf(result));
  return node;
}

TEST(OperatorCodecTest, RunsAgainAsItRan) {
  const at::Tensor x = at::arange(12, at::kFloat).view({3, 4});
  const at::Tensor none;
  std::vector<std::pair<OperatorNode, at::Tensor>> nodes;
  nodes.emplace_back(NodeOf("aten::neg", "", {none}, x, -x), -x);
  nodes.emplace_back(NodeOf("aten::mul", "Tensor", {none, at::ones({4}) * 3}, x, x), x * 3);
  nodes.emplace_back(
      NodeOf("aten::sum", "dim_IntList", {none, std::vector<int64_t>{1}, true, c10::IValue()}, x,
             x.sum(1, true)),
      x.sum(1, true));
  nodes.emplace_back(NodeOf("aten::clamp", "", {none, 2.5, 7}, x, x), x.clamp(2.5, 7));
  nodes.emplace_back(NodeOf("aten::div", "Tensor_mode", {none, at::full({}, 4.f), "floor"}, x, x),
                     x.div(at::full({}, 4.f), "floor"));
  for (const auto& [node, expected] : nodes) {
    const absl::StatusOr<std::string> bytes = EncodeOperator(node);
    ASSERT_THAT(bytes, IsOk());
    const auto again = DecodeOperator(*bytes, at::kCPU);
    ASSERT_THAT(again, IsOk());
    EXPECT_TRUE(at::equal((*again)->Run(std::vector<at::Tensor>{x}).at(0), expected))
        << node.op.operator_name();
    EXPECT_EQ(*EncodeOperator(**again), *bytes);
  }
}

TEST(OperatorCodecTest, FillsPlacesInLists) {
  const at::Tensor x = at::arange(4, at::kFloat);
  c10::List<at::Tensor> list;
  list.push_back(at::Tensor());
  list.push_back(at::ones({2}));
  OperatorNode node{*c10::Dispatcher::singleton().findSchema({"aten::cat", ""}),
                    {list, 0},
                    {{0, 0, false, MetaOf(x)}},
                    1,
                    {MetaOf(at::ones({6}))},
                    at::ScalarType::Float};
  const auto again = DecodeOperator(*EncodeOperator(node), at::kCPU);
  ASSERT_THAT(again, IsOk());
  EXPECT_TRUE(
      at::equal((*again)->Run(std::vector<at::Tensor>{x}).at(0), at::cat({x, at::ones({2})})));
}

TEST(OperatorCodecTest, SaysWhichArgumentHasNoFormInAFile) {
  const at::Tensor x = at::ones({2});
  OperatorNode node = NodeOf("aten::bernoulli", "",
                             {at::Tensor(), at::make_generator<at::CPUGeneratorImpl>()}, x, x);
  EXPECT_THAT(EncodeOperator(node),
              StatusIs(absl::StatusCode::kUnimplemented,
                       HasSubstr("argument 1 of `aten::bernoulli`: a Generator cannot be put")));
}

TEST(OperatorCodecTest, AcceptsOnlyWhatTheTraceDeviceCouldHaveRecorded) {
  const at::Tensor x = at::ones({2});
  const auto refused = [](const std::string& bytes, const std::string& words) {
    EXPECT_THAT(DecodeOperator(bytes, at::kCPU), StatusIs(kInvalid, HasSubstr(words)));
  };
  ByteWriter unknown;
  unknown.String("aten::no_such_operator");
  unknown.String("");
  refused(unknown.bytes(), "this torch has no operator `aten::no_such_operator`");
  refused(*EncodeOperator(NodeOf("aten::bernoulli", "", {at::Tensor(), c10::IValue()}, x, x)),
          "it draws random numbers");
  refused(*EncodeOperator(
              NodeOf("aten::from_file", "", {"a file", true, 4, 6, 0, c10::IValue(), false}, x, x)),
          "nothing of the plan goes into it");
  refused(*EncodeOperator(NodeOf("aten::mul", "Tensor", {at::Tensor(), 3}, x, x)),
          "argument `other` is of another type");
  refused(*EncodeOperator(NodeOf("aten::neg", "", {}, x, x)), "another number of arguments");
  OperatorNode twice = NodeOf("aten::mul", "Tensor", {at::Tensor(), x}, x, x);
  twice.slots.push_back({1, -1, false, MetaOf(x)});
  refused(*EncodeOperator(twice), "a tensor goes where none belongs");
  OperatorNode outside = NodeOf("aten::neg", "", {at::Tensor()}, x, x);
  outside.slots[0].position = 1;
  refused(*EncodeOperator(outside), "a tensor goes where none belongs");
}

TEST(OperatorCodecPropertyTest, SurvivesAnyBytes) {
  const at::Tensor x = at::arange(12, at::kFloat).view({3, 4});
  const std::string good = *EncodeOperator(
      NodeOf("aten::sum", "dim_IntList",
             {at::Tensor(), std::vector<int64_t>{1}, true, c10::IValue()}, x, x.sum(1, true)));
  ForEachRandom(3000, [&](std::mt19937& generator) {
    std::string bytes = good;
    for (auto left = 1 + generator() % 3; left > 0; --left) {
      bytes[generator() % bytes.size()] = static_cast<char>(generator());
    }
    if (generator() % 4 == 0) bytes.resize(generator() % bytes.size());
    static_cast<void>(DecodeOperator(bytes, at::kCPU));
  });
}

}  // namespace
}  // namespace loadplan::testing
