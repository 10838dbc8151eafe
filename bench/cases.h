// Records shaped like those of real models, for benchmarks and tests.
#ifndef LOADPLAN_BENCH_CASES_H_
#define LOADPLAN_BENCH_CASES_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "plan/load_plan_builder.h"
#include "tests/testing/log_builder.h"

namespace loadplan::bench {

// Kimi-K2: 61 layers, the first one dense, 384 experts in each other: 69,975 names.
struct K2Case {
  int layers = 61;
  Index tensor_parallel = 8;
  bool is_expert_parallel = false;  // own experts whole, the others not at all
  Index rank = 1;
  // The loader zeroes each tensor of experts before it fills it.
  bool is_zeroed_first = false;

  static constexpr Index kHidden = 7168;
  static constexpr Index kExperts = 384;
  static constexpr Index kExpertWidth = 2048;
  static constexpr Index kDenseWidth = 18432;
  static constexpr Index kHeads = 64;
  static constexpr Index kVocabulary = 163840;

  // Names of a model of `layers` layers.
  size_t num_names() const {
    return static_cast<size_t>(12 + (layers - 1) * (kExperts * 3 + 14) + 3);
  }
};

// Writes the copies that vLLM's loader makes on one rank: fused q_a and kv_a, fused
// gate and up, experts in one tensor per layer, row- and column-parallel shards.
class K2Records {
 public:
  explicit K2Records(const K2Case& k2) : k2_(k2) {}

  BuildInput Make() {
    Rows("model.embed_tokens.weight", k2_.kVocabulary);
    for (int layer = 0; layer < k2_.layers; ++layer) {
      const std::string prefix = absl::StrCat("model.layers.", layer, ".");
      Attention(prefix);
      if (layer == 0)
        Mlp(prefix + "mlp.", k2_.kDenseWidth);
      else
        Experts(prefix + "mlp.");
    }
    Whole("model.norm.weight", {k2_.kHidden});
    Rows("lm_head.weight", k2_.kVocabulary);
    return std::move(log_.input());
  }

 private:
  using View = testing::View;
  static constexpr DType kType = testing::kBFloat16;

  void Whole(const std::string& name, DimVector shape, const DType& dtype = kType) {
    const View source = log_.Source(name, shape, dtype);
    log_.Copy(log_.Target(name, shape, dtype), source);
  }
  // This rank's rows of `source`, and its columns.
  View RowsOf(const View& source) const {
    const Index extent = source.extent(0) / k2_.tensor_parallel;
    return source.Slice(0, k2_.rank * extent, (k2_.rank + 1) * extent);
  }
  View ColumnsOf(const View& source) const {
    const Index extent = source.extent(1) / k2_.tensor_parallel;
    return source.Slice(1, k2_.rank * extent, (k2_.rank + 1) * extent);
  }
  void Rows(const std::string& name, Index rows, Index columns = K2Case::kHidden) {
    const View shard = RowsOf(log_.Source(name, {rows, columns}, kType));
    log_.Copy(log_.Target(name, shard.layout.shape(), kType), shard);
  }
  void Columns(const std::string& name, Index rows, Index columns) {
    const View shard = ColumnsOf(log_.Source(name, {rows, columns}, kType));
    log_.Copy(log_.Target(name, shard.layout.shape(), kType), shard);
  }

  void Zero(const View& view) {
    const View zero = log_.Constant(0, {1}, kType).Select(0, 0);
    log_.Copy(view,
              zero.Expand(0, view.extent(2)).Expand(0, view.extent(1)).Expand(0, view.extent(0)));
  }

  void Attention(const std::string& prefix) {
    const std::string p = prefix + "self_attn.";
    Whole(prefix + "input_layernorm.weight", {k2_.kHidden});
    Whole(prefix + "post_attention_layernorm.weight", {k2_.kHidden});
    const View fused = log_.Target(p + "fused_qkv_a_proj.weight", {1536 + 576, k2_.kHidden}, kType);
    log_.Copy(fused.Slice(0, 0, 1536),
              log_.Source(p + "q_a_proj.weight", {1536, k2_.kHidden}, kType));
    log_.Copy(fused.Slice(0, 1536, 1536 + 576),
              log_.Source(p + "kv_a_proj_with_mqa.weight", {576, k2_.kHidden}, kType));
    Whole(p + "q_a_layernorm.weight", {1536});
    Whole(p + "kv_a_layernorm.weight", {512});
    Rows(p + "q_b_proj.weight", k2_.kHeads * 192, 1536);
    Rows(p + "kv_b_proj.weight", k2_.kHeads * 256, 512);
    Columns(p + "o_proj.weight", k2_.kHidden, k2_.kHeads * 128);
  }

  void Mlp(const std::string& prefix, Index width) {
    const Index shard = width / k2_.tensor_parallel;
    const View fused = log_.Target(prefix + "gate_up_proj.weight", {2 * shard, k2_.kHidden}, kType);
    log_.Copy(fused.Slice(0, 0, shard),
              RowsOf(log_.Source(prefix + "gate_proj.weight", {width, k2_.kHidden}, kType)));
    log_.Copy(fused.Slice(0, shard, 2 * shard),
              RowsOf(log_.Source(prefix + "up_proj.weight", {width, k2_.kHidden}, kType)));
    Columns(prefix + "down_proj.weight", k2_.kHidden, width);
  }

  void Experts(const std::string& prefix) {
    Whole(prefix + "gate.weight", {k2_.kExperts, k2_.kHidden});
    Whole(prefix + "gate.e_score_correction_bias", {k2_.kExperts}, testing::kFloat32);
    Mlp(prefix + "shared_experts.", k2_.kExpertWidth);
    const bool ep = k2_.is_expert_parallel;
    const Index held = ep ? k2_.kExperts / k2_.tensor_parallel : k2_.kExperts;
    const Index width = ep ? k2_.kExpertWidth : k2_.kExpertWidth / k2_.tensor_parallel;
    const View w13 =
        log_.Target(prefix + "experts.w13_weight", {held, 2 * width, k2_.kHidden}, kType);
    const View w2 = log_.Target(prefix + "experts.w2_weight", {held, k2_.kHidden, width}, kType);
    if (k2_.is_zeroed_first) {
      Zero(w13);
      Zero(w2);
    }
    for (Index e = 0; e < k2_.kExperts; ++e) {
      const std::string p = absl::StrCat(prefix, "experts.", e, ".");
      const View gate = log_.Source(p + "gate_proj.weight", {k2_.kExpertWidth, k2_.kHidden}, kType);
      const View up = log_.Source(p + "up_proj.weight", {k2_.kExpertWidth, k2_.kHidden}, kType);
      const View down = log_.Source(p + "down_proj.weight", {k2_.kHidden, k2_.kExpertWidth}, kType);
      const Index slot = ep ? e - k2_.rank * held : e;
      if (slot < 0 || slot >= held) continue;
      log_.Copy(w13.Select(0, slot).Slice(0, 0, width), ep ? gate : RowsOf(gate));
      log_.Copy(w13.Select(0, slot).Slice(0, width, 2 * width), ep ? up : RowsOf(up));
      log_.Copy(w2.Select(0, slot), ep ? down : ColumnsOf(down));
    }
  }

  K2Case k2_;
  testing::LogBuilder log_;
};

inline BuildInput MakeK2(const K2Case& k2) { return K2Records(k2).Make(); }

}  // namespace loadplan::bench

#endif  // LOADPLAN_BENCH_CASES_H_
