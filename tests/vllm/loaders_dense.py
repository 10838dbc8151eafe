# ruff: noqa: E501
"""Decoders without experts."""

from common_sizes import HUB, SMALL
from more_loaders import case, plain_config
from vllm_loaders import F32, _sub, _telechat2, txt

# ---- of transformers
case("llama_tied", "llama", "LlamaForCausalLM", txt(tie_word_embeddings=True))
case("llama_bias", "llama", "LlamaForCausalLM", txt(attention_bias=True, mlp_bias=True))
case(
    "llama_f32_on_disk",
    "llama",
    "LlamaForCausalLM",
    txt(),
    metas=lambda m, c: {k: (s, F32) for k, (s, d) in m.items()},
)
case("apertus", "apertus", "ApertusForCausalLM", txt())
case("cohere", "cohere", "CohereForCausalLM", txt(tie_word_embeddings=True, use_qk_norm=True))
case(
    "cohere2",
    "cohere2",
    "Cohere2ForCausalLM",
    txt(
        tie_word_embeddings=True,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=32,
    ),
)
case("ernie4_5", "ernie4_5", "Ernie4_5ForCausalLM", txt(head_dim=8, tie_word_embeddings=True))
case(
    "exaone4",
    "exaone4",
    "Exaone4ForCausalLM",
    txt(sliding_window=32, layer_types=["sliding_attention", "full_attention"]),
)
case(
    "falcon_7b",
    "falcon",
    "FalconForCausalLM",
    dict(**SMALL, multi_query=True, new_decoder_architecture=False, parallel_attn=True, bias=False),
)
case(
    "falcon_rw",
    "falcon",
    "FalconForCausalLM",
    dict(
        **SMALL,
        multi_query=False,
        new_decoder_architecture=False,
        parallel_attn=False,
        bias=True,
        alibi=True,
    ),
)
case("gemma", "gemma", "GemmaForCausalLM", txt(head_dim=8, tie_word_embeddings=True))
case("gemma2", "gemma2", "Gemma2ForCausalLM", txt(head_dim=8, tie_word_embeddings=True))
case(
    "gemma3n",
    "gemma3n_text",
    "Gemma3nForCausalLM",
    txt(
        head_dim=8,
        tie_word_embeddings=True,
        num_hidden_layers=4,
        intermediate_size=[128] * 4,
        vocab_size_per_layer_input=320,
        hidden_size_per_layer_input=16,
        altup_num_inputs=4,
        num_kv_shared_layers=2,
        laurel_rank=8,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
)
case(
    "gemma4",
    "gemma4_text",
    "Gemma4ForCausalLM",
    txt(
        head_dim=8,
        global_head_dim=16,
        tie_word_embeddings=True,
        num_hidden_layers=4,
        vocab_size_per_layer_input=320,
        hidden_size_per_layer_input=16,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
)
case(
    "gemma4_k_is_v",
    "gemma4_text",
    "Gemma4ForCausalLM",
    txt(
        head_dim=8,
        global_head_dim=16,
        tie_word_embeddings=True,
        num_hidden_layers=4,
        vocab_size_per_layer_input=320,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
)
case("glm", "glm", "GlmForCausalLM", txt(head_dim=8))
case("glm4", "glm4", "Glm4ForCausalLM", txt(head_dim=8))
case(
    "gptj",
    "gptj",
    "GPTJForCausalLM",
    dict(
        vocab_size=320,
        n_embd=64,
        n_layer=2,
        n_head=8,
        n_positions=128,
        rotary_dim=4,
        tie_word_embeddings=False,
    ),
)
case("gpt_neox", "gpt_neox", "GPTNeoXForCausalLM", txt())
case(
    "gpt_bigcode",
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    dict(
        vocab_size=320,
        n_embd=64,
        n_layer=2,
        n_head=8,
        n_positions=128,
        n_inner=128,
        multi_query=True,
    ),
)
case("granite", "granite", "GraniteForCausalLM", txt())
case("hyperclovax", "hyperclovax", "HyperCLOVAXForCausalLM", txt())
case("hrm_text", "hrm_text", "HrmTextForCausalLM", txt(head_dim=8))
case("jais2", "jais2", "Jais2ForCausalLM", txt())
case(
    "minicpm3",
    "minicpm3",
    "MiniCPM3ForCausalLM",
    txt(
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        num_key_value_heads=8,
        scale_emb=1,
        dim_model_base=64,
        scale_depth=1.4,
    ),
)
case("mistral", "mistral", "MistralForCausalLM", txt(head_dim=8))
case("ministral3", "ministral3", "Ministral3ForCausalLM", txt(head_dim=8))
case("nemotron", "nemotron", "NemotronForCausalLM", txt())
case("olmo", "olmo", "OlmoForCausalLM", txt())
case("olmo2", "olmo2", "Olmo2ForCausalLM", txt())
case("olmo3", "olmo3", "Olmo3ForCausalLM", txt())
case(
    "opt",
    "opt",
    "OPTForCausalLM",
    dict(**SMALL, ffn_dim=128, max_position_embeddings=128, word_embed_proj_dim=64),
)
case(
    "opt_projected",
    "opt",
    "OPTForCausalLM",
    dict(
        **SMALL,
        ffn_dim=128,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        do_layer_norm_before=False,
    ),
)
case("phi", "phi", "PhiForCausalLM", txt())
case("phi3", "phi3", "Phi3ForCausalLM", txt())
case("qwen2", "qwen2", "Qwen2ForCausalLM", txt())
case("qwen3", "qwen3", "Qwen3ForCausalLM", txt(head_dim=8))
case("seed_oss", "seed_oss", "SeedOssForCausalLM", txt(head_dim=8))
case("smollm3", "smollm3", "SmolLM3ForCausalLM", txt())
case(
    "stablelm", "stablelm", "StableLmForCausalLM", txt(use_qkv_bias=True, partial_rotary_factor=0.5)
)
case("starcoder2", "starcoder2", "Starcoder2ForCausalLM", txt())
case("vaultgemma", "vaultgemma", "VaultGemmaForCausalLM", txt(head_dim=8, tie_word_embeddings=True))
case("arcee", "arcee", "ArceeForCausalLM", txt())
case("cwm", "cwm", "CwmForCausalLM", txt(head_dim=8))
case("hunyuan_dense", "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", txt(head_dim=8))
case("laguna", "laguna", "LagunaForCausalLM", txt(head_dim=8))
case("llama_transformers", "llama", "TransformersForCausalLM", txt())
case(
    "gemma3_transformers",
    "gemma3_text",
    "TransformersForCausalLM",
    txt(head_dim=8, tie_word_embeddings=True),
)
case(
    "telechat2",
    "telechat2",
    "TeleChat2ForCausalLM",
    dict(
        vocab_size=320,
        hidden_size=64,
        n_layer=2,
        n_head=8,
        ffn_hidden_size=128,
        num_key_value_heads=8,
        layer_norm_epsilon=1e-5,
        hidden_dropout=0.0,
        tie_word_embeddings=False,
        max_position_embeddings=128,
    ),
    make_config=plain_config("telechat2"),
    unfuse=lambda k: k,
    metas=_telechat2,
)


def _consolidated(metas, config):
    """Mistral's own names and the order of rows for rope of its own."""
    names = {
        "self_attn": "attention",
        "mlp": "feed_forward",
        "q_proj": "wq",
        "k_proj": "wk",
        "v_proj": "wv",
        "o_proj": "wo",
        "gate_proj": "w1",
        "down_proj": "w2",
        "up_proj": "w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }

    def rename(key):
        key = key.removeprefix("model.")
        key = key.replace("embed_tokens", "tok_embeddings").replace("lm_head", "output")
        return ".".join(names.get(part, part) for part in key.split("."))

    return _sub(metas, rename)


case("mistral_consolidated", "mistral", "MistralForCausalLM", txt(head_dim=8), metas=_consolidated)


# ---- of the hub
def _same(key):
    return key


def _hub(name, arch, kw, **more):
    case(
        name,
        name,
        arch,
        kw,
        make_config=plain_config(name),
        unfuse=more.pop("unfuse", _same),
        **more,
    )


def _minicpm_experts(metas, config):
    out = {}
    for key, (shape, dtype) in metas.items():
        if key.endswith(("mlp.ws", "mlp.w2s")):
            for expert in range(config.num_experts):
                at = key.rsplit(".", 1)[0] + f".experts.{expert}."
                if key.endswith("w2s"):
                    out[at + "w2.weight"] = shape[1:], dtype
                else:
                    half = (shape[1] // 2, shape[2])
                    out[at + "w1.weight"] = out[at + "w3.weight"] = half, dtype
        else:
            out[key] = shape, dtype
    return out


_hub(
    "internlm2",
    "InternLM2ForCausalLM",
    txt(**HUB, bias=False),
)
_hub("orion", "OrionForCausalLM", txt(**HUB))
_hub(
    "minicpm",
    "MiniCPMForCausalLM",
    txt(**HUB, scale_emb=1, dim_model_base=64, scale_depth=1.4, num_experts=0),
)
_hub(
    "minicpm_moe",
    "MiniCPMForCausalLM",
    txt(
        **HUB, scale_emb=1, dim_model_base=64, scale_depth=1.4, num_experts=4, num_experts_per_tok=2
    ),
    metas=_minicpm_experts,
)
_hub(
    "solar",
    "SolarForCausalLM",
    txt(**HUB, bskcn_1=[1], bskcn_2=[1], bskcn_3=[1], bskcn_4=[1], bskcn_tv=[0.5, 0.5]),
)
_hub(
    "exaone",
    "ExaoneForCausalLM",
    dict(
        **SMALL,
        intermediate_size=128,
        num_layers=2,
        attention_dropout=0.0,
        num_key_value_heads=4,
        activation_function="silu",
        layer_norm_epsilon=1e-5,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        rope_theta=1e4,
    ),
)
_hub(
    "mimo",
    "MiMoForCausalLM",
    txt(**HUB, num_nextn_predict_layers=1),
)
_hub(
    "plamo3",
    "Plamo3ForCausalLM",
    txt(
        head_dim=8,
        rms_norm_eps=1e-5,
        window_size=32,
        sliding_window=32,
        sliding_window_pattern=2,
        rope_theta=1e4,
        rope_local_theta=1e4,
        interleaved_sliding_window=[32, None],
        layer_types=["sliding_attention", "full_attention"],
    ),
)
_hub(
    "teleflm",
    "TeleFLMForCausalLM",
    txt(**HUB, use_mup=True, mup_scale_factor=2.0, output_mult=1.0, input_mult=1.0),
)
_hub(
    "iquest_loopcoder",
    "IQuestLoopCoderForCausalLM",
    txt(**HUB, head_dim=8, loop_num=2, loop_window_size=32),
)
_hub(
    "pangu",
    "PanguEmbeddedForCausalLM",
    txt(**HUB, bias=True),
)


def _of_vllm(name):
    def make(**kw):
        from vllm.transformers_utils import configs

        return getattr(configs, name)(**kw)

    return make


case(
    "chatglm",
    "chatglm",
    "ChatGLMModel",
    dict(
        padded_vocab_size=320,
        hidden_size=64,
        ffn_hidden_size=128,
        num_layers=2,
        num_attention_heads=8,
        kv_channels=8,
        multi_query_attention=True,
        multi_query_group_num=4,
        seq_length=128,
        add_qkv_bias=True,
        rmsnorm=True,
        post_layer_norm=True,
        original_rope=True,
        tie_word_embeddings=False,
        rope_ratio=1.0,
    ),
    unfuse=_same,
    make_config=_of_vllm("ChatGLMConfig"),
)
case(
    "dory",
    "dory",
    "DoryForCausalLM",
    txt(head_dim=8),
    unfuse=_same,
    tp=(1,),
    make_config=_of_vllm("DoryConfig"),
)
