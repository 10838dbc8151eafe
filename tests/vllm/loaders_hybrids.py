# ruff: noqa: E501
"""State spaces, linear attention, and what mixes them with attention."""

from common_sizes import EXPERTS, MAMBA, MAMBA2, ONE_GROUP, ROUTED
from more_loaders import case
from vllm_loaders import _CASES, _Q35, F32, GDN, MLA, _recast, txt

EXP = dict(moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2)
ALOG = ("A_log", "dt_bias", ".D")

case(
    "falcon_mamba",
    "falcon_mamba",
    "FalconMambaForCausalLM",
    dict(
        vocab_size=320,
        hidden_size=64,
        state_size=16,
        num_hidden_layers=2,
        conv_kernel=4,
        expand=2,
        time_step_rank=8,
        tie_word_embeddings=False,
    ),
)
case(
    "mamba_f32",
    "mamba",
    "MambaForCausalLM",
    _CASES["mamba"].kw,
    metas=lambda m, c: _recast(m, ALOG, F32),
)
case("mamba_tied", "mamba", "MambaForCausalLM", {**_CASES["mamba"].kw, "tie_word_embeddings": True})
case("mamba2_one_group", "mamba2", "Mamba2ForCausalLM", {**_CASES["mamba2"].kw, "n_groups": 1})
case(
    "jamba",
    "jamba",
    "JambaForCausalLM",
    txt(
        **MAMBA,
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_dt_rank=8,
        num_hidden_layers=4,
        use_mamba_kernels=False,
    ),
)
case(
    "zamba2",
    "zamba2",
    "Zamba2ForCausalLM",
    txt(
        **MAMBA,
        num_hidden_layers=4,
        num_key_value_heads=8,
        n_mamba_heads=8,
        mamba_ngroups=4,
        mamba_headdim=16,
        adapter_rank=8,
        num_mem_blocks=1,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        hybrid_layer_ids=[1, 3],
        use_mem_rope=True,
        use_shared_attention_adapter=True,
        tie_word_embeddings=True,
    ),
)
case(
    "falcon_h1",
    "falcon_h1",
    "FalconH1ForCausalLM",
    txt(
        **MAMBA,
        head_dim=8,
        mamba_d_ssm=128,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=4,
        mamba_chunk_size=32,
    ),
)
case(
    "nemotron_h",
    "nemotron_h",
    "NemotronHForCausalLM",
    txt(
        **ROUTED,
        **ONE_GROUP,
        **MAMBA2,
        head_dim=8,
        num_hidden_layers=4,
        hybrid_override_pattern="M-*E",
        layers_block_type=["mamba", "mlp", "attention", "moe"],
        moe_shared_expert_intermediate_size=64,
    ),
)
case(
    "nemotron_h_dense",
    "nemotron_h",
    "NemotronHForCausalLM",
    txt(
        **MAMBA2,
        head_dim=8,
        num_hidden_layers=3,
        hybrid_override_pattern="M-*",
        layers_block_type=["mamba", "mlp", "attention"],
    ),
)
case(
    "granitemoehybrid",
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    txt(
        **MAMBA,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=4,
        layer_types=["mamba", "attention"],
        layers_block_type=["mamba", "attention"],
    ),
)
case(
    "qwen3_next",
    "qwen3_next",
    "Qwen3NextForCausalLM",
    txt(head_dim=16, num_hidden_layers=4, **GDN, **EXP, shared_expert_intermediate_size=64),
)
case(
    "qwen3_next_f32",
    "qwen3_next",
    "Qwen3NextForCausalLM",
    txt(head_dim=16, num_hidden_layers=4, **GDN, **EXP, shared_expert_intermediate_size=64),
    metas=lambda m, c: _recast(m, ALOG, F32),
)
case("qwen3_5_text", "qwen3_5_text", "Qwen3_5ForCausalLM", _Q35)
case(
    "qwen3_5_moe_text",
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    {**_Q35, **EXP, "shared_expert_intermediate_size": 64},
)
case(
    "lfm2",
    "lfm2",
    "Lfm2ForCausalLM",
    txt(
        layer_types=["conv", "full_attention"],
        conv_L_cache=3,
        conv_dim=64,
        conv_bias=False,
        block_dim=64,
        block_ff_dim=128,
        block_auto_adjust_ff_dim=False,
        block_ffn_dim_multiplier=1.0,
        block_multiple_of=16,
    ),
)
case(
    "bailing_hybrid",
    "bailing_hybrid",
    "BailingMoeV2_5ForCausalLM",
    txt(
        **EXPERTS,
        **ONE_GROUP,
        head_dim=8,
        num_shared_experts=1,
        first_k_dense_replace=1,
        layer_group_size=2,
        group_norm_size=4,
        use_bias=False,
        use_qkv_bias=False,
        linear_silu=True,
        num_hidden_layers=4,
        **{k: v for k, v in MLA.items() if k.endswith(("rank", "head_dim"))},
    ),
)
