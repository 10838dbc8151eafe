// BERT's weights the way a C++ engine holds them: fused and sharded, with a loader of its own.
// Nothing in it knows that loads can be planned.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

struct Config {
  int64_t hidden = 384;
  int64_t wide = 1536;
  int64_t layers = 6;
  int64_t vocabulary = 30522;
  int64_t positions = 512;
  int64_t rank = 0;
  int64_t ranks = 1;
};

class Linear : public torch::nn::Module {
 public:
  Linear(int64_t inputs, int64_t outputs, bool has_weight = true);
  at::Tensor weight, bias;
};

// What one rank holds of a sentence encoder.
class Encoder : public torch::nn::Module {
 public:
  explicit Encoder(const Config& config);

  // `next` gives a name and a tensor, or nothing after the last one. Throws for a name that it
  // does not know.
  template <typename Next>
  void load_weights(const Next& next) {
    while (auto item = next()) LoadOne(item->first, item->second);
  }

 private:
  void LoadOne(std::string name, const at::Tensor& weight);
  at::Tensor ParameterOf(const std::string& name);
  // This rank's part of `dim`.
  at::Tensor Mine(const at::Tensor& weight, int64_t dim) const;

  const Config config_;
  at::Tensor words_;  // padded, so that every rank gets the same share
};
