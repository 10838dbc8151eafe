# ruff: noqa: E501
"""Checkpoints stored quantised, and what is quantised when it is loaded."""

import torch
from common_sizes import ONE_GROUP
from more_loaders import case
from vllm_loaders import (
    _CT,
    _Q,
    F32,
    FP8,
    MLA,
    _fp8_block,
    _fp8_tensor,
    _int4,
    _is_lin,
    txt,
)


def _same(key):
    return key


_MOE = dict(
    hidden_size=256,
    intermediate_size=512,
    head_dim=32,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
)
DENSE = ("llama", "LlamaForCausalLM")
EXPERTS = ("qwen3_moe", "Qwen3MoeForCausalLM")


def _wna16(config):
    """A choice of the user's, which vLLM's own check of this machine would refuse."""
    from more_loaders import _Claims
    from vllm.model_executor.layers.quantization import moe_wna16
    from vllm.platforms.interface import DeviceCapability

    class Capable(_Claims):
        def get_device_capability(self):
            return DeviceCapability(9, 0)

    moe_wna16.current_platform = Capable(moe_wna16.current_platform)
    stored = dict(config.model_config.hf_config.quantization_config)
    config.quant_config = moe_wna16.MoeWNA16Config.from_config(stored)


def quantised(name, config, sizes=_Q, of=DENSE, **more):
    case(name, *of, txt(**sizes, quantization_config=config), **more)


quantised(
    "llama_fp8_tensor", dict(quant_method="fp8", activation_scheme="static"), metas=_fp8_tensor
)
quantised("llama_fp8_dynamic", dict(quant_method="fp8", activation_scheme="dynamic"), unfuse=_same)
quantised(
    "qwen3_moe_fp8_tensor",
    dict(quant_method="fp8", activation_scheme="static"),
    _MOE,
    EXPERTS,
    unfuse=_same,
)
quantised(
    "qwen3_moe_fp8_block",
    dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[32, 32]),
    _MOE,
    EXPERTS,
    metas=_fp8_block,
)
quantised(
    "llama_awq",
    dict(quant_method="awq", bits=4, group_size=32, zero_point=True),
    metas=_int4("awq"),
    dtype=torch.float16,
)
quantised(
    "qwen3_moe_awq",
    dict(quant_method="awq", bits=4, group_size=32, zero_point=True),
    _MOE,
    EXPERTS,
    unfuse=_same,
    dtype=torch.float16,
)
quantised(
    "qwen3_moe_gptq",
    dict(quant_method="gptq", bits=4, group_size=32, desc_act=False, sym=True),
    _MOE,
    EXPERTS,
    unfuse=_same,
    dtype=torch.float16,
)
quantised(
    "qwen3_moe_wna16_awq",
    dict(
        quant_method="awq", bits=4, group_size=32, zero_point=True, modules_to_not_convert=["gate"]
    ),
    _MOE,
    EXPERTS,
    metas=_int4("awq"),
    dtype=torch.float16,
    change=_wna16,
)
quantised(
    "qwen3_moe_wna16_gptq",
    dict(
        quant_method="gptq",
        bits=4,
        group_size=32,
        desc_act=False,
        sym=True,
        modules_to_not_convert=["gate"],
        dynamic={"-:.*mlp.gate$": {}},
    ),
    _MOE,
    EXPERTS,
    metas=_int4("gptq"),
    dtype=torch.float16,
    change=_wna16,
)


def _ct(weights, activations=None, form="pack-quantized", **more):
    group = dict(targets=["Linear"], weights=weights)
    if activations:
        group["input_activations"] = activations
    return dict(
        quant_method="compressed-tensors",
        format=form,
        ignore=["lm_head", "re:.*mlp.gate$"],
        config_groups=dict(group_0=group),
        **more,
    )


def _bits(bits, kind, strategy, dynamic=False, **more):
    return dict(
        num_bits=bits, type=kind, strategy=strategy, symmetric=True, dynamic=dynamic, **more
    )


_W4 = _bits(4, "int", "group", group_size=32)
quantised("llama_ct_w4a16", _ct(_W4), unfuse=_same)
quantised("llama_ct_w4a16_asym", _ct({**_W4, "symmetric": False}), unfuse=_same)
quantised("llama_ct_w8a16", _ct(_bits(8, "int", "channel")), unfuse=_same)
quantised(
    "llama_ct_int8",
    _ct(_bits(8, "int", "channel"), _bits(8, "int", "token", True), "int-quantized"),
    unfuse=_same,
)
quantised(
    "llama_ct_int8_static",
    _ct(_bits(8, "int", "tensor"), _bits(8, "int", "tensor"), "int-quantized"),
    unfuse=_same,
)
quantised("llama_ct_fp8", _CT, unfuse=_same)
quantised(
    "llama_ct_fp8_channel",
    _ct(_bits(8, "float", "channel"), _bits(8, "float", "token", True), "float-quantized"),
    unfuse=_same,
)
quantised(
    "llama_ct_fp8_block",
    _ct(
        _bits(8, "float", "block", block_structure=[32, 32]),
        _bits(8, "float", "group", True, group_size=32),
        "float-quantized",
    ),
    unfuse=_same,
)
quantised("llama_ct_fp8_kv", dict(_CT, kv_cache_scheme=_bits(8, "float", "tensor")), unfuse=_same)


