// Loads a checkpoint into an Encoder by plan, and proves that every byte is what the encoder's own
// loader leaves.
//
//   cpp_host model.safetensors
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <stdexcept>

#include "encoder.h"
#include "lifecycle/host_loader.h"
#include "safetensors.h"

namespace {

using Weights = std::vector<std::pair<std::string, at::Tensor>>;

template <typename T>
T Value(absl::StatusOr<T> result) {
  if (!result.ok()) throw std::runtime_error(std::string(result.status().message()));
  return *std::move(result);
}
void Check(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(std::string(status.message()));
}

std::vector<loadplan::LiveTarget> TargetsOf(const torch::nn::Module& module) {
  std::vector<loadplan::LiveTarget> targets;
  for (const auto& item : module.named_parameters()) targets.push_back({item.key(), item.value()});
  for (const auto& item : module.named_buffers()) targets.push_back({item.key(), item.value()});
  return targets;
}

double Seconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

void LoadEagerly(Encoder& encoder, const Weights& weights) {
  auto at = weights.begin();
  encoder.load_weights([&]() -> std::optional<std::pair<std::string, at::Tensor>> {
    if (at == weights.end()) return std::nullopt;
    return *at++;
  });
}

// One update; `keep` false: it is given up at the end.
void LoadByPlan(loadplan::ReloadSession& session,
                const std::shared_ptr<const loadplan::BoundPlan>& plan, Encoder& encoder,
                const loadplan::LoadWeights& loader, const Weights& weights, bool keep) {
  const std::vector<loadplan::LiveTarget> targets = TargetsOf(encoder);
  Check(session.Start({.required = {"*"}, .atomic = !keep}));
  Check(session.Begin(plan, targets));
  for (const auto& [name, tensor] : weights) Check(session.Deliver(name, tensor));
  Check(loadplan::CallLoader(session, *plan, loader, targets));
  if (!keep) return Check(session.Abort());
  Check(session.PrepareFinish(std::nullopt, targets));
  const loadplan::Receipt receipt = Value(session.Finish());
  std::printf("%zu names, %lld bytes written, %.4f s\n", receipt.entries.size(),
              static_cast<long long>(receipt.nbytes), receipt.seconds);
}

void CompareBytes(const Encoder& planned, const Encoder& eager) {
  const auto expected = eager.named_parameters();
  std::size_t nbytes = 0;
  for (const auto& item : planned.named_parameters()) {
    // As integers: a byte that was forgotten is NaN, which equals nothing.
    if (!at::equal(item.value().view(at::kInt), expected[item.key()].view(at::kInt))) {
      throw std::runtime_error("`" + item.key() + "` differs from the loader's");
    }
    nbytes += item.value().nbytes();
  }
  std::printf("%zu live bytes are equal\n", nbytes);
}

void Run(const std::string& path) {
  const c10::NoGradGuard no_grad;
  Weights weights = ReadSafetensors(path);
  std::vector<loadplan::SourceMeta> metas;
  for (const auto& [name, tensor] : weights) {
    metas.push_back({name, tensor.sizes().vec(), tensor.scalar_type()});
  }
  const Config config{.rank = 1, .ranks = 2};
  Encoder encoder(config);
  Encoder eager(config);
  const loadplan::LoadWeights loader = [&](const loadplan::NextWeight& next) {
    encoder.load_weights(next);
  };

  const double start = Seconds();
  const auto plan = Value(loadplan::PlanLoads(metas, TargetsOf(encoder), loader));
  std::printf("%splanned in %.4f s\n", plan->plan().Report().c_str(), Seconds() - start);

  loadplan::ReloadSession session;
  LoadByPlan(session, plan, encoder, loader, weights, /*keep=*/true);
  LoadEagerly(eager, weights);
  CompareBytes(encoder, eager);

  // New values, in another order; given up first, so that the old bytes come back.
  for (auto& [name, tensor] : weights) tensor = tensor.is_floating_point() ? tensor * -2 : tensor;
  std::reverse(weights.begin(), weights.end());
  LoadByPlan(session, plan, encoder, loader, weights, /*keep=*/false);
  CompareBytes(encoder, eager);
  LoadByPlan(session, plan, encoder, loader, weights, /*keep=*/true);
  LoadEagerly(eager, weights);
  CompareBytes(encoder, eager);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: cpp_host model.safetensors\n");
    return 2;
  }
  try {
    Run(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cpp_host: %s\n", error.what());
    return 1;
  }
  return 0;
}
