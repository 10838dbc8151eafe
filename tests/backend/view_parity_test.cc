// Random view programs: a trace tensor has the sizes, strides, offset and dtype that a real
// tensor has, or the same error.
#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/backend/traced_loader.h"
#include "tests/testing/seed.h"

namespace loadplan::testing {
namespace {

using Numbers = std::vector<int64_t>;

struct ViewOp {
  const char* name;
  std::function<at::Tensor(const at::Tensor&, const Numbers&)> apply;
};

// Numbers are drawn from -1 .. 7: most calls are right, the rest raise.
const std::vector<ViewOp>& ViewOps() {
  const auto part = [](const std::vector<at::Tensor>& parts, int64_t which) {
    const auto last = std::max<int64_t>(static_cast<int64_t>(parts.size()) - 1, 0);
    return parts.at(static_cast<std::size_t>(std::clamp<int64_t>(which, 0, last)));
  };
  using T = const at::Tensor&;
  using N = const Numbers&;
  static const std::vector<ViewOp> ops = {
      {"narrow", [](T t, N n) { return t.narrow(n[0] % 3, n[1], n[2]); }},
      {"slice", [](T t, N n) { return t.slice(n[0] % 3, n[1], n[1] + n[2], n[3]); }},
      {"select", [](T t, N n) { return t.select(n[0] % 3, n[1] % 4); }},
      {"transpose", [](T t, N n) { return t.transpose(n[0] % 3, n[1] % 3); }},
      {"permute",
       [](T t, N n) {
         return n[0] % 2 == 0 ? t.permute({n[1] % 3, n[2] % 3}) : t.permute({2, 0, 1});
       }},
      {"movedim", [](T t, N n) { return t.movedim(n[0] % 3, n[1] % 3); }},
      {"expand",
       [](T t, N n) {
         return t.unsqueeze(0).expand({n[0], -1, -1});
       }},
      {"unsqueeze", [](T t, N n) { return t.unsqueeze(n[0] % 4); }},
      {"squeeze", [](T t, N n) { return n[0] % 2 == 0 ? t.squeeze() : t.squeeze(n[1] % 3); }},
      {"view",
       [](T t, N n) {
         return t.view({n[0], -1});
       }},
      {"reshape",
       [](T t, N n) {
         return t.reshape({-1, n[0]});
       }},
      {"flatten", [](T t, N n) { return t.flatten(n[0] % 2, -1); }},
      {"unflatten",
       [](T t, N n) {
         return t.unflatten(n[0] % 3, {2, -1});
       }},
      {"split", [part](T t, N n) { return part(t.split(n[0], n[1] % 3), n[2]); }},
      {"chunk", [part](T t, N n) { return part(t.chunk(n[0], n[1] % 3), n[2]); }},
      {"unbind", [part](T t, N n) { return part(t.unbind(n[0] % 3), n[1]); }},
      {"diagonal", [](T t, N n) { return t.diagonal(n[0] % 3, n[1] % 3, n[2] % 3); }},
      {"unfold", [](T t, N n) { return t.unfold(n[0] % 3, n[1], n[2]); }},
      {"as_strided",
       [](T t, N n) {
         return t.as_strided({n[0], n[1]}, {n[2], n[3]}, n[4]);
       }},
      {"view_dtype",
       [](T t, N n) {
         return t.view(std::vector{at::kByte, at::kHalf, at::kInt,
                                   at::kDouble}[static_cast<std::size_t>(n[0] < 0 ? 0 : n[0] % 4)]);
       }},
      {"t", [](T t, N) { return t.t(); }},
      {"mT", [](T t, N) { return t.mT(); }},
      {"detach", [](T t, N) { return t.detach(); }},
      {"alias", [](T t, N) { return at::alias(t); }},
      {"view_as", [](T t, N) { return t.view_as(t); }},
      {"swapaxes", [](T t, N n) { return t.swapaxes(n[0] % 3, n[1] % 3); }},
      {"tensor_split", [part](T t, N n) { return part(t.tensor_split(n[0], n[1] % 2), n[2]); }},
      {"contiguous", [](T t, N) { return t.contiguous(); }},
  };
  return ops;
}

// What must agree.
std::string Geometry(const at::Tensor& t) {
  std::ostringstream text;
  text << t.sizes() << " " << t.strides() << " +" << t.storage_offset() << " " << t.scalar_type()
       << " contiguous=" << t.is_contiguous() << " dense=" << t.is_non_overlapping_and_dense();
  return text.str();
}

// `unflatten` wraps an error with the backtrace of the one within, which says who called.
std::string WithoutBacktrace(std::string text) {
  return text.substr(0, text.find("\nException raised from"));
}

// An error that names the device names it in torch's own words.
std::string OnCpu(std::string text) {
  const std::string device = "privateuseone";
  for (auto at = text.find(device); at != std::string::npos; at = text.find(device))
    text.replace(at, device.size(), "CPU");
  return WithoutBacktrace(std::move(text));
}

TEST(ViewParityProperty, AgreesWithARealTensor) {
  constexpr int kPrograms = 3000;
  at::Tensor p = at::zeros({4});
  ForEachRandom(kPrograms, [&](std::mt19937& gen) {
    const auto draw = [&gen](int low, int high) {
      return low + static_cast<int64_t>(gen() % static_cast<std::uint32_t>(high - low + 1));
    };
    const Numbers sizes = {draw(1, 6), draw(1, 6), draw(1, 4)};
    const auto dtype = std::vector{at::kFloat, at::kBFloat16, at::kByte, at::kLong}[gen() % 4];
    TracedLoader loader({{"w", sizes, dtype}}, {{"p", p}});
    loader.Begin();
    at::Tensor traced = loader["w"];
    at::Tensor real = at::zeros(sizes, dtype);
    std::string program = "w" + Geometry(real);
    for (int64_t steps = draw(1, 5); steps > 0; --steps) {
      const ViewOp& op = ViewOps()[gen() % ViewOps().size()];
      Numbers numbers;
      for (int i = 0; i < 5; ++i) numbers.push_back(draw(gen() % 4 == 0 ? -1 : 0, 7));
      program += std::string(" ") + op.name + "(" + ::testing::PrintToString(numbers) + ")";
      at::Tensor next_real;
      at::Tensor next_traced;
      const std::string eager_error = ErrorOf([&] { next_real = op.apply(real, numbers); });
      const std::string trace_error = ErrorOf([&] { next_traced = op.apply(traced, numbers); });
      ASSERT_EQ(OnCpu(trace_error), WithoutBacktrace(eager_error)) << program;
      if (!eager_error.empty()) continue;
      ASSERT_EQ(Geometry(next_traced), Geometry(next_real)) << program;
      EXPECT_EQ(
          next_traced.storage().unsafeGetStorageImpl() == traced.storage().unsafeGetStorageImpl(),
          next_real.storage().unsafeGetStorageImpl() == real.storage().unsafeGetStorageImpl())
          << program;
      real = next_real;
      traced = next_traced;
    }
  });
}

}  // namespace
}  // namespace loadplan::testing
