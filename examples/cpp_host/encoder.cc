#include "encoder.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>

namespace {

// What a load forgets can neither be right by chance nor stay unseen.
at::Tensor Unloaded(at::IntArrayRef shape) {
  return at::full(shape, std::numeric_limits<float>::quiet_NaN());
}

bool Replace(std::string& text, const std::string& from, const std::string& to) {
  const std::size_t found = text.find(from);
  if (found == std::string::npos) return false;
  text.replace(found, from.size(), to);
  return true;
}

bool EndsWith(const std::string& text, const std::string& end) { return text.ends_with(end); }

constexpr std::array kRenamed = {
    std::pair{"embeddings.LayerNorm.", "embedding_norm."},
    std::pair{"embeddings.position_embeddings.weight", "positions"},
    std::pair{"embeddings.token_type_embeddings.weight", "token_types"},
    std::pair{"encoder.layer.", "layers_"},
    std::pair{".attention.output.dense.", "_out."},
    std::pair{".attention.output.LayerNorm.", "_attention_norm."},
    std::pair{".intermediate.dense.", "_up."},
    std::pair{".output.dense.", "_down."},
    std::pair{".output.LayerNorm.", "_norm."},
};
constexpr std::array kFused = {".attention.self.query.", ".attention.self.key.",
                               ".attention.self.value."};

}  // namespace

Linear::Linear(int64_t inputs, int64_t outputs, bool has_weight) {
  if (has_weight) weight = register_parameter("weight", Unloaded({outputs, inputs}), false);
  bias = register_parameter("bias", Unloaded({outputs}), false);
}

Encoder::Encoder(const Config& config) : config_(config) {
  const int64_t hidden = config.hidden;
  const int64_t multiple = 64 * config.ranks;
  const int64_t rows = (config.vocabulary + multiple - 1) / multiple * 64;
  words_ = register_parameter("words", Unloaded({rows, hidden}), false);
  register_parameter("positions", Unloaded({config.positions, hidden}), false);
  register_parameter("token_types", Unloaded({2, hidden}), false);
  const auto add_norm = [&](const std::string& name) {
    const auto norm = register_module(name, std::make_shared<Linear>(0, hidden, false));
    norm->register_parameter("weight", Unloaded({hidden}), false);
  };
  add_norm("embedding_norm");
  for (int64_t i = 0; i < config.layers; ++i) {
    const std::string layer = "layers_" + std::to_string(i);
    const int64_t share = hidden / config.ranks;
    const int64_t wide = config.wide / config.ranks;
    register_module(layer + "_qkv", std::make_shared<Linear>(hidden, 3 * share));
    register_module(layer + "_out", std::make_shared<Linear>(share, hidden));
    register_module(layer + "_up", std::make_shared<Linear>(hidden, wide));
    register_module(layer + "_down", std::make_shared<Linear>(wide, hidden));
    add_norm(layer + "_attention_norm");
    add_norm(layer + "_norm");
  }
}

at::Tensor Encoder::ParameterOf(const std::string& name) {
  const auto parameters = named_parameters();
  const at::Tensor* const found = parameters.find(name);
  if (found == nullptr) throw std::runtime_error("no parameter is called " + name);
  return *found;
}

at::Tensor Encoder::Mine(const at::Tensor& weight, int64_t dim) const {
  const int64_t share = weight.size(dim) / config_.ranks;
  return weight.narrow(dim, config_.rank * share, share);
}

void Encoder::LoadOne(std::string name, const at::Tensor& weight) {
  if (name.starts_with("pooler.") || name == "embeddings.position_ids") return;
  if (name == "embeddings.word_embeddings.weight") {
    const int64_t first = config_.rank * words_.size(0);
    const int64_t real = std::min(config_.vocabulary - first, words_.size(0));
    words_.narrow(0, 0, real).copy_(weight.narrow(0, first, real));
    words_.narrow(0, real, words_.size(0) - real).zero_();
    return;
  }
  for (std::size_t part = 0; part < kFused.size(); ++part) {
    if (!Replace(name, kFused[part], "_qkv.")) continue;
    Replace(name, "encoder.layer.", "layers_");
    const at::Tensor fused = ParameterOf(name);
    const int64_t share = fused.size(0) / 3;
    fused.narrow(0, static_cast<int64_t>(part) * share, share).copy_(Mine(weight, 0));
    return;
  }
  for (const auto& [theirs, ours] : kRenamed) Replace(name, theirs, ours);
  const at::Tensor parameter = ParameterOf(name);
  if (EndsWith(name, "_out.weight") || EndsWith(name, "_down.weight")) {
    parameter.copy_(Mine(weight, 1));
  } else if (name.find("_up.") != std::string::npos) {
    parameter.copy_(Mine(weight, 0));
  } else {
    parameter.copy_(weight);
  }
}
