# ruff: noqa: E501
"""Mixtures of experts."""

import re

from common_sizes import EXPERTS, HUB, ONE_GROUP, ROUTED, SHARED
from more_loaders import case, plain_config
from vllm_loaders import (
    _CASES,
    F32,
    MLA,
    _ds3,
    _recast,
    _routed_only,
    txt,
)

EXP = dict(moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2)
GATE = ("e_score_correction_bias", "expert_bias")

case(
    "granitemoe",
    "granitemoe",
    "GraniteMoeForCausalLM",
    txt(num_local_experts=4, num_experts_per_tok=2),
)
case(
    "granitemoeshared",
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    txt(num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=64),
)
case(
    "olmoe",
    "olmoe",
    "OlmoeForCausalLM",
    txt(num_experts=4, num_experts_per_tok=2, num_key_value_heads=8),
)
case("phimoe", "phimoe", "PhiMoEForCausalLM", txt(num_local_experts=4, num_experts_per_tok=2))
case(
    "qwen2_moe", "qwen2_moe", "Qwen2MoeForCausalLM", txt(**EXP, shared_expert_intermediate_size=64)
)
case("qwen3_moe_ep", "qwen3_moe", "Qwen3MoeForCausalLM", txt(**EXP, head_dim=8), ep=True)
case(
    "mixtral_ep",
    "mixtral",
    "MixtralForCausalLM",
    txt(num_local_experts=4, num_experts_per_tok=2),
    ep=True,
)
case("gpt_oss_ep", "gpt_oss", "GptOssForCausalLM", _CASES["gpt_oss"].kw, ep=True)
case(
    "deepseek_v3_ep",
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _CASES["deepseek_v3"].kw,
    metas=_ds3,
    ep=True,
)
case(
    "deepseek_v2",
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    txt(**{**MLA, "q_lora_rank": None}, topk_method="greedy"),
)
case(
    "deepseek_v2_q_lora",
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    txt(**MLA, topk_method="group_limited_greedy"),
)
_INDEX = dict(index_n_heads=4, index_head_dim=32, index_topk=16)
case(
    "deepseek_v32",
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    txt(**MLA, **_INDEX, topk_method="noaux_tc", scoring_func="sigmoid"),
    metas=lambda m, c: _recast(m, GATE, F32),
)
case(
    "glm_moe_dsa",
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    txt(**MLA, **_INDEX, topk_method="noaux_tc", scoring_func="sigmoid"),
    metas=lambda m, c: _recast(m, GATE, F32),
)
case(
    "glm4_moe",
    "glm4_moe",
    "Glm4MoeForCausalLM",
    txt(**ROUTED, **SHARED, **ONE_GROUP, head_dim=8, use_qk_norm=True),
    metas=lambda m, c: _recast(m, GATE, F32),
)
case("glm4_moe_lite", "glm4_moe_lite", "Glm4MoeLiteForCausalLM", txt(**MLA))
case(
    "glm5_next",
    "glm5_next_text",
    "Glm5NextForCausalLM",
    {
        **txt(
            **MLA,
            index_n_heads=4,
            index_head_dim=32,
            index_topk=16,
            linear_head_dim=16,
            linear_num_heads=8,
            linear_conv_kernel_dim=4,
            head_dim=0,
        ),
        "qk_rope_head_dim": 0,
        "n_group": 1,
        "mhc": True,
        "hc_mult": 2,
        "mla_use_nope": True,
    },
    unfuse=lambda k: k,
    tp=(1,),
)
case(
    "ernie4_5_moe",
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    txt(
        head_dim=8,
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=32,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        tie_word_embeddings=True,
    ),
)
case(
    "exaone_moe",
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    txt(
        **EXPERTS,
        **ONE_GROUP,
        head_dim=8,
        num_shared_experts=1,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"],
        first_k_dense_replace=1,
    ),
)
case(
    "hy_v3",
    "hy_v3",
    "HYV3ForCausalLM",
    txt(
        **EXPERTS,
        head_dim=8,
        expert_hidden_dim=32,
        num_shared_experts=1,
        first_k_dense_replace=1,
        route_norm=True,
        qk_norm=True,
        moe_router_enable_expert_bias=True,
    ),
)
case(
    "minimax_m2",
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    txt(
        scoring_func="sigmoid",
        use_routing_bias=True,
        rotary_dim=8,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=32,
    ),
    metas=lambda m, c: _recast(m, GATE, F32),
)
case(
    "longcat_flash",
    "longcat_flash",
    "LongcatFlashForCausalLM",
    txt(
        **{**MLA, "num_hidden_layers": 4},
        ffn_hidden_size=128,
        expert_ffn_hidden_size=32,
        zero_expert_num=2,
        moe_topk=2,
        num_layers=2,
        zero_expert_type="identity",
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
        routed_scaling_factor=1.0,
    ),
    metas=_routed_only,
)
case(
    "lfm2_moe",
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    txt(**EXPERTS, num_dense_layers=1, layer_types=["conv", "full_attention"], conv_L_cache=3),
)
case("axk1", "axk1", "AXK1ForCausalLM", txt(**MLA, topk_method="noaux_tc", scoring_func="sigmoid"))
case(
    "afmoe",
    "afmoe",
    "AfmoeForCausalLM",
    txt(
        **EXPERTS,
        **ONE_GROUP,
        score_func="sigmoid",
        route_norm=True,
        head_dim=8,
        num_shared_experts=1,
        num_dense_layers=1,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=32,
    ),
)
case(
    "flex_olmo",
    "flex_olmo",
    "FlexOlmoForCausalLM",
    txt(num_experts=4, num_experts_per_tok=2, num_key_value_heads=8),
)
case(
    "hunyuan_moe",
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    txt(
        **{"intermediate_size": 32},
        head_dim=8,
        num_experts=4,
        moe_topk=2,
        moe_intermediate_size=32,
        num_shared_expert=1,
    ),
)
case("kolibri1", "kolibri1", "Kolibri1ForCausalLM", txt(**EXP))
case("mellum", "mellum", "MellumForCausalLM", txt(**EXP))
case(
    "dots1",
    "dots1",
    "TransformersMoEForCausalLM",
    txt(**ROUTED, **SHARED, **ONE_GROUP, head_dim=8, num_key_value_heads=8),
)
case("qwen3_moe_transformers", "qwen3_moe", "TransformersMoEForCausalLM", txt(**EXP, head_dim=8))
case(
    "mixtral_transformers",
    "mixtral",
    "TransformersMoEForCausalLM",
    txt(num_local_experts=4, num_experts_per_tok=2),
)
case(
    "cohere2_moe",
    "cohere2_moe",
    "Cohere2MoeForCausalLM",
    txt(
        **EXP,
        head_dim=8,
        num_shared_experts=1,
        tie_word_embeddings=True,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
    ),
)
case(
    "mimo_v2_flash",
    "mimo_v2_flash",
    "MiMoV2FlashForCausalLM",
    txt(
        **ROUTED,
        **ONE_GROUP,
        head_dim=16,
        v_head_dim=8,
        swa_head_dim=16,
        swa_v_head_dim=8,
        swa_num_attention_heads=8,
        swa_num_key_value_heads=4,
        hybrid_layer_pattern=[0, 1],
        moe_layer_freq=[0, 1],
        sliding_window=32,
        sliding_window_size=32,
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        layernorm_epsilon=1e-5,
        attention_value_scale=1.0,
        partial_rotary_factor=0.5,
        rope_theta=1e4,
        swa_rope_theta=1e4,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        norm_topk_prob=True,
    ),
)
case(
    "openai_privacy_filter",
    "openai_privacy_filter",
    "OpenAIPrivacyFilterForTokenClassification",
    txt(head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=32, num_labels=3),
    auto="AutoModelForTokenClassification",
    model_kw=dict(runner="pooling"),
)

