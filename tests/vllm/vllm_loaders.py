# ruff: noqa
# fmt: off
# Kept line for line as first written, so that versions can be compared.
"""Real vLLM 0.33.0 model loaders on a machine without a GPU, as cases to plan.

Each case is one architecture with a tiny config. ``build`` makes vLLM's own
model on CPU (or meta) as one tensor-parallel rank of ``tp_size``; checkpoint
names, shapes and dtypes come from the transformers class of the same config on
the meta device, turned back into on-disk names. Nothing is downloaded.

    cases() -> list of names
    build(name, tp_rank=0, tp_size=1) -> (model, {ckpt name: (shape, dtype)})
    weights(name, metas, seed) -> iterator of (ckpt name, random tensor)
    reference(name, seed, tp_rank=0, tp_size=1) -> {param name: tensor} after a load
    python vllm_loaders.py --check [--tp 1 4] [--only NAME ...] [-v]

TP is simulated: one gloo process of world size 1, whose TP group is told it is
rank ``tp_rank`` of ``tp_size``. No collective runs while a model is made or loaded.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TORCH_LOGS", "-all")

import argparse
import contextlib
import copy
import functools
import gc
import hashlib
import logging
import re
import socket
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

logging.disable(logging.WARNING)

import torch  # noqa: E402

_TMP = tempfile.TemporaryDirectory(prefix="vllm_cases_")  # config.json files, gone at exit
os.environ.setdefault("VLLM_CACHE_ROOT", _TMP.name)

Meta = tuple[tuple[int, ...], torch.dtype]
BF16, F32 = torch.bfloat16, torch.float32
FP8 = torch.float8_e4m3fn


# --------------------------------------------------------------------------- cases


@dataclass
class Case:
    model_type: str
    arch: str
    kw: dict
    auto: str = "AutoModelForCausalLM"  # transformers class that names the checkpoint
    big: dict = field(default_factory=dict)  # overrides for the large config
    dtype: torch.dtype = BF16
    metas: Callable | None = None  # (metas, config) -> metas: what the disk really holds
    make_config: Callable | None = None  # () -> config, where AutoConfig has none
    model_kw: dict = field(default_factory=dict)  # for vLLM's ModelConfig
    tp: tuple[int, ...] = (1, 4)  # TP sizes this config supports
    ep: bool = False  # experts are spread over the TP ranks
    fixed: dict = field(default_factory=dict)  # name suffix -> value its tensors hold
    note: str = ""


_CASES: dict[str, Case] = {}


def _case(name: str, *a, **kw) -> None:
    _CASES[name] = Case(*a, **kw)


def _sub(metas: dict[str, Meta], fn) -> dict[str, Meta]:
    return {fn(k): v for k, v in metas.items()}


def _recast(metas: dict[str, Meta], ends: tuple[str, ...], dtype) -> dict[str, Meta]:
    return {k: (s, dtype if k.endswith(ends) else d) for k, (s, d) in metas.items()}


TXT = dict(
    vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=128,
    tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)


def txt(**kw) -> dict:
    return {**copy.deepcopy(TXT), **kw}


# ---- dense decoders
_case("llama", "llama", "LlamaForCausalLM", txt(),
      big=dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336,
               num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8))
_case("llama_gqa_replicated", "llama", "LlamaForCausalLM",
      txt(num_key_value_heads=2), note="kv heads < tp: k/v shards shared by ranks")
_case("llama_padded_vocab", "llama", "LlamaForCausalLM", txt(vocab_size=321),
      note="vocab not a multiple of 64*tp: padded rows are zeroed")
_case("qwen2_tied", "qwen2", "Qwen2ForCausalLM", txt(tie_word_embeddings=True),
      metas=lambda m, c: {**m, "lm_head.weight": m["model.embed_tokens.weight"]},
      note="tied, and the checkpoint has lm_head too")
_case("gemma3_text", "gemma3_text", "Gemma3ForCausalLM",
      txt(head_dim=8, tie_word_embeddings=True))
_case("gpt2", "gpt2", "GPT2LMHeadModel",
      dict(vocab_size=320, n_embd=64, n_layer=2, n_head=8, n_positions=128, n_inner=128),
      note="Conv1D weights are transposed by the loader")
_case("bloom", "bloom", "BloomForCausalLM",
      dict(vocab_size=320, hidden_size=64, n_layer=2, n_head=8),
      note="qkv interleaved by head on disk")
_case("falcon_gqa", "falcon", "FalconForCausalLM",
      dict(vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=8,
           num_kv_heads=4, new_decoder_architecture=True, bias=False),
      note="qkv interleaved by kv group on disk")

# ---- mixture of experts
_case("mixtral", "mixtral", "MixtralForCausalLM",
      txt(num_local_experts=4, num_experts_per_tok=2),
      big=dict(vocab_size=32000, hidden_size=4096, intermediate_size=14336,
               num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
               num_local_experts=8))
_case("qwen3_moe", "qwen3_moe", "Qwen3MoeForCausalLM",
      txt(head_dim=8, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2),
      big=dict(vocab_size=151936, hidden_size=2048, intermediate_size=6144,
               moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
               num_key_value_heads=4, head_dim=128, num_experts=128,
               num_experts_per_tok=8))
MLA = dict(kv_lora_rank=32, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8,
           v_head_dim=16, num_key_value_heads=8, n_routed_experts=4,
           num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=32,
           first_k_dense_replace=1, n_group=2, topk_group=1, num_hidden_layers=3)


def _nested_tower(metas, config):
    """Hub checkpoints keep the vision model one level down."""
    return _sub(metas, lambda k: re.sub(
        r"^((?:model\.)?vision_tower\.)(?!vision_model)", r"\1vision_model.", k))


def _experts_in_out(metas, config):
    """Fused experts are stored (expert, in, out) on the hub."""
    ends = ("experts.gate_up_proj", "experts.down_proj")
    return {k: ((s[0], s[2], s[1]), d) if k.endswith(ends) else (s, d)
            for k, (s, d) in metas.items()}


def _ds3(metas, config):
    metas = _recast(metas, ("e_score_correction_bias",), F32)
    last = f"model.layers.{config.num_hidden_layers - 1}."
    mtp = f"model.layers.{config.num_hidden_layers}."
    extra = {mtp + k[len(last):]: v for k, v in metas.items() if k.startswith(last)}
    h = config.hidden_size
    extra |= {mtp + "eh_proj.weight": ((h, 2 * h), BF16), mtp + "enorm.weight": ((h,), BF16),
              mtp + "hnorm.weight": ((h,), BF16)}
    return {**metas, **extra}


_case("deepseek_v3", "deepseek_v3", "DeepseekV3ForCausalLM",
      txt(**MLA, num_nextn_predict_layers=1, topk_method="noaux_tc",
          scoring_func="sigmoid"), metas=_ds3,
      big=dict(vocab_size=129280, hidden_size=7168, intermediate_size=18432,
               moe_intermediate_size=2048, num_hidden_layers=61,
               num_attention_heads=128, num_key_value_heads=128, kv_lora_rank=512,
               q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
               v_head_dim=128, n_routed_experts=256, num_experts_per_tok=8,
               first_k_dense_replace=3, n_group=8, topk_group=4,
               max_position_embeddings=4096),
      note="MLA, fused q_a/kv_a, MTP layer in the checkpoint is skipped")
_case("gpt_oss", "gpt_oss", "GptOssForCausalLM",
      txt(head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=32,
          rope_scaling=None, layer_types=["sliding_attention", "full_attention"]),
      note="3-D fused experts with biases on disk, sinks; unquantised bf16")
_case("llama4", "llama4_text", "Llama4ForCausalLM",
      txt(head_dim=8, intermediate_size_mlp=128, num_local_experts=4,
          num_experts_per_tok=1, interleave_moe_layer_step=1),
      note="experts fused and transposed on disk; q/k permuted for rope")

# ---- state space and hybrids
SSM = dict(mamba_d_state=16, mamba_d_conv=4, mamba_expand=2)
_case("mamba", "mamba", "MambaForCausalLM",
      dict(vocab_size=320, hidden_size=64, state_size=16, num_hidden_layers=2,
           conv_kernel=4, expand=2, time_step_rank=8, tie_word_embeddings=False),
      note="A = -exp(A_log) in the loader; conv1d")
_case("mamba2", "mamba2", "Mamba2ForCausalLM",
      dict(vocab_size=320, hidden_size=64, state_size=16, num_hidden_layers=2,
           conv_kernel=4, expand=2, num_heads=8, head_dim=16, n_groups=4,
           tie_word_embeddings=False), note="in_proj sharded by section")

# ---- vision-language, audio, encoders
_VQ2 = dict(depth=2, embed_dim=64, hidden_size=64, num_heads=4, mlp_ratio=2,
            in_channels=3, patch_size=14, spatial_merge_size=2, temporal_patch_size=2)
_case("qwen2_vl", "qwen2_vl", "Qwen2VLForConditionalGeneration",
      dict(text_config=txt(rope_scaling=dict(type="mrope", mrope_section=[1, 1, 2]),
                           rope_parameters=dict(rope_type="default", rope_theta=1e4,
                                                mrope_section=[1, 1, 2])),
           vision_config=_VQ2, image_token_id=300, video_token_id=301,
           vision_start_token_id=302, vision_end_token_id=303, tie_word_embeddings=False),
      auto="Qwen2VLForConditionalGeneration")
_case("whisper", "whisper", "WhisperForConditionalGeneration",
      dict(vocab_size=320, d_model=64, encoder_layers=2, decoder_layers=2,
           encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=128,
           decoder_ffn_dim=128, num_mel_bins=16, max_source_positions=32,
           max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
           decoder_start_token_id=1),
      auto="WhisperForConditionalGeneration",
      note="k_proj has no bias: the loader makes zeros for it")
_case("bert", "bert", "BertModel",
      dict(vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=8,
           intermediate_size=128, max_position_embeddings=128),
      auto="AutoModel", model_kw=dict(runner="pooling"))
_case("modernbert", "modernbert", "ModernBertModel",
      dict(vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=8,
           intermediate_size=128, max_position_embeddings=128, pad_token_id=0,
           bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2),
      auto="AutoModel", model_kw=dict(runner="pooling"))

# ---- checkpoints stored quantised
_LIN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def _is_lin(key: str) -> bool:
    return key.endswith(".weight") and key.split(".")[-2] in _LIN


def _fp8_block(metas, config, block=32):
    out = {}
    for k, (s, d) in metas.items():
        out[k] = (s, FP8 if _is_lin(k) else d)
        if _is_lin(k):
            out[k + "_scale_inv"] = (tuple(-(-n // block) for n in s), F32)
    return out


def _fp8_tensor(metas, config):
    out = {}
    for k, (s, d) in metas.items():
        out[k] = (s, FP8 if _is_lin(k) else d)
        if _is_lin(k):
            out[k + "_scale"] = ((), F32)
            out[k.removesuffix("weight") + "input_scale"] = ((), F32)
    return out


def _int4(kind):
    def go(metas, config, group=32):
        out = {}
        for k, (s, d) in metas.items():
            if not _is_lin(k):
                out[k] = (s, d)
                continue
            n, kdim = s
            base = k.removesuffix("weight")
            if kind == "gptq":
                out[base + "qweight"] = ((kdim // 8, n), torch.int32)
                out[base + "qzeros"] = ((kdim // group, n // 8), torch.int32)
                out[base + "scales"] = ((kdim // group, n), torch.float16)
                out[base + "g_idx"] = ((kdim,), torch.int32)
            else:
                out[base + "qweight"] = ((kdim, n // 8), torch.int32)
                out[base + "qzeros"] = ((kdim // group, n // 8), torch.int32)
                out[base + "scales"] = ((kdim // group, n), torch.float16)
        return out
    return go


_Q = dict(hidden_size=256, intermediate_size=512, head_dim=32)
_case("llama_fp8_block", "llama", "LlamaForCausalLM",
      txt(**_Q, quantization_config=dict(quant_method="fp8", activation_scheme="dynamic",
                                         weight_block_size=[32, 32])), metas=_fp8_block)
_case("llama_gptq", "llama", "LlamaForCausalLM",
      txt(**_Q, quantization_config=dict(quant_method="gptq", bits=4, group_size=32,
                                         desc_act=False, sym=True)),
      metas=_int4("gptq"), dtype=torch.float16)


def _gpt_oss_mxfp4(metas, config):
    out = {}
    for k, (s, d) in metas.items():
        if k.endswith("experts.gate_up_proj") or k.endswith("experts.down_proj"):
            e, i, o = s  # on disk the quantised blocks are stored (expert, out, in)
            out[k + "_blocks"] = ((e, o, i // 32, 16), torch.uint8)
            out[k + "_scales"] = ((e, o, i // 32), torch.uint8)
        else:
            out[k] = (s, d)
    return out


_case("gpt_oss_mxfp4", "gpt_oss", "GptOssForCausalLM",
      txt(head_dim=64, hidden_size=256, intermediate_size=256, num_local_experts=4,
          num_experts_per_tok=2, sliding_window=32,
          layer_types=["sliding_attention", "full_attention"],
          quantization_config=dict(quant_method="mxfp4")), metas=_gpt_oss_mxfp4)


# ---- newer and odder
GDN = dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=16,
           linear_value_head_dim=16, linear_conv_kernel_dim=4)
IDS = dict(image_token_id=300, video_token_id=301, vision_start_token_id=302,
           vision_end_token_id=303, tie_word_embeddings=False)
_ROPE3 = dict(rope_type="default", rope_theta=1e4, mrope_interleaved=True)
_VQ3 = dict(depth=2, hidden_size=64, num_heads=4, intermediate_size=128,
            out_hidden_size=64, patch_size=14, spatial_merge_size=2,
            temporal_patch_size=2, num_position_embeddings=16)
_VIT = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, image_size=56, patch_size=14)
_Q35 = txt(head_dim=16, num_hidden_layers=4, **GDN, rope_parameters=dict(
    _ROPE3, mrope_section=[2, 1, 1], partial_rotary_factor=0.5))
_EXP = dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
def _routed_only(metas, config):
    """transformers counts the weightless zero experts among the stored ones."""
    n = config.n_routed_experts
    return {k: v for k, v in metas.items()
            if not (m := re.search(r"experts\.(\d+)\.", k)) or int(m[1]) < n}


_L4 = txt(head_dim=8, intermediate_size_mlp=128, num_local_experts=4,
          num_experts_per_tok=1, interleave_moe_layer_step=1)
_case("llama4_mm", "llama4", "Llama4ForConditionalGeneration",
      dict(text_config=_L4, image_token_index=300, vision_config={
          **_VIT, "intermediate_size": 256, "vision_output_dim": 64,
          "projector_input_dim": 64, "projector_output_dim": 64}),
      auto="Llama4ForConditionalGeneration")
_case("mamba2_f32_alog", "mamba2", "Mamba2ForCausalLM", _CASES["mamba2"].kw,
      metas=lambda m, c: _recast(m, ("A_log",), F32),
      note="A_log needs no cast, so its copy looks direct; then A = -exp(A) in place")
_case("llama4_ep", "llama4_text", "Llama4ForCausalLM", _CASES["llama4"].kw, ep=True,
      note="expert parallel: advanced indexing with an index moved to the weight's device")


def _telechat2(metas, config):
    h, f, v = config.hidden_size, config.ffn_hidden_size, config.vocab_size
    out = {"transformer.word_embeddings.weight": (v, h), "transformer.ln_f.weight": (h,),
           "lm_head.weight": (v, h)}
    for i in range(config.n_layer):
        a, m = f"transformer.h.{i}.self_attention.", f"transformer.h.{i}.mlp."
        out |= {a + "query.weight": (h, h), a + "key_value.weight": (2 * h, h),
                a + "dense.weight": (h, h), a + "dense.bias": (h,),
                m + "gate_proj.weight": (f, h), m + "up_proj.weight": (f, h),
                m + "down_proj.weight": (h, f), m + "down_proj.bias": (h,),
                f"transformer.h.{i}.input_layernorm.weight": (h,),
                f"transformer.h.{i}.post_attention_layernorm.weight": (h,)}
    return {k: (s, BF16) for k, s in out.items()}




def _ct_fp8(metas, config):
    """compressed-tensors: static per-tensor scales; w1 and w3 share an input scale."""
    out = {}
    for k, (s, d) in metas.items():
        out[k] = (s, FP8 if _is_lin(k) else d)
        if _is_lin(k):
            base = k.removesuffix("weight")
            out[base + "weight_scale"] = ((1,), F32)
            out[base + "input_scale"] = ((1,), F32)
    return out


_CT = dict(quant_method="compressed-tensors", format="float-quantized",
           ignore=["lm_head", "re:.*mlp.gate$"],
           config_groups=dict(group_0=dict(
               targets=["Linear"],
               weights=dict(num_bits=8, type="float", strategy="tensor", symmetric=True,
                            dynamic=False),
               input_activations=dict(num_bits=8, type="float", strategy="tensor",
                                      symmetric=True, dynamic=False))))


def _modelopt_fp8(metas, config):
    """llama4 as ModelOpt writes it: one scalar scale for all experts of a matrix."""
    out = {}
    for k, (s, d) in metas.items():
        if "language_model" in k and ".experts." in k:
            out[k] = (s, FP8)
            out[k + "_weight_scale"] = out[k + "_input_scale"] = ((), F32)
        elif "language_model" in k and _is_lin(k):
            out[k] = (s, FP8)
            out[k + "_scale"] = ((), F32)
            out[k.removesuffix("weight") + "input_scale"] = ((), F32)
        else:
            out[k] = (s, d)
    return out


_case("llama4_mm_modelopt", "llama4", "Llama4ForConditionalGeneration",
      {**_CASES["llama4_mm"].kw, "quantization_config": dict(
          quant_method="modelopt", quant_algo="FP8",
          exclude_modules=["*vision*", "*router*", "*lm_head*", "*multi_modal*"])},
      auto="Llama4ForConditionalGeneration", metas=_modelopt_fp8,
      note="a scalar scale is read with item() and filled over the experts")
_case("qwen3_moe_ct_fp8", "qwen3_moe", "Qwen3MoeForCausalLM",
      txt(hidden_size=256, intermediate_size=512, head_dim=32, num_experts=4,
          num_experts_per_tok=2, moe_intermediate_size=128, quantization_config=_CT),
      metas=_ct_fp8, fixed={"input_scale": 0.5},
      note="the loader compares two checkpoint scalars")


def cases() -> list[str]:
    return list(_CASES)


# --------------------------------------------------------------------------- building

_STARTED = False
_KEEP: list = []


def _start() -> None:
    """One gloo process of world size 1 with vLLM's groups."""
    global _STARTED
    if _STARTED:
        return
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as ps
    from vllm.model_executor.models import registry

    # The registry inspects each class in a process of its own, 10 s apiece.
    registry._run_in_subprocess = lambda fn: fn()
    # Activations that only a CPU build of vLLM defines; models look them up when made.
    lib = torch.library.Library("_C", "FRAGMENT")
    for op in ("gelu_new", "gelu_fast", "gelu_quick"):
        if not hasattr(torch.ops._C, op):
            lib.define(f"{op}(Tensor! out, Tensor input) -> ()")
    _KEEP.append(lib)
    _allow_quantised()

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with set_current_vllm_config(VllmConfig()):
        ps.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, backend="gloo",
            distributed_init_method=f"tcp://127.0.0.1:{port}")
        ps.initialize_model_parallel(1, 1)
    _STARTED = True


