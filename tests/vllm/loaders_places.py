# ruff: noqa: E501
"""Where a rank stands: stages of a pipeline, redundant experts, LoRA's room in the vocabulary."""

from common_sizes import EXPERTS, ONE_GROUP, ROUTED, SHARED
from more_loaders import case
from vllm_loaders import _CASES, GDN, _ds3, txt

MOE = txt(head_dim=8, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2)
for _stage in (0, 1):
    case(
        f"llama_stage{_stage}",
        "llama",
        "LlamaForCausalLM",
        txt(num_hidden_layers=4),
        pipeline=(_stage, 2),
    )
    case(
        f"qwen2_tied_stage{_stage}",
        "qwen2",
        "Qwen2ForCausalLM",
        txt(tie_word_embeddings=True),
        pipeline=(_stage, 2),
    )
    case(f"gpt2_stage{_stage}", "gpt2", "GPT2LMHeadModel", _CASES["gpt2"].kw, pipeline=(_stage, 2))
    case(f"qwen3_moe_stage{_stage}", "qwen3_moe", "Qwen3MoeForCausalLM", MOE, pipeline=(_stage, 2))
    case(
        f"deepseek_v3_stage{_stage}",
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _CASES["deepseek_v3"].kw,
        metas=_ds3,
        pipeline=(_stage, 2),
    )
    case(
        f"gpt_oss_stage{_stage}",
        "gpt_oss",
        "GptOssForCausalLM",
        _CASES["gpt_oss"].kw,
        pipeline=(_stage, 2),
    )
    case(
        f"llama4_mm_stage{_stage}",
        "llama4",
        "Llama4ForConditionalGeneration",
        _CASES["llama4_mm"].kw,
        auto="Llama4ForConditionalGeneration",
        pipeline=(_stage, 2),
    )
    case(
        f"qwen2_vl_stage{_stage}",
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        _CASES["qwen2_vl"].kw,
        auto="Qwen2VLForConditionalGeneration",
        pipeline=(_stage, 2),
    )
    case(
        f"gemma3_stage{_stage}",
        "gemma3_text",
        "Gemma3ForCausalLM",
        _CASES["gemma3_text"].kw,
        pipeline=(_stage, 2),
    )
    case(
        f"llama_transformers_stage{_stage}",
        "llama",
        "TransformersForCausalLM",
        txt(),
        pipeline=(_stage, 2),
    )
    case(
        f"qwen3_next_stage{_stage}",
        "qwen3_next",
        "Qwen3NextForCausalLM",
        txt(**EXPERTS, head_dim=16, num_hidden_layers=4, **GDN, shared_expert_intermediate_size=64),
        pipeline=(_stage, 2),
    )


def _redundant(config):
    config.parallel_config.enable_eplb = True
    config.parallel_config.eplb_config.num_redundant_experts = 4


case("qwen3_moe_eplb", "qwen3_moe", "Qwen3MoeForCausalLM", MOE, ep=True, change=_redundant)
case(
    "deepseek_v3_eplb",
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _CASES["deepseek_v3"].kw,
    metas=_ds3,
    ep=True,
    change=_redundant,
)
case(
    "mixtral_eplb",
    "mixtral",
    "MixtralForCausalLM",
    txt(num_local_experts=4, num_experts_per_tok=2),
    ep=True,
    change=_redundant,
)
case(
    "glm4_moe_eplb",
    "glm4_moe",
    "Glm4MoeForCausalLM",
    txt(**ROUTED, **SHARED, **ONE_GROUP, head_dim=8, use_qk_norm=True),
    ep=True,
    change=_redundant,
)


def _round_robin(config):
    config.parallel_config.expert_placement_strategy = "round_robin"


case("qwen3_moe_round_robin", "qwen3_moe", "Qwen3MoeForCausalLM", MOE, ep=True, change=_round_robin)
case(
    "llama4_mm_ep",
    "llama4",
    "Llama4ForConditionalGeneration",
    _CASES["llama4_mm"].kw,
    auto="Llama4ForConditionalGeneration",
    ep=True,
)
case(
    "gpt_oss_mxfp4_ep",
    "gpt_oss",
    "GptOssForCausalLM",
    _CASES["gpt_oss_mxfp4"].kw,
    metas=_CASES["gpt_oss_mxfp4"].metas,
    ep=True,
)
case(
    "llama4_mm_modelopt_ep",
    "llama4",
    "Llama4ForConditionalGeneration",
    _CASES["llama4_mm_modelopt"].kw,
    auto="Llama4ForConditionalGeneration",
    metas=_CASES["llama4_mm_modelopt"].metas,
    ep=True,
)


def _lora(config):
    from vllm.config import LoRAConfig

    config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=2)


case("llama_lora", "llama", "LlamaForCausalLM", txt(vocab_size=321), change=_lora)


def _data_parallel_vision(config):
    config.model_config.multimodal_config.mm_encoder_tp_mode = "data"


case(
    "qwen2_vl_vision_replicated",
    "qwen2_vl",
    "Qwen2VLForConditionalGeneration",
    _CASES["qwen2_vl"].kw,
    auto="Qwen2VLForConditionalGeneration",
    change=_data_parallel_vision,
)