# ---- of the hub
_ROPE = dict(**HUB)


def _hub(name, arch, kw, **more):
    case(
        name,
        name,
        arch,
        kw,
        make_config=plain_config(name),
        unfuse=more.pop("unfuse", lambda key: key),
        **more,
    )


_hub(
    "deepseek",
    "DeepseekForCausalLM",
    txt(**ROUTED, **SHARED, **_ROPE, moe_layer_freq=1, norm_topk_prob=True),
)
_BAILING = dict(
    _ROPE,
    **EXPERTS,
    **ONE_GROUP,
    num_shared_experts=1,
    first_k_dense_replace=1,
    head_dim=8,
    use_qkv_bias=False,
    use_bias=False,
    norm_topk_prob=True,
    use_qk_norm=True,
    score_function="sigmoid",
    router_dtype="fp32",
    embedding_dropout=0.0,
    output_dropout=0.0,
    norm_head=False,
    moe_router_enable_expert_bias=True,
    routed_scaling_factor=1.0,
    partial_rotary_factor=0.5,
    rotary_dim=4,
)
_hub(
    "bailing_moe",
    "BailingMoeForCausalLM",
    txt(**_BAILING),
    unfuse=lambda k: k.replace("qkv_proj", "query_key_value"),
)
_hub("bailing_moe_norm_head", "BailingMoeForCausalLM", txt(**{**_BAILING, "norm_head": True}))
_hub("bailing_moe_v2", "BailingMoeV2ForCausalLM", txt(**_BAILING))
_hub("sarvam_moe", "SarvamMoEForCausalLM", txt(**_BAILING))
_hub(
    "sarvam_mla",
    "SarvamMLAForCausalLM",
    {**txt(**_BAILING), **MLA, "num_hidden_layers": 2, "n_group": 1, "topk_group": 1},
)
_hub("param2moe", "Param2MoEForCausalLM", txt(**_BAILING))