def _allow_quantised() -> None:
    """Kernels are chosen when a quantised layer is made; none here would run."""
    from vllm.model_executor.kernels.linear.scaled_mm import cpu
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
    from vllm.model_executor.layers.quantization import fp8, mxfp4

    yes = classmethod(lambda cls, *a, **kw: (True, None))
    cpu.CPUFp8BlockScaledMMKernel.is_supported = yes
    cpu.CPUFp8BlockScaledMMKernel.can_implement = yes
    fp8.select_fp8_moe_backend = lambda *a, **kw: (Fp8MoeBackend.TRITON, None)
    mxfp4.select_mxfp4_moe_backend = lambda *a, **kw: (Mxfp4MoeBackend.TRITON, None)


@contextlib.contextmanager
def tensor_parallel(rank: int, size: int):
    """vLLM believes it is ``rank`` of ``size`` inside. Loaders read it at load
    time as well as at build time, so wrap ``load_weights`` in it too."""
    from vllm.distributed import parallel_state as ps

    groups = [ps.get_tp_group(), ps.get_ep_group()]
    old = [(g.rank_in_group, g.world_size) for g in groups]
    for g in groups:
        g.rank_in_group, g.world_size = rank, size
    try:
        yield
    finally:
        for g, (r, n) in zip(groups, old):
            g.rank_in_group, g.world_size = r, n


