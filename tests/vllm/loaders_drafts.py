# ruff: noqa: E501
"""Draft models of speculative decoding: heads for several tokens, and Eagle."""

from types import SimpleNamespace

from common_sizes import EXPERTS, MAMBA2, ONE_GROUP, ROUTED, SHARED
from more_loaders import case
from vllm_loaders import _CASES, GDN, MLA, txt


def _draft(config):
    """The model is its own draft: only what a draft's modules ask for."""
    model = config.model_config
    model.hf_config.n_predict = 1
    vars(config)["speculative_config"] = _Draft(
        draft_model_config=model,
        target_model_config=model,
        num_speculative_tokens=1,
        method="mtp",
        draft_parallel_config=config.parallel_config,
        target_parallel_config=config.parallel_config,
    )


class _Draft(SimpleNamespace):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda: False) if name.startswith("use") else None


def _flat(key):
    return key.replace(".mtp_block", "").replace("draft_id_to_target_id", "d2t")


def _mtp(key):
    """Named "mtp." on disk, next to the model that it helps."""
    return (
        key
        if key.startswith("lm_head") or "embed_tokens" in key
        else "mtp." + key.removeprefix("model.")
    )


def _bare(key):
    return _flat(key).removeprefix("model.")


def draft(name, model_type, arch, kw, **more):
    case(name, model_type, arch, kw, change=_draft, unfuse=more.pop("unfuse", _flat), **more)


_DS = txt(**MLA, num_nextn_predict_layers=1, topk_method="noaux_tc", scoring_func="sigmoid")
draft("deepseek_mtp", "deepseek_v3", "DeepSeekMTPModel", _DS)
draft("deepseek_eagle3", "deepseek_v3", "Eagle3DeepseekV2ForCausalLM", _DS, unfuse=_bare)
draft(
    "glm4_moe_mtp",
    "glm4_moe",
    "Glm4MoeMTPModel",
    txt(**ROUTED, **SHARED, **ONE_GROUP, head_dim=8, use_qk_norm=True, num_nextn_predict_layers=1),
)
draft(
    "glm4_moe_lite_mtp",
    "glm4_moe_lite",
    "Glm4MoeLiteMTPModel",
    txt(**MLA, num_nextn_predict_layers=1),
)
draft("mimo_mtp", "qwen2", "MiMoMTPModel", txt(num_nextn_predict_layers=1))
draft("ernie_mtp", "ernie4_5", "ErnieMTPModel", txt(head_dim=8, num_nextn_predict_layers=1))
draft(
    "qwen3_next_mtp",
    "qwen3_next",
    "Qwen3NextMTP",
    txt(
        **EXPERTS,
        head_dim=16,
        num_hidden_layers=4,
        **GDN,
        shared_expert_intermediate_size=64,
        num_nextn_predict_layers=1,
    ),
    unfuse=_mtp,
)
draft(
    "qwen3_5_mtp",
    "qwen3_5_text",
    "Qwen3_5MTP",
    {**_CASES["llama"].kw, **txt(head_dim=16, num_hidden_layers=4, **GDN, mtp_num_hidden_layers=1)},
    unfuse=_mtp,
)
draft(
    "hy_v3_mtp",
    "hy_v3",
    "HYV3MTPModel",
    txt(
        **EXPERTS,
        head_dim=8,
        expert_hidden_dim=32,
        num_shared_experts=1,
        first_k_dense_replace=1,
        route_norm=True,
        qk_norm=True,
        moe_router_enable_expert_bias=True,
        num_nextn_predict_layers=1,
    ),
)
draft(
    "nemotron_h_mtp",
    "nemotron_h",
    "NemotronHMTPModel",
    txt(
        **ROUTED,
        **ONE_GROUP,
        **MAMBA2,
        head_dim=8,
        num_hidden_layers=3,
        layers_block_type=["mamba", "mlp", "attention"],
        mtp_hybrid_override_pattern="*E",
        mtp_layers_block_type=["attention", "moe"],
        moe_shared_expert_intermediate_size=64,
        num_nextn_predict_layers=1,
    ),
    unfuse=_mtp,
)
draft("pangu_mtp", "deepseek_v3", "OpenPanguMTPModel", _DS)
draft("eagle_llama", "llama", "EagleLlamaForCausalLM", txt(), unfuse=_bare)
draft("eagle_mistral", "mistral", "EagleMistralForCausalLM", txt(head_dim=8))
draft(
    "eagle_minicpm",
    "llama",
    "EagleMiniCPMForCausalLM",
    txt(scale_emb=1, dim_model_base=64, scale_depth=1.4, num_experts=0),
)
draft("eagle_cohere", "cohere", "EagleCohereForCausalLM", txt(use_qk_norm=True))
draft(
    "eagle3_llama",
    "llama",
    "Eagle3LlamaForCausalLM",
    txt(draft_vocab_size=160, target_hidden_size=64),
    unfuse=_bare,
)
draft(
    "eagle3_qwen3",
    "qwen3",
    "Eagle3Qwen3ForCausalLM",
    txt(head_dim=8, draft_vocab_size=160, target_hidden_size=64),
    unfuse=_bare,
)
draft(
    "dflash_qwen3",
    "qwen3",
    "DFlashDraftModel",
    txt(
        head_dim=8,
        draft_vocab_size=320,
        target_hidden_size=64,
        dflash_config=dict(mask_token_id=3, target_layer_ids=[0, 1]),
        block_size=4,
    ),
    unfuse=_bare,
)
draft("gemma4_mtp", "gemma4_text", "Gemma4MTPModel", _CASES["gemma3_text"].kw)