def _fused_3d(metas, config):
    """One tensor for all experts of a layer."""
    out = {}
    for key, (shape, dtype) in metas.items():
        if ".experts." in key:
            out[re.sub(r"experts\.\d+\.", "", key)] = ((config.moe_num_experts, *shape), dtype)
        else:
            out[key] = (shape, dtype)
    return out


_hub(
    "step3_text",
    "Step3TextForCausalLM",
    txt(
        **_ROPE,
        head_dim=8,
        share_q_dim=32,
        num_attention_groups=1,
        moe_intermediate_size=32,
        moe_num_experts=4,
        moe_top_k=2,
        share_expert_dim=64,
        moe_layers_enum="1",
        norm_expert_weight=True,
        **{"num_key_value_heads": 1},
    ),
    metas=_fused_3d,
)
_hub(
    "step3p5",
    "Step3p5ForCausalLM",
    txt(
        **_ROPE,
        head_dim=8,
        num_attention_groups=4,
        moe_intermediate_size=32,
        moe_num_experts=4,
        moe_top_k=2,
        share_expert_dim=64,
        moe_layers_enum="1",
        norm_expert_weight=True,
        sliding_window=32,
        layer_types=["full_attention", "sliding_attention"],
        attention_other_setting=dict(
            attention_type="sliding_attention",
            num_attention_heads=8,
            num_attention_groups=4,
            head_dim=8,
        ),
        use_moe=True,
        use_head_wise_attn_gate=True,
        use_moe_router_bias=True,
        moe_router_activation="sigmoid",
        moe_router_scaling_factor=1.0,
        need_fp32_gate=True,
    ),
)
_hub(
    "pangu_pro_moe",
    "PanguProMoEV2ForCausalLM",
    txt(
        **EXPERTS,
        **SHARED,
        **_ROPE,
        n_routed_experts=4,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        attention_bias=False,
    ),
)
_hub(
    "pangu_ultra_moe",
    "PanguUltraMoEForCausalLM",
    {
        **txt(**_ROPE),
        "norm_topk_prob": True,
        "attention_bias": False,
        **MLA,
        "attention_kv_lora_dim": 32,
        "attention_q_lora_dim": 24,
        "attention_qk_dim": 16,
        "attention_qk_rope_dim": 8,
        "attention_v_dim": 16,
        "num_routed_experts": 4,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.0,
        "sandwich_norm": True,
        "n_group": 1,
        "topk_group": 1,
    },
)
