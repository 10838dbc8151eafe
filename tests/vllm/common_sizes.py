"""Sizes that many cases share: small, and divisible by the ranks that the tests have."""

from __future__ import annotations

from typing import Any

# A text model whose class is not `txt`'s.
SMALL: dict[str, Any] = dict(
    vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=8
)
# What configurations of the hub spell out.
HUB: dict[str, Any] = dict(hidden_act="silu", rms_norm_eps=1e-5, rope_theta=1e4)

# Experts, as Qwen's and DeepSeek's configurations name them.
EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
ROUTED: dict[str, Any] = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SHARED: dict[str, Any] = dict(n_shared_experts=1, first_k_dense_replace=1)
ONE_GROUP: dict[str, Any] = dict(n_group=1, topk_group=1)

MAMBA: dict[str, Any] = dict(mamba_d_conv=4, mamba_d_state=16, mamba_expand=2)
MAMBA2: dict[str, Any] = dict(
    conv_kernel=4, mamba_head_dim=16, mamba_num_heads=8, n_groups=4, ssm_state_size=16
)

# Encoders of images: Qwen's, and those that are like CLIP.
QWEN_VISION: dict[str, Any] = dict(
    depth=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    out_hidden_size=64,
    patch_size=14,
    spatial_merge_size=2,
    temporal_patch_size=2,
)
ENCODER: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