def _scales_of_heads(metas, config):
    """As LLM Compressor stores them."""
    heads = {"q_scale": config.num_attention_heads}
    out = {}
    for key, (shape, dtype) in metas.items():
        if ".attn." in key:
            count = heads.get(key.rsplit(".", 1)[1], config.num_key_value_heads)
            shape = (count, 1, 1)
        out[key] = (shape, dtype)
    return out


quantised(
    "llama_ct_fp8_kv_heads",
    dict(_CT, kv_cache_scheme=_bits(8, "float", "attn_head")),
    unfuse=_same,
    metas=_scales_of_heads,
)
_FP4 = _bits(4, "float", "tensor_group", group_size=16)
quantised(
    "llama_ct_nvfp4", _ct(_FP4, {**_FP4, "dynamic": "local"}, "nvfp4-pack-quantized"), unfuse=_same
)
quantised("llama_ct_nvfp4a16", _ct(_FP4, None, "nvfp4-pack-quantized"), unfuse=_same)
quantised(
    "llama_ct_mxfp4",
    _ct(_bits(4, "float", "group", group_size=32), None, "mxfp4-pack-quantized"),
    unfuse=_same,
)
quantised("qwen3_moe_ct_w4a16", _ct(_W4), _MOE, EXPERTS, unfuse=_same)
quantised("qwen3_moe_ct_w4a16_ep", _ct(_W4), _MOE, EXPERTS, unfuse=_same, ep=True)
quantised(
    "qwen3_moe_ct_int8",
    _ct(_bits(8, "int", "channel"), _bits(8, "int", "token", True), "int-quantized"),
    _MOE,
    EXPERTS,
    unfuse=_same,
)
quantised(
    "qwen3_moe_ct_fp8_channel",
    _ct(_bits(8, "float", "channel"), _bits(8, "float", "token", True), "float-quantized"),
    _MOE,
    EXPERTS,
    unfuse=_same,
)
quantised(
    "qwen3_moe_ct_fp8_block",
    _ct(
        _bits(8, "float", "block", block_structure=[32, 32]),
        _bits(8, "float", "group", True, group_size=32),
        "float-quantized",
    ),
    _MOE,
    EXPERTS,
    unfuse=_same,
)
quantised(
    "qwen3_moe_ct_nvfp4",
    _ct(_FP4, {**_FP4, "dynamic": "local"}, "nvfp4-pack-quantized"),
    _MOE,
    EXPERTS,
    unfuse=_same,
)
quantised(
    "qwen3_moe_ct_mxfp4",
    _ct(_bits(4, "float", "group", group_size=32), None, "mxfp4-pack-quantized"),
    _MOE,
    EXPERTS,
    unfuse=_same,
)


def _modelopt(algo, **more):
    return dict(
        quant_method="modelopt", quant_algo=algo, exclude_modules=["lm_head", "*mlp.gate"], **more
    )


for _algo, _short in (
    ("FP8", "fp8"),
    ("FP8_PER_CHANNEL_PER_TOKEN", "fp8_pc_pt"),
    ("NVFP4", "nvfp4"),
    ("MXFP8", "mxfp8"),
    ("W4A16_NVFP4", "nvfp4_a16"),
):
    quantised(f"llama_modelopt_{_short}", _modelopt(_algo, group_size=16), unfuse=_same)
    quantised(
        f"qwen3_moe_modelopt_{_short}", _modelopt(_algo, group_size=16), _MOE, EXPERTS, unfuse=_same
    )
quantised("llama_modelopt_fp8_kv", _modelopt("FP8", kv_cache_quant_algo="FP8"), unfuse=_same)
quantised("qwen3_moe_modelopt_fp8_ep", _modelopt("FP8"), _MOE, EXPERTS, unfuse=_same, ep=True)
quantised(
    "qwen3_moe_modelopt_nvfp4_ep",
    _modelopt("NVFP4", group_size=16),
    _MOE,
    EXPERTS,
    unfuse=_same,
    ep=True,
)