@contextlib.contextmanager
def _default_dtype(dtype):
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


def config(name: str, large: bool = False):
    """The transformers config of a case."""
    from transformers import AutoConfig

    case = _CASES[name]
    kw = copy.deepcopy(case.kw)
    if large:
        if not case.big:
            raise ValueError(f"{name} has no large config")
        kw.update(copy.deepcopy(case.big))
    if case.make_config is not None:
        cfg = case.make_config(**kw)
    else:
        cfg = AutoConfig.for_model(case.model_type, **kw)
    cfg.architectures = [case.arch]
    cfg.dtype = case.dtype
    return cfg


def _on_disk(hf, state):
    from transformers.core_model_loading import revert_weight_conversion

    state = revert_weight_conversion(hf, dict(state))
    tied = set(getattr(hf, "all_tied_weights_keys", None) or ())
    return {k: v for k, v in state.items() if k not in tied}


@functools.cache
def _metas(name: str, large: bool) -> dict[str, Meta]:
    import transformers

    case, cfg = _CASES[name], config(name, large)
    plain = copy.deepcopy(cfg)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    cls = getattr(transformers, case.auto)
    with torch.device("meta"), _default_dtype(case.dtype):
        if hasattr(cls, "from_config"):
            hf = cls.from_config(plain, dtype=case.dtype)
        else:
            hf = cls(plain)
    state = _on_disk(hf, hf.state_dict())
    out = {k: (tuple(v.shape), v.dtype) for k, v in state.items()}
    return case.metas(out, cfg) if case.metas else out