def _quark(weight, inputs=None, **more):
    one = dict(weight=weight, input_tensors=inputs, output_tensors=None, bias=None)
    return dict(
        quant_method="quark",
        global_quant_config=one,
        layer_quant_config={},
        layer_type_quant_config={},
        exclude=["lm_head", "re:.*mlp.gate$"],
        export=dict(kv_cache_group=[], pack_method="order", weight_format="real_quantized"),
        **more,
    )


def _qspec(dtype, scheme, dynamic=False, **more):
    return dict(dtype=dtype, qscheme=scheme, is_dynamic=dynamic, symmetric=True, ch_axis=0, **more)


quantised(
    "llama_quark_fp8",
    _quark(_qspec("fp8_e4m3", "per_tensor"), _qspec("fp8_e4m3", "per_tensor")),
    unfuse=_same,
)
quantised(
    "llama_quark_int8",
    _quark(_qspec("int8", "per_tensor"), _qspec("int8", "per_tensor")),
    unfuse=_same,
)
quantised(
    "qwen3_moe_quark_fp8",
    _quark(_qspec("fp8_e4m3", "per_tensor"), _qspec("fp8_e4m3", "per_tensor")),
    _MOE,
    EXPERTS,
    unfuse=_same,
)
_MX = _qspec("fp4", "per_group", group_size=32, scale_format="e8m0")
quantised("llama_quark_mxfp4", _quark(_MX, {**_MX, "is_dynamic": True}), unfuse=_same)
quantised(
    "qwen3_moe_quark_mxfp4", _quark(_MX, {**_MX, "is_dynamic": True}), _MOE, EXPERTS, unfuse=_same
)
quantised(
    "llama_mxfp8",
    dict(
        quant_method="fp8",
        activation_scheme="dynamic",
        store_dtype="mxfp8",
        weight_block_size=[1, 32],
    ),
    unfuse=_same,
)
case(
    "llama_online_int8",
    *DENSE,
    txt(**_Q),
    model_kw=dict(quantization="int8_per_channel_weight_only"),
)


def _indexer_fp8(metas, config):
    """The indexer's key projection in FP8 with block scales, the rest of it not."""
    out = {}
    for key, (shape, dtype) in metas.items():
        quantise = key.endswith("indexer.wk.weight") or _is_lin(key)
        out[key] = (shape, FP8 if quantise else dtype)
        if quantise:
            out[key + "_scale_inv"] = (tuple(-(-n // 32) for n in shape), F32)
    return out


_V32 = txt(
    **{
        **MLA,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "moe_intermediate_size": 128,
        "hidden_size": 128,
        "intermediate_size": 256,
    },
    index_n_heads=4,
    index_head_dim=32,
    index_topk=16,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    quantization_config=dict(
        quant_method="fp8", activation_scheme="dynamic", weight_block_size=[32, 32]
    ),
)
case("deepseek_v32_fp8", "deepseek_v32", "DeepseekV32ForCausalLM", _V32, metas=_indexer_fp8)
case("glm_moe_dsa_fp8", "glm_moe_dsa", "GlmMoeDsaForCausalLM", _V32, metas=_indexer_fp8)


def _fused_qkv_fp8(metas, config):
    out = {}
    for key, (shape, dtype) in metas.items():
        if ".self_attn." in key and key.endswith(
            (".q_proj.weight", ".k_proj.weight", ".v_proj.weight")
        ):
            fused = key.rsplit(".", 2)[0] + ".qkv_proj.weight"
            rows = out.get(fused, ((0,), None))[0][0] + shape[0]
            out[fused] = ((rows, shape[1]), FP8)
            blocks = config.num_key_value_heads * -(-rows // config.num_key_value_heads // 128)
            out[fused + "_scale_inv"] = ((blocks, -(-shape[1] // 128)), F32)
        elif _is_lin(key):
            out[key] = (shape, FP8)
            out[key + "_scale_inv"] = (tuple(-(-n // 128) for n in shape), F32)
        else:
            out[key] = (shape, dtype)
    return out


case(
    "mimo_v2_flash_fp8",
    "mimo_v2_flash",
    "MiMoV2FlashForCausalLM",
    txt(
        **ONE_GROUP,
        hidden_size=256,
        intermediate_size=512,
        head_dim=128,
        v_head_dim=64,
        swa_head_dim=128,
        swa_v_head_dim=64,
        swa_num_attention_heads=8,
        swa_num_key_value_heads=4,
        moe_intermediate_size=512,
        n_routed_experts=4,
        num_experts_per_tok=2,
        hybrid_layer_pattern=[0, 0],
        moe_layer_freq=[0, 1],
        layer_types=["full_attention", "full_attention"],
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
        quantization_config=dict(
            quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128]
        ),
    ),
    metas=_fused_qkv_fp8,
)