def metas(name: str, large: bool = False) -> dict[str, Meta]:
    """Checkpoint tensors of a case: name -> (shape, dtype)."""
    return dict(_metas(name, large))


def vllm_config(name: str, tp_size: int = 1, large: bool = False):
    from vllm.config import (
        DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig)

    case = _CASES[name]
    folder = tempfile.mkdtemp(prefix=f"{name}_", dir=_TMP.name)
    config(name, large).save_pretrained(folder)
    model_config = ModelConfig(
        model=folder, skip_tokenizer_init=True, dtype=case.dtype, enforce_eager=True,
        max_model_len=32, **case.model_kw)
    vc = VllmConfig(
        model_config=model_config, parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),
        load_config=LoadConfig(load_format="dummy"))
    vc.parallel_config.tensor_parallel_size = tp_size
    vc.parallel_config.enable_expert_parallel = case.ep
    return vc


def build(name: str, tp_rank: int = 0, tp_size: int = 1, *, device: str = "cpu",
          large: bool = False) -> tuple[torch.nn.Module, dict[str, Meta]]:
    """vLLM's model as rank ``tp_rank`` of ``tp_size`` and its checkpoint metas."""
    _start()
    from vllm.model_executor.model_loader.utils import initialize_model

    # First: vLLM's transformers backend decorates the transformers classes for good.
    m = metas(name, large)
    vc = vllm_config(name, tp_size, large)
    with (tensor_parallel(tp_rank, tp_size), torch.device(device),
          _default_dtype(_CASES[name].dtype)):
        model = initialize_model(vc)
    model.vllm_case = (name, tp_rank, tp_size, vc)
    return model, m


def load(model, pairs) -> object:
    """``model.load_weights(pairs)`` as the rank it was built for."""
    from vllm.config import set_current_vllm_config

    name, rank, size, vc = model.vllm_case
    with (tensor_parallel(rank, size), set_current_vllm_config(vc),
          _default_dtype(_CASES[name].dtype)):
        return model.load_weights(pairs)


# --------------------------------------------------------------------------- values


def random_tensor(key: str, shape, dtype, seed: int) -> torch.Tensor:
    """The same bytes for the same key and seed; no NaN or infinity."""
    g = torch.Generator().manual_seed(
        int.from_bytes(hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=7).digest(), "big"))
    if dtype.is_floating_point:
        wide = torch.randn(shape, generator=g, dtype=F32)
        return wide.to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    info = torch.iinfo(dtype)
    return torch.randint(max(info.min, -(2**31)), min(info.max, 2**31 - 1), shape,
                         generator=g).to(dtype)


def weights(name: str, metas_: dict[str, Meta], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    fixed = _CASES[name].fixed
    for key, (shape, dtype) in metas_.items():
        t = random_tensor(key, shape, dtype, seed)
        for end, value in fixed.items():
            if key.endswith(end):
                t.fill_(value)
        yield key, t


def tensors(model) -> dict[str, torch.Tensor]:
    """Every parameter, buffer and plain tensor attribute, aliases included."""
    out = dict(model.named_parameters(remove_duplicate=False))
    out.update(model.named_buffers(remove_duplicate=False))
    for prefix, module in model.named_modules():
        for attr, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                out[f"{prefix}.{attr}@plain"] = value
    return out


def fill(model, byte: int = 0x11) -> None:
    """Every byte of every parameter: what no loader writes stays recognisable.
    Input scales keep the 1.0 they are made with: a loader compares against it."""
    for k, p in model.named_parameters():
        if p.device.type != "meta" and not k.endswith("input_scale"):
            p.untyped_storage().fill_(byte)


def snapshot(model) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in tensors(model).items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes."""
    return (a.shape == b.shape and a.dtype == b.dtype and torch.equal(
        a.contiguous().view(-1).view(torch.uint8) if a.numel() else a.view(-1),
        b.contiguous().view(-1).view(torch.uint8) if b.numel() else b.view(-1)))


def reference(name: str, seed: int, tp_rank: int = 0, tp_size: int = 1):
    """All tensors of a model after a plain load of seeded random weights."""
    model, m = build(name, tp_rank, tp_size)
    fill(model)
    load(model, weights(name, m, seed))
    return snapshot(model)


# --------------------------------------------------------------------------- check


def untouched(model, byte: int = 0x11) -> list[str]:
    """Parameters that hold only the fill pattern."""
    out = []
    for k, p in model.named_parameters():
        raw = p.detach().contiguous().view(-1)
        if raw.numel() and bool((raw.view(torch.uint8) == byte).all()):
            out.append(k)
    return out


def check(names: list[str], tps: list[int], verbose: bool) -> int:
    bad = 0
    print(f"{'case':24}{'rank':>6}{'ckpt':>6}{'params':>8}  {'load':5}{'build s':>8}{'load s':>8}"
          f"{'crc32':>10}  remark")
    for name in names:
        for tp in tps:
            ranks = range(tp) if tp > 1 else [0]
            rank = ranks[-1] if tp == 1 else 1
            if tp not in _CASES[name].tp:
                continue
            t0 = time.perf_counter()
            ok, remark, n_ckpt, n_par, t1, t2, crc = "FAIL", "", 0, 0, t0, t0, 0
            try:
                model, m = build(name, rank, tp)
                n_ckpt, n_par = len(m), len(list(model.parameters()))
                fill(model)
                t1 = time.perf_counter()
                load(model, weights(name, m, 0))
                t2 = time.perf_counter()
                for k, v in sorted(snapshot(model).items()):
                    if v.numel():
                        crc = zlib.crc32(v.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), crc)
                left = untouched(model)
                ok = "ok"
                if left:
                    remark = f"{len(left)} not written: {left[:3]}"
                del model
            except Exception as e:
                bad += 1
                t1 = max(t1, t0)
                t2 = time.perf_counter()
                where = traceback.extract_tb(e.__traceback__)[-1]
                remark = f"{type(e).__name__}: {str(e)[:150]!r} at {where.filename.split('site-packages/')[-1]}:{where.lineno}"
                if verbose:
                    traceback.print_exc()
            print(f"{name:24}{f'{rank}/{tp}':>6}{n_ckpt:>6}{n_par:>8}  {ok:5}{t1 - t0:8.2f}{t2 - t1:8.2f}"
                  f"{crc:10x}  {remark}", flush=True)
            gc.collect()
    return bad


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--check", action="store_true")
    ap.add_argument("--tp", type=int, nargs="*", default=[1, 4])
    ap.add_argument("--only", nargs="*", default=None)
    ap.add_argument("-v", "--verbose", action="store_true")
    args = ap.parse_args()
    if args.check:
        sys.exit(1 if check(args.only or cases(), args.tp, args.verbose) else 0)
    print("\n".join(cases()))
