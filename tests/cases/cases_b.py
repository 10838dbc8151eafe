"""More public bug reports of people who move weights, each as a small loader.

The format is that of ``harness.py``.  Two keys are read by ``test_more_cases.py`` alone:

  derived      names of which the plan computes bytes itself; every other name that is not direct or
               unneeded goes through the loader
  saves        False: the plan cannot be saved, since its loader reads tensors that are no targets
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from harness import new_like, rnd
from torch import Tensor, nn
from torch.nn import functional as F

BF, F16, F32, F8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
U8, I8, I32, I64, E8M0 = torch.uint8, torch.int8, torch.int32, torch.int64, torch.float8_e8m0fnu


class MemoryOf(dict):
    """Tensors that hold the bytes of a module's parameters, where those hold none themselves.

    Targets with a ``module`` are handed over as that module.
    """

    def __init__(self, module: nn.Module, **memory: Tensor) -> None:
        super().__init__(memory)
        self.module = module


class LiveView(Mapping):
    """The parameters and buffers of a module as they are now, under all their names.

    A name has the same tensor as long as its memory and geometry are the same, whatever object the
    module holds it by.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._shown: dict[str, Tensor] = {}

    def _now(self) -> dict[str, Tensor]:
        parameters = self.module.named_parameters(remove_duplicate=False)
        buffers = self.module.named_buffers(remove_duplicate=False)
        now = {name: tensor.detach() for name, tensor in itertools.chain(parameters, buffers)}
        kept = {name: self._shown.get(name) for name in now}
        self._shown = {
            name: old if (old := kept[name]) is not None and old.is_set_to(tensor) else tensor
            for name, tensor in now.items()
        }
        return self._shown

    def __getitem__(self, name: str) -> Tensor:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


def make_case(targets, checkpoint, load, names, **more):
    """Two updates with new values, unless the case says otherwise."""
    expect = {
        key: more.pop(key)
        for key in (
            "boxes prefer overlap plan finish says keep rebind value_read no_partial_write "
            "no_oracle"
        ).split()
        if key in more
    }
    more.setdefault("updates", [new_like(checkpoint, 1000), new_like(checkpoint, 2000)])
    if isinstance(names, str):
        names = dict.fromkeys(checkpoint, names)
    return dict(
        targets=targets,
        checkpoint=checkpoint,
        load=load,
        expect=dict(names=names, **expect),
        **more,
    )


def fill(module: nn.Module, seed: int) -> nn.Module:
    for index, tensor in enumerate(LiveView(module).values()):
        tensor.data.copy_(rnd(tensor.shape, tensor.dtype, seed + index))
    return module


# ------------------------------------------------------------------ scales
def case_one_scale_on_disk_for_three_slots():
    """vllm-project/vllm#5915: q, k, v are one tensor on disk with one scale, and three here.

    The loader asserted equal shapes; the scale has to be repeated over the slots."""
    T = {"qkv.weight": rnd((6, 4), F8, 1), "qkv.scale": rnd((3,), F32, 2)}
    ck = {"qkv.weight": rnd((6, 4), F8, 3), "qkv.scale": rnd((), F32, 4)}

    def load(t, weights):
        for name, w in weights:
            p = t[name].data
            if name.endswith("scale"):
                w = w.repeat(p.shape)
            assert p.shape == w.shape
            p.copy_(w)

    return make_case(T, ck, load, {"qkv.weight": "direct", "qkv.scale": "direct"})


def case_requantised_to_the_largest_scale():
    """vllm-project/vllm#4332: three per-tensor scales; the fused weight has one, their maximum."""
    T = {"w": rnd((6, 4), F8, 1), "scale": rnd((), F32, 2), "norm": rnd((4,), BF, 3)}
    ck = {}
    for i, part in enumerate("qkv"):
        ck[f"{part}.weight"] = rnd((2, 4), F8, 10 + i)
        ck[f"{part}.scale"] = rnd((), F32, 20 + i).abs() + 0.5
    ck["norm"] = rnd((4,), BF, 30)

    def load(t, weights):
        rows = {part: slice(2 * i, 2 * i + 2) for i, part in enumerate("qkv")}
        scales, parts = {}, {}
        for name, w in weights:
            if name == "norm":
                t[name].copy_(w)
                continue
            part, leaf = name.split(".")
            (scales if leaf == "scale" else parts)[part] = w
        largest = torch.stack([scales[part] for part in "qkv"]).max()
        for part in "qkv":
            full = parts[part].to(F32) * scales[part]
            t["w"].data[rows[part]].copy_((full / largest).clamp(-448, 448).to(F8))
        t["scale"].data.copy_(largest)

    updates = [
        {n: w.abs() + 0.5 if n.endswith("scale") else w for n, w in new_like(ck, seed).items()}
        for seed in (1000, 2000)
    ]
    names = dict.fromkeys(ck, "fallback") | {"norm": "direct"}
    return make_case(T, ck, load, names, updates=updates, derived=[n for n in ck if n != "norm"])


def case_kv_scales_renamed_and_one_for_both():
    """sgl-project/sglang#39942, vllm-project/vllm#6081: scales under names that the loader renames
    to another module; the old single `kv_scale` feeds two; what was not loaded becomes 1."""
    T = {
        "0.qkv": rnd((6, 4), F8, 1),
        "0.attn.k_scale": torch.tensor(-1.0),
        "0.attn.v_scale": torch.tensor(-1.0),
        "1.attn.k_scale": torch.tensor(-1.0),
        "1.attn.v_scale": torch.tensor(-1.0),
    }
    ck = {
        "0.k_proj.weight": rnd((2, 4), F8, 2),
        "0.qkv_proj.k_scale": rnd((1,), F32, 3),
        "0.v_proj.v_scale": rnd((), F32, 4),
        "1.kv_scale": rnd((1,), F32, 5),
        "0.q_proj.q_scale": rnd((1,), F32, 6),
    }

    def load(t, weights):
        for name, w in weights:
            if name.endswith(".kv_scale"):
                for part in "kv":
                    t[name.replace("kv_scale", f"attn.{part}_scale")].data.copy_(w.squeeze())
            elif found := re.fullmatch(r"(\d+)\.(?:qkv|k|v)_proj\.([kv])_scale", name):
                t[f"{found[1]}.attn.{found[2]}_scale"].data.copy_(w.reshape([]))
            elif name == "0.k_proj.weight":
                t["0.qkv"].data.narrow(0, 2, 2).copy_(w)

    names = dict.fromkeys(ck, "direct") | {"0.q_proj.q_scale": "unneeded"}
    return make_case(T, ck, load, names, required=[n for n in T if n != "0.qkv"])


def case_exponent_scales_as_bytes_and_padded():
    """NovaSky-AI/SkyRL#2072: E8M0 scales in a padded matrix; the layer keeps bytes without
    padding.
    """
    T = {"codes": rnd((4, 8), F8, 1), "scale": rnd((4, 2), U8, 2)}
    ck = {"codes": rnd((4, 8), U8, 3), "scale": rnd((8, 4), E8M0, 4)}

    def load(t, weights):
        for name, w in weights:
            if name == "codes":
                t[name].data.copy_(w.view(F8))
            else:
                t[name].data.copy_(w[:4, :2].contiguous().view(U8))

    return make_case(T, ck, load, "direct", boxes={"scale": [((0, 4), (0, 2))]})


def case_scales_kept_as_exponent_bytes():
    """sgl-project/sglang#26701: float scales are cut to their exponents, E8M0 ones only viewed."""
    T = {"a": rnd((2, 3), U8, 1), "b": rnd((2, 3), U8, 2), "c": rnd((2, 3), U8, 3)}
    ck = {"a": rnd((2, 3), E8M0, 4), "b": rnd((2, 3), F32, 5), "c": rnd((2, 3), U8, 6)}

    def as_bytes(w):
        if w.dtype == E8M0:
            return w.view(U8)
        if w.dtype == F32:
            return ((w.view(I32) >> 23) & 0xFF).to(U8)
        return w

    def load(t, weights):
        for name, w in weights:
            t[name].data.copy_(as_bytes(w))

    names = {"a": "direct", "b": "fallback", "c": "direct"}
    return make_case(T, ck, load, names, derived=["b"])


def case_swizzled_copy_of_the_scales():
    """verl-project/verl#7519: the kernel reads an interleaved copy that only the first load
    made.
    """
    T = {"scale": rnd((8, 4), U8, 1), "scale.swizzled": rnd((8, 4), U8, 2), "w": rnd((8, 4), F8, 3)}
    ck = {"w": rnd((8, 4), F8, 4), "scale": rnd((8, 4), U8, 5)}

    def load(t, weights):
        for name, w in weights:
            t[name].data.copy_(w)
        blocks = t["scale"].data.reshape(2, 4, 2, 2).permute(2, 1, 0, 3)
        t["scale.swizzled"].data.copy_(blocks.contiguous().reshape(8, 4))

    return make_case(T, ck, load, "direct")


def case_scale_factors_swizzled_with_padding():
    """NVIDIA/TensorRT-LLM#6809: scales are joined, padded to whole tiles and interleaved."""
    T = {"scale": torch.full((8, 4), 7, dtype=U8).view(F8), "w": rnd((6, 4), BF, 1)}
    ck = {"w1.scale": rnd((3, 3), F8, 2), "w3.scale": rnd((3, 3), F8, 3), "w": rnd((6, 4), BF, 4)}

    def load(t, weights):
        scales = {}
        for name, w in weights:
            if name == "w":
                t["w"].data.copy_(w)
                continue
            scales[name] = w
            if len(scales) == 2:
                joined = torch.cat([scales["w3.scale"].view(U8), scales["w1.scale"].view(U8)])
                tiles = F.pad(joined, (0, 1, 0, 2)).reshape(2, 4, 2, 2).permute(0, 2, 1, 3)
                t["scale"].data.copy_(tiles.reshape(8, 4).view(F8))

    return make_case(
        T, ck, load, dict.fromkeys(ck, "direct"), between=lambda t: t["scale"].view(U8).fill_(99)
    )


def case_dequantised_by_the_loader():
    """Lightricks/LTX-2#172, leejet/stable-diffusion.cpp#1898: FP8 with a scale beside it, cast
    without it.

    The scale may come first or last, and in another bucket.
    """
    T = {"a": rnd((3, 4), BF, 1), "b": rnd((3, 4), BF, 2), "c": rnd((4,), BF, 3)}
    ck = {
        "a.weight": rnd((3, 4), F8, 4),
        "a.weight_scale": rnd((), F32, 5),
        "b.scale_weight": rnd((), F32, 6),
        "c": rnd((4,), BF, 7),
        "b.weight": rnd((3, 4), F8, 8),
    }

    def load(t, weights):
        waiting = {}
        for name, w in weights:
            if name == "c":
                t[name].data.copy_(w)
                continue
            base, leaf = name.split(".")
            waiting.setdefault(base, {})["scale" if "scale" in leaf else "weight"] = w
            if len(waiting[base]) == 2:
                both = waiting.pop(base)
                t[base].data.copy_(both["weight"].to(BF) * both["scale"])

    names = dict.fromkeys(ck, "fallback") | {"c": "direct"}
    buckets = [["a.weight", "b.scale_weight"], ["c", "a.weight_scale"], ["b.weight"]]
    return make_case(T, ck, load, names, buckets=buckets, derived=[n for n in ck if n != "c"])


def case_other_fp8_of_another_vendor():
    """ROCm/vllm#395: bit 0x80 is a NaN in the other FP8: cleared in place through a mask, on the
    arriving tensor, before the bits are read as the other type; scales double."""
    T = {"w": torch.zeros(3, 4, dtype=torch.float8_e4m3fnuz), "scale": torch.zeros(1)}
    ck = {
        "w": torch.tensor([-128, 3, -1, 7] * 3, dtype=I8).view(F8).view(3, 4),
        "scale": rnd((1,), F32, 2),
    }

    def load(t, weights):
        for name, w in weights:
            if name == "scale":
                t[name].data.copy_(w * 2.0)
                continue
            bits = w.view(I8)
            bits[bits == -128] = 0
            t[name].data.copy_(bits.view(torch.float8_e4m3fnuz))

    other = {
        "w": torch.tensor([5, -128, -128, 9] * 3, dtype=I8).view(F8).view(3, 4),
        "scale": rnd((1,), F32, 9),
    }
    names = {"w": "either", "scale": "fallback"}
    return make_case(T, ck, load, names, updates=[other], derived=["w", "scale"])


def case_group_scales_rescaled_to_one_global_scale():
    """vllm-project/vllm#41769, NVIDIA/TensorRT-LLM#12214: w1 and w3 have global scales of their
    own.
    """
    T = {"scale": rnd((4, 2), F8, 1), "alpha": rnd((1,), F32, 2), "global": rnd((), F32, 3)}
    ck = {
        "w1.scale": rnd((2, 2), F8, 4),
        "w1.scale_2": rnd((), F32, 5).abs() + 1,
        "w3.scale": rnd((2, 2), F8, 6),
        "w3.scale_2": rnd((), F32, 7).abs() + 1,
        "input_scale": rnd((), F32, 8),
    }

    def load(t, weights):
        got = dict(weights)
        largest = torch.maximum(got["w1.scale_2"], got["w3.scale_2"])
        for i, part in enumerate(("w3", "w1")):
            ratio = got[f"{part}.scale_2"] / largest
            t["scale"].data[2 * i : 2 * i + 2].copy_((got[f"{part}.scale"].float() * ratio).to(F8))
        t["global"].data.copy_(largest)
        t["alpha"].data[0] = got["input_scale"] * t["global"]

    updates = [
        {n: w.abs() + 1 if "scale_2" in n else w for n, w in new_like(ck, seed).items()}
        for seed in (1000, 2000)
    ]
    return make_case(T, ck, load, "fallback", updates=updates, derived=list(ck))


def case_scales_that_must_agree_are_compared():
    """vllm-project/vllm#5921: the loader warns where two shards have different scales, and reads
    both to know; the weights beside them stay plain copies."""
    T = {"scale": rnd((2,), F32, 1), "w": rnd((4, 4), F8, 2)}
    ck = {
        "w1": rnd((2, 4), F8, 3),
        "w1.scale": rnd((), F32, 4),
        "w3": rnd((2, 4), F8, 5),
        "w3.scale": rnd((), F32, 6),
    }

    def load(t, weights):
        scales = {}
        for name, w in weights:
            part = 0 if name.startswith("w1") else 1
            if not name.endswith("scale"):
                t["w"].data[2 * part : 2 * part + 2].copy_(w)
                continue
            t["scale"].data[part] = w
            scales[part] = w
            if len(scales) == 2 and not torch.allclose(scales[0], scales[1]):
                pass  # a warning

    scales = ["w1.scale", "w3.scale"]
    names = {n: "group" if n in scales else "direct" for n in ck}
    return make_case(T, ck, load, names, value_read=scales)


# ------------------------------------------------------------------ attention
def case_fused_qkv_cut_for_ranks_on_disk():
    """vllm-project/vllm#42803: on disk q, k, v of rank 0 come before those of rank 1;
    chunk(tp)[rank] of the whole put q rows into the k slots.
    """
    tp, rank, q, kv, H = 2, 1, 4, 2, 3
    T = {"qkv": rnd((q + 2 * kv, H), BF, 1), "scale": rnd((q + 2 * kv, 1), F32, 2)}
    ck = {"qkv": rnd((tp * (q + 2 * kv), H), BF, 3), "scale": rnd((tp * (q + 2 * kv), 1), F32, 4)}

    def load(t, weights):
        for name, w in weights:
            mine = w.unflatten(0, (tp, -1))[rank]
            at = 0
            for part in mine.split([q, kv, kv]):
                t[name].data.narrow(0, at, part.shape[0]).copy_(part)
                at += part.shape[0]

    boxes = {"qkv": [((8, 16), (0, H))], "scale": [((8, 16), (0, 1))]}
    return make_case(T, ck, load, "direct", boxes=boxes)


def case_qkv_interleaved_by_group():
    """NVIDIA-NeMo/RL#2802, vllm-project/vllm#53114: [q q k v] for each group on disk, [Q | K |
    V] here.
    """
    G, r, d, H = 3, 2, 2, 5
    T = {"w": rnd((G * (r + 2) * d, H), BF, 1), "b": rnd((G * (r + 2) * d,), BF, 2)}
    ck = {"w": rnd((G * (r + 2) * d, H), BF, 3), "b": rnd((G * (r + 2) * d,), BF, 4)}

    def load(t, weights):
        for name, w in weights:
            groups = w.view(G, r + 2, d, *w.shape[1:])
            q, k, v = groups.split([r, 1, 1], dim=1)
            parts = [x.reshape(-1, *w.shape[1:]) for x in (q, k, v)]
            t[name].data.copy_(torch.cat(parts, dim=0))

    return make_case(T, ck, load, "direct")


def case_rotary_permutation_with_fewer_kv_heads():
    """huggingface/transformers#31788, ggml-org/llama.cpp#3364: k was permuted by the number of q
    heads.
    """
    nq, nk, d, H = 4, 2, 4, 3
    T = {"q": rnd((nq * d, H), BF, 1), "k": rnd((nk * d, H), BF, 2), "kb": rnd((nk * d,), BF, 3)}
    ck = {n: rnd(w.shape, BF, 4 + i) for i, (n, w) in enumerate(T.items())}

    def permute(w, heads):
        return (
            w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:])
            .swapaxes(1, 2)
            .reshape(w.shape)
        )

    def load(t, weights):
        for name, w in weights:
            t[name].data.copy_(permute(w, nq if name == "q" else nk))

    return make_case(T, ck, load, "direct")


def case_absorbed_weights_made_after_the_loop():
    """THUDM/slime#960, sgl-project/sglang#14178: w_kc and w_vc are made from the live kv_b when
    a call ends; with small buckets they were made before it was whole.
    """
    heads, dk, dv, r = 2, 3, 2, 4
    T = {
        "kv_b": rnd((heads * (dk + dv), r), BF, 1),
        "w_kc": rnd((heads, r, dk), BF, 2).transpose(1, 2),
        "w_vc": rnd((heads, r, dv), BF, 3),
        "norm": rnd((4,), BF, 4),
    }
    ck = {
        "kv_b.0": rnd((dk + dv, r), BF, 5),
        "norm": rnd((4,), BF, 6),
        "kv_b.1": rnd((dk + dv, r), BF, 7),
    }

    def load(t, weights):
        for name, w in weights:
            if name == "norm":
                t[name].data.copy_(w)
            else:
                t["kv_b"].data.narrow(0, int(name[-1]) * (dk + dv), dk + dv).copy_(w)
        w_kc, w_vc = t["kv_b"].data.unflatten(0, (-1, dk + dv)).split([dk, dv], dim=1)
        t["w_kc"].data.copy_(w_kc.transpose(1, 2).contiguous().transpose(1, 2))
        t["w_vc"].data.copy_(w_vc.contiguous().transpose(1, 2))

    return make_case(T, ck, load, "direct", buckets=[["kv_b.0"], ["norm"], ["kv_b.1"]])


def case_absorbed_weights_dequantised_in_the_default_dtype():
    """lightseekorg/tokenspeed#1128: outside start-up the default dtype is float32, and the
    absorbed weights were rebuilt in it; here the layer's buffers are BF16 and the block scales
    come apart.
    """
    T = {
        "kv_b": rnd((4, 4), F8, 1),
        "kv_b.scale": rnd((2, 2), F32, 2),
        "w_kc": rnd((2, 1, 4), BF, 3),
        "w_vc": rnd((2, 4, 1), BF, 4),
    }
    ck = {"kv_b": rnd((4, 4), F8, 5), "kv_b.scale": rnd((2, 2), F32, 6)}

    def load(t, weights):
        for name, w in weights:
            t[name].data.copy_(w)
        scale = t["kv_b.scale"].repeat_interleave(2, 0).repeat_interleave(2, 1)
        full = (t["kv_b"].to(F32) * scale).to(torch.get_default_dtype())
        w_kc, w_vc = full.unflatten(0, (2, 2)).split([1, 1], dim=1)
        t["w_kc"].copy_(w_kc)
        t["w_vc"].copy_(w_vc.transpose(1, 2))

    return make_case(T, ck, load, "fallback", buckets=[["kv_b.scale"], ["kv_b"]], derived=list(ck))


# ------------------------------------------------------------------ norms, heads, embeddings
def case_norm_plus_one_decided_by_another_shape():
    """ml-explore/mlx-lm#1623: the shape of a convolution tells whether norms still need their 1."""
    T = {"conv": rnd((4, 2, 1), BF, 1), "norm": rnd((4,), BF, 2), "q_norm": rnd((2,), F32, 3)}
    ck = {"norm": rnd((4,), BF, 4), "conv": rnd((4, 1, 2), BF, 5), "q_norm": rnd((2,), F32, 6)}

    def load(t, weights):
        weights = list(weights)
        raw = any(name == "conv" and w.shape[-1] != 1 for name, w in weights)
        for name, w in weights:
            if name == "conv":
                w = w.movedim(2, 1) if raw else w
            elif raw:
                w = w + 1.0
            t[name].data.copy_(w)

    names = {"norm": "fallback", "conv": "direct", "q_norm": "fallback"}
    return make_case(T, ck, load, names, derived=["norm", "q_norm"])


def case_norm_plus_one_decided_by_its_mean():
    """Blaizzy/mlx-vlm#2114: whether the 1 is in there already is told by the mean of the values."""
    T = {"norm": rnd((4,), F32, 1), "w": rnd((2, 2), BF, 2)}
    ck = {"norm": rnd((4,), F32, 3) * 0.1 + 1.2, "w": rnd((2, 2), BF, 4)}

    def load(t, weights):
        for name, w in weights:
            if name == "norm" and w.float().mean().item() > 0.7:
                w = w - 1.0
            t[name].data.copy_(w)

    low = {"norm": rnd((4,), F32, 5) * 0.1 + 0.2, "w": rnd((2, 2), BF, 6)}
    names = {"norm": "either", "w": "direct"}
    return make_case(T, ck, load, names, updates=[low, new_like(ck, 9)])


def case_one_added_in_place_after_the_loop():
    """pytorch/executorch#19901, unslothai/unsloth-zoo#1095: the 1 is added to what is live after
    the loop: missing where a path skips it, twice where one runs it again.
    """
    T = {"a.norm": rnd((4,), BF, 1), "b.norm": rnd((4,), BF, 2), "w": rnd((2, 2), BF, 3)}
    ck = {n: rnd(w.shape, BF, 4 + i) for i, (n, w) in enumerate(T.items())}

    def load(t, weights):
        loaded = set()
        for name, w in weights:
            t[name].data.copy_(w)
            loaded.add(name)
        for name in sorted(loaded):
            if "norm" in name:
                t[name].data.add_(1.0)

    names = {"a.norm": "fallback", "b.norm": "fallback", "w": "direct"}
    buckets = [["a.norm"], ["w", "b.norm"]]
    return make_case(T, ck, load, names, buckets=buckets, derived=["a.norm", "b.norm"])


def case_head_normalised_while_loading():
    """vllm-project/vllm#1876: rows of the head are normalised before the rank's rows are cut."""
    T = {"lm_head": rnd((3, 4), BF, 1), "embed": rnd((3, 4), BF, 2)}
    ck = {"lm_head": rnd((6, 4), BF, 3), "embed": rnd((6, 4), BF, 4)}

    def load(t, weights):
        for name, w in weights:
            if name == "lm_head":
                w = F.normalize(w)
            t[name].data.copy_(w.narrow(0, 3, 3))

    return make_case(T, ck, load, {"lm_head": "fallback", "embed": "direct"}, derived=["lm_head"])


def case_padding_row_zeroed_after_loading():
    """pytorch/pytorch#6411, facebookresearch/fairseq#4633: loading overwrites the row of the
    padding token; the loader zeroes it again.
    """
    pad = 1
    T = {"embed": rnd((5, 3), BF, 1)}
    ck = {"embed": rnd((5, 3), BF, 2)}

    def load(t, weights):
        for name, w in weights:
            t[name].data.copy_(w)
        t["embed"].data[pad].zero_()

    boxes = {"embed": [((0, 1), (0, 3)), ((2, 5), (0, 3))]}
    return make_case(
        T,
        ck,
        load,
        "direct",
        boxes=boxes,
        between=lambda t: t["embed"].data[pad].fill_(float("nan")),
    )


def case_tied_head_on_the_last_stage_only():
    """sgl-project/sglang#15890: the last stage has no embedding, but a head that is tied to it;
    names of other stages were skipped by their layer, the embedding with them.
    """
    T = {
        "lm_head.weight": rnd((6, 4), BF, 1),
        "layers.1.w": rnd((4, 4), BF, 2),
        "norm": rnd((4,), BF, 3),
    }
    ck = {
        "model.embed_tokens.weight": rnd((6, 4), BF, 4),
        "model.layers.0.w": rnd((4, 4), BF, 5),
        "model.layers.1.w": rnd((4, 4), BF, 6),
        "model.norm": rnd((4,), BF, 7),
    }

    def load(t, weights):
        for name, w in weights:
            name = name.removeprefix("model.")
            found = re.match(r"layers\.(\d+)\.", name)
            if found and int(found[1]) < 1:
                continue
            if name == "embed_tokens.weight":
                name = "lm_head.weight"
            if name in t:
                t[name].data.copy_(w)

    return make_case(T, ck, load, dict.fromkeys(ck, "direct") | {"model.layers.0.w": "unneeded"})


def case_tied_name_that_the_trainer_leaves_out():
    """vllm-project/vllm#56689: the trainer lists a shared parameter once; the stage that knows
    it by the other name keeps the last weights, and the update ends well.
    """
    T = {"lm_head.weight": rnd((6, 4), BF, 1), "norm": rnd((4,), BF, 2)}
    ck = {"model.embed_tokens.weight": rnd((6, 4), BF, 3), "norm": rnd((4,), BF, 4)}

    def load(t, weights):
        for name, w in weights:
            if name in t:
                t[name].data.copy_(w)

    names = {"model.embed_tokens.weight": "unneeded", "norm": "direct"}
    return make_case(T, ck, load, names, finish="error", says=["lm_head.weight"], updates=[])


def case_slice_of_a_saved_tensor_is_saved_too():
    """safetensors/safetensors#232: A and A[:1] share memory and both are in the file; the later
    one stands.
    """
    a = rnd((3, 4), BF, 1)
    T = {"A": a, "B": a[:1], "C": rnd((2,), BF, 2)}
    ck = {"B": rnd((1, 4), BF, 3), "C": rnd((2,), BF, 4), "A": rnd((3, 4), BF, 5)}

    def load(t, weights):
        for name, w in weights:
            t[name].data.copy_(w)

    names = {"A": "fallback", "B": "fallback", "C": "direct"}
    return make_case(
        T, ck, load, names, overlap=["A", "B"], orders=[list(ck), ["A", "C", "B"]], updates=[]
    )


# ------------------------------------------------------------------ experts
def case_shared_expert_cloned_into_slots():
    """sgl-project/sglang#4918, ROCm/ATOM#1527: the shared expert is renamed and cloned into the
    slots after the routed ones; a mapping without those slots dropped it.
    """
    routed, copies = 2, 2
    T = {"w2": rnd((routed + copies, 3, 2), F8, 1), "w2.scale": rnd((routed + copies,), F32, 2)}
    ck = {
        "experts.0.down": rnd((3, 2), F8, 3),
        "shared_experts.down": rnd((3, 2), F8, 4),
        "experts.1.down": rnd((3, 2), F8, 5),
        "experts.0.down_scale": rnd((1,), F32, 6),
        "experts.1.down_scale": rnd((1,), F32, 7),
        "shared_experts.down_scale": rnd((1,), F32, 8),
    }

    def load(t, weights):
        listed = list(weights)
        found = dict(listed)
        for leaf in ("down", "down_scale"):
            for i in range(copies):
                listed.append(
                    (f"experts.{routed + i}.{leaf}", found[f"shared_experts.{leaf}"].clone())
                )
        for name, w in listed:
            if name.startswith("shared_experts"):
                continue
            _, e, leaf = name.split(".")
            if leaf == "down":
                t["w2"].data[int(e)].copy_(w)
            else:
                t["w2.scale"].data[int(e)] = w

    return make_case(T, ck, load, "direct")


def case_experts_loaded_by_threads():
    """sgl-project/sglang#7943, NVIDIA/TensorRT-LLM#4699: weight loaders run in a pool, and the
    next tensor is asked for before the last one is copied; modelscope/ms-swift#10204: into
    reused memory.
    """
    T = {"w13": rnd((3, 4, 5), BF, 1), "w2": rnd((3, 5, 2), BF, 2)}
    ck = {}
    for e in range(3):
        ck[f"{e}.gate"] = rnd((2, 5), BF, 10 + e)
        ck[f"{e}.up"] = rnd((2, 5), BF, 20 + e)
        ck[f"{e}.down"] = rnd((5, 4), BF, 30 + e)

    def weight_loader(param, w, expert, part):
        if part == "down":
            param.data[expert].copy_(w.narrow(1, 2, 2))
        else:
            param.data[expert].narrow(0, 0 if part == "gate" else 2, 2).copy_(w)

    def load(t, weights):
        with ThreadPoolExecutor(max_workers=4) as pool:
            futures = []
            for name, w in weights:
                e, part = name.split(".")
                param = t["w2" if part == "down" else "w13"]
                futures.append(pool.submit(weight_loader, param, w, int(e), part))
            for future in futures:
                future.result()

    return make_case(T, ck, load, "direct", reuse_buffer=True)


def case_physical_slots_from_a_map_tensor():
    """ROCm/ATOM#1917: packed experts are put into physical slots by a map that is a tensor."""
    place = torch.tensor([2, 0, 1, 0, 2])
    mine = torch.tensor([-1, 0, 1])
    T = {"w": rnd((5, 3, 2), BF, 1), "local": rnd((2, 4), BF, 2)}
    ck = {
        "w": rnd((3, 3, 2), BF, 3),
        "0.l": rnd((4,), BF, 4),
        "1.l": rnd((4,), BF, 5),
        "2.l": rnd((4,), BF, 6),
    }

    def load(t, weights):
        for name, w in weights:
            if name == "w":
                t["w"].data.copy_(w.index_select(0, place))
            elif (slot := mine[int(name[0])].item()) != -1:
                t["local"].data[slot].copy_(w)

    names = dict.fromkeys(ck, "direct") | {"0.l": "unneeded"}
    return make_case(T, ck, load, names, saves=False)


def case_padded_hidden_size_keeps_its_padding():
    """vllm-project/vllm#37010: the kernel rounds the hidden size up, the file does not."""
    T = {
        "w13": torch.zeros(2, 4, 8, dtype=BF),
        "w2": torch.zeros(2, 8, 2, dtype=BF),
        "b": torch.zeros(2, 8),
    }
    ck = {}
    for e in range(2):
        ck[f"{e}.w1"], ck[f"{e}.w3"] = rnd((2, 5), BF, 1 + e), rnd((2, 5), BF, 3 + e)
        ck[f"{e}.w2"], ck[f"{e}.b"] = rnd((5, 2), BF, 5 + e), rnd((5,), F32, 7 + e)

    def narrow(p, w):
        for dim, extent in enumerate(w.shape):
            if p.shape[dim] > extent:
                p = p.narrow(dim, 0, extent)
        return p

    def load(t, weights):
        for name, w in weights:
            e, part = name.split(".")
            p = t[part if part in t else "w13"].data[int(e)]
            if part in ("w1", "w3"):
                p = p.narrow(0, 0 if part == "w1" else 2, 2)
            narrow(p, w).copy_(w)

    return make_case(T, ck, load, "direct", required=[])


def case_rank_padded_after_it_was_cut():
    """NVIDIA/TensorRT-LLM#16198: what the rank gets is padded to a whole tile after the cut; the
    padding was left out, or taken from the neighbour.
    """
    T = {"w1": rnd((4, 3), I8, 1), "w2": rnd((3, 4), I8, 2), "s": rnd((4,), F16, 3)}
    ck = {"w1": rnd((6, 3), I8, 4), "w2": rnd((3, 6), I8, 5), "s": rnd((6,), F16, 6)}

    def load(t, weights):
        for name, w in weights:
            d = 1 if name == "w2" else 0
            cut = w.narrow(d, 3, 3)
            pad = (0, 1) if d == cut.dim() - 1 else (0, 0, 0, 1)
            t[name].data.copy_(F.pad(cut, pad))

    def dirty(t):
        t["w1"].data[3].fill_(9)
        t["s"].data[3] = float("nan")

    boxes = {"w1": [((3, 6), (0, 3))], "w2": [((0, 3), (3, 6))], "s": [((3, 6),)]}
    return make_case(T, ck, load, "direct", boxes=boxes, between=dirty)


def case_cut_inside_a_scale_group():
    """NVIDIA/TensorRT-LLM#6722: a rank's columns start inside a group of 4: its scales start one
    early.
    """
    T = {"w": rnd((2, 6), U8, 1), "s": rnd((2, 3), U8, 2)}
    ck = {"w": rnd((2, 12), U8, 3), "s": rnd((2, 3), U8, 4)}
    start, stop = 2, 8

    def load(t, weights):
        for name, w in weights:
            if name == "w":
                t["w"].data.copy_(w[:, start:stop])
            else:
                first, last = start // 4, (stop - 1) // 4 + 1
                t["s"].data.zero_()
                t["s"].data[:, : last - first].copy_(w[:, first:last])

    boxes = {"w": [((0, 2), (2, 8))], "s": [((0, 2), (0, 2))]}
    return make_case(T, ck, load, "direct", boxes=boxes, between=lambda t: t["s"].data.fill_(77))


def case_uneven_ranks_by_whole_groups():
    """jundot/omlx#2844: 29 groups over 2 ranks; an even split cuts inside one."""
    T = {"w": rnd((2, 8), U8, 1), "s": rnd((2, 2), BF, 2)}
    ck = {"w": rnd((2, 20), U8, 3), "s": rnd((2, 5), BF, 4)}

    def load(t, weights):
        for name, w in weights:
            groups = w.unflatten(1, (5, -1)).tensor_split(2, dim=1)[1]
            t[name].data.copy_(groups.flatten(1))

    boxes = {"w": [((0, 2), (12, 20))], "s": [((0, 2), (3, 5))]}
    return make_case(T, ck, load, "direct", boxes=boxes)


# ------------------------------------------------------------------ state spaces, convolutions
def case_mixer_groups_repeated_for_ranks():
    """vllm-project/vllm#10909: the convolution is [x | B | C]; groups are fewer than ranks and
    repeated.
    """
    tp, rank, x, g = 4, 3, 8, 2
    T = {
        "conv.weight": rnd((x // tp + 2 * 2, 1, 3), BF, 1),
        "conv.bias": rnd((x // tp + 4,), BF, 2),
    }
    ck = {
        "conv.weight": rnd((x + 2 * g * 2, 1, 3), BF, 3),
        "conv.bias": rnd((x + 2 * g * 2,), BF, 4),
    }

    def load(t, weights):
        for name, w in weights:
            boundary, loaded = 0, 0
            for full, extra, ratio in ((x, 0, 1), (g * 2, 4, 2), (g * 2, 4, 2)):
                shard = (full + extra) // tp
                start = loaded + (rank // ratio) * shard
                t[name].data[boundary : boundary + shard, ...] = w[start : start + shard, ...]
                boundary += shard
                loaded += full

    rows = [(6, 8), (10, 12), (14, 16)]
    boxes = {
        "conv.weight": [(row, (0, 1), (0, 3)) for row in rows],
        "conv.bias": [(row,) for row in rows],
    }
    return make_case(T, ck, load, "direct", boxes=boxes)


def case_value_heads_reordered_by_key_head():
    """ggml-org/llama.cpp#27019: value heads of one key head lie together on disk, apart in the
    kernel.
    """
    k, per, d = 3, 2, 2
    T = {
        "v": rnd((k * per * d, 4), BF, 1),
        "dt": rnd((k * per,), F32, 2),
        "A": rnd((k * per,), F32, 3),
    }
    ck = {
        "v": rnd((k * per * d, 4), BF, 4),
        "dt": rnd((k * per,), F32, 5),
        "A_log": rnd((k * per,), F32, 6),
    }

    def reorder(w, head):
        return w.view(k, per, head, *w.shape[1:]).transpose(0, 1).reshape(w.shape)

    def load(t, weights):
        for name, w in weights:
            if name == "A_log":
                t["A"].data.copy_(reorder(-w.exp(), 1))
            else:
                t[name].data.copy_(reorder(w, d if name == "v" else 1))

    names = {"v": "direct", "dt": "direct", "A_log": "fallback"}
    return make_case(T, ck, load, names, derived=["A_log"])


def case_channels_last_convolution():
    """safetensors/safetensors#308: the live convolution is channels-last, the file is not."""
    T = {
        "a": rnd((2, 3, 2, 4), BF, 1).to(memory_format=torch.channels_last),
        "b": rnd((2, 12), BF, 2),
    }
    ck = {"a": rnd((2, 3, 2, 4), BF, 3), "b": rnd((2, 3, 2, 2), BF, 4)}

    def load(t, weights):
        for name, w in weights:
            w = w.to(memory_format=torch.channels_last)
            assert w.is_contiguous(memory_format=torch.channels_last)
            t[name].data.copy_(w if name == "a" else w.permute(0, 2, 3, 1).flatten(1))

    return make_case(T, ck, load, "direct")


def case_position_table_resized():
    """facebookresearch/dinov2#431: the table of another resolution is interpolated, its class
    token kept.
    """
    T = {"pos": rnd((1, 10, 2), F32, 1), "patch": rnd((2, 8), BF, 2)}
    ck = {"pos": rnd((1, 5, 2), F32, 3), "patch": rnd((2, 2, 1, 2, 2), BF, 4)}

    def load(t, weights):
        for name, w in weights:
            if name == "pos":
                cls, grid = w[:, :1], w[:, 1:]
                grid = grid.reshape(1, 2, 2, 2).permute(0, 3, 1, 2)
                grid = F.interpolate(grid, size=(3, 3), mode="bicubic", align_corners=False)
                w = torch.cat((cls, grid.permute(0, 2, 3, 1).flatten(1, 2)), dim=1)
            else:
                w = w.view(w.shape[0], -1)
            t[name].data.copy_(w)

    return make_case(T, ck, load, {"pos": "fallback", "patch": "direct"}, derived=["pos"])


def case_batch_norm_statistics():
    """vllm-project/vllm#15813: running statistics are buffers, one of them an int64 scalar."""
    module = fill(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)), 1)
    T = {n: p.detach() for n, p in LiveView(module).items()}
    ck = {n: rnd(p.shape, p.dtype, 20 + i) for i, (n, p) in enumerate(T.items())}

    def load(t, weights):
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        for name, w in weights:
            with torch.no_grad():
                (parameters if name in parameters else buffers)[name].copy_(w)

    return make_case(T, ck, load, "direct")


def case_batch_norm_folded_into_the_convolution():
    """vllm-project/vllm-ascend#1376's statistics, used while loading: the fold is made from live
    buffers.
    """
    T = {
        "w": rnd((2, 3), F32, 1),
        "b": rnd((2,), F32, 2),
        "mean": rnd((2,), F32, 3),
        "var": torch.ones(2),
    }
    ck = {
        "w": rnd((2, 3), F32, 4),
        "gamma": rnd((2,), F32, 5),
        "mean": rnd((2,), F32, 6),
        "var": rnd((2,), F32, 7).abs(),
    }

    def load(t, weights):
        held = {}
        for name, w in weights:
            if name in ("mean", "var"):
                t[name].copy_(w)
            else:
                held[name] = w
        ratio = held["gamma"] * torch.rsqrt(t["var"] + 1e-5)
        t["w"].copy_(held["w"] * ratio[:, None])
        t["b"].copy_(-t["mean"] * ratio)

    updates = [{n: w.abs() if n == "var" else w for n, w in new_like(ck, 30).items()}]
    return make_case(T, ck, load, "fallback", updates=updates, derived=list(ck))


def case_frequencies_made_again_by_every_load():
    """huggingface/transformers#45902, pytorch/torchtitan#4817: a buffer that no file has was
    left as the allocator gave it; the loader computes it again from the configuration.
    """
    T = {"inv_freq": torch.full((3,), float("nan")), "w": rnd((2, 2), BF, 1)}
    ck = {"w": rnd((2, 2), BF, 2)}

    def load(t, weights):
        for name, w in weights:
            t[name].data.copy_(w)
        t["inv_freq"].copy_(1.0 / 10000.0 ** (torch.arange(0, 6, 2).float() / 6))

    return make_case(T, ck, load, "direct", between=lambda t: t["inv_freq"].fill_(float("nan")))


# ------------------------------------------------------------------ packed integers
def case_rows_sorted_by_group_index():
    """intel/ipex-llm#10851, vllm-project/vllm#7374: act-order: packed rows are unpacked and
    sorted by an index that is in the checkpoint itself.
    """
    T = {
        "w": rnd((8, 3), U8, 1),
        "perm": rnd((8,), I64, 2),
        "g_idx": rnd((8,), I32, 3),
        "s": rnd((2, 3), F16, 4),
    }
    ck = {
        "qweight": rnd((1, 3), I32, 5),
        "g_idx": torch.tensor([1, 0, 1, 0, 0, 1, 0, 1], dtype=I32),
        "scales": rnd((2, 3), F16, 6),
    }

    def load(t, weights):
        got = dict(weights)
        order = torch.argsort(got["g_idx"], stable=True)
        shifts = torch.arange(0, 32, 4, dtype=I32)
        rows = (got["qweight"].unsqueeze(1) >> shifts[None, :, None]) & 15
        t["w"].data.copy_(rows.reshape(-1, 3)[order].to(U8))
        t["perm"].data.copy_(order)
        t["g_idx"].data.copy_(got["g_idx"][order])
        t["s"].data.copy_(got["scales"])

    other = new_like(ck, 40) | {"g_idx": torch.tensor([0, 1, 1, 1, 0, 0, 1, 0], dtype=I32)}
    names = {"qweight": "fallback", "g_idx": "fallback", "scales": "direct"}
    return make_case(T, ck, load, names, updates=[other], derived=["qweight", "g_idx"])


def case_nibbles_in_another_order():
    """mit-han-lab/llm-awq#91, pie-project/pie#491: [0 2 4 6 1 3 5 7] inside each word, for
    weights and zero points; one of the two was left as it came.
    """
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    shifts = torch.arange(0, 32, 4)
    T = {
        "qweight": rnd((3, 2), I32, 1),
        "qzeros": rnd((1, 2), I32, 2),
        "scales": rnd((1, 16), F16, 3),
    }
    ck = {n: rnd(w.shape, w.dtype, 4 + i) for i, (n, w) in enumerate(T.items())}

    def repack(w):
        nibbles = (w.unsqueeze(-1) >> shifts.to(I32)) & 0xF
        nibbles = nibbles[..., order]
        return torch.sum(nibbles << shifts.to(I32), dim=-1).to(I32)

    def load(t, weights):
        for name, w in weights:
            t[name].data.copy_(w if name == "scales" else repack(w))

    names = {"qweight": "fallback", "qzeros": "fallback", "scales": "direct"}
    return make_case(T, ck, load, names, derived=["qweight", "qzeros"], saves=False)


def case_signed_nibbles_packed_without_a_mask():
    """vllm-project/compressed-tensors#518: the high nibble was shifted without a mask, the low
    one kept its sign; both halves are written in place into one byte.
    """
    T = {"w": rnd((3, 4), I8, 1), "back": rnd((3, 8), I8, 2)}
    ck = {"w": (rnd((3, 8), I8, 3) % 16 - 8).to(I8), "p": rnd((3, 4), I8, 4) - 60}

    def load(t, weights):
        for name, w in weights:
            if name == "w":
                packed = w[..., 0::2] & 0x0F
                packed |= (w[..., 1::2] & 0x0F) << 4
                t["w"].data.copy_(packed)
            else:
                low = (w << 4) >> 4
                t["back"].data[:, 0::2] = low
                t["back"].data[:, 1::2].copy_(w >> 4)

    other = {"w": (rnd((3, 8), I8, 13) % 16 - 8).to(I8), "p": rnd((3, 4), I8, 14) - 60}
    return make_case(T, ck, load, "fallback", updates=[other], derived=["w", "p"])


def case_quant_state_beside_the_weight():
    """bitsandbytes-foundation/bitsandbytes#1946: packed bytes were loaded, the state beside them
    kept from before; the state's header is a JSON text in a uint8 tensor, which the loader has
    to read.
    """
    header = torch.tensor(list(json.dumps({"blocksize": 4}).encode()), dtype=U8)
    T = {"w": rnd((8, 1), U8, 1), "w.absmax": rnd((4,), F32, 2), "w.blocksize": torch.tensor(0)}
    ck = {
        "w": rnd((8, 1), U8, 3),
        "w.absmax": rnd((4,), F32, 4),
        "w.quant_state.bitsandbytes__nf4": header,
    }

    def load(t, weights):
        for name, w in weights:
            if "quant_state" in name:
                t["w.blocksize"].fill_(json.loads(bytes(w.tolist()))["blocksize"])
            else:
                t[name].data.copy_(w)

    other = new_like(ck, 50)
    other["w.quant_state.bitsandbytes__nf4"] = torch.tensor(
        list(json.dumps({"blocksize": 8}).encode()), dtype=U8
    )
    # With made-up values the text cannot be read: nothing is known of the other names beside it.
    return make_case(T, ck, load, "either", updates=[other], no_oracle=True)


# ------------------------------------------------------------------ parameters that are replaced
class Linear(nn.Module):
    """A column-parallel layer as engines write it: the parameter carries its loader."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(rnd((2, 4), BF, 1), requires_grad=False)
        self.weight.weight_loader = self.weight_loader

    def weight_loader(self, param: Tensor, loaded: Tensor) -> None:
        param.data.copy_(loaded.narrow(0, 2, 2))


def default_loader(param: Tensor, loaded: Tensor) -> None:
    assert param.size() == loaded.size(), (param.size(), loaded.size())
    param.data.copy_(loaded)


def case_parameter_wrapped_anew_by_post_processing():
    """sgl-project/sglang#5424, vllm-project/vllm#49601: post-processing wraps the same bytes in
    a new parameter, without the loader that the old one carried; here it is carried over.
    """
    layer = Linear()
    T = {"weight": layer.weight.data}
    ck = {"weight": rnd((4, 4), BF, 2)}

    def load(t, weights):
        for name, w in weights:
            param = getattr(layer, name)
            getattr(param, "weight_loader", default_loader)(param, w)

    def process(t):
        new = nn.Parameter(layer.weight.data, requires_grad=False)
        new.weight_loader = layer.weight.weight_loader
        layer.weight = new

    return make_case(T, ck, load, "direct", process=process, boxes={"weight": [((2, 4), (0, 4))]})


def case_parameter_wrapped_anew_without_its_loader():
    """sgl-project/sglang#5424: the loader is lost: from then on the default one refuses the full
    tensor.

    A plan that is made in that state has to end with the loader's own words.
    """
    layer = Linear()
    layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)
    T = {"weight": layer.weight.data}
    ck = {"norm": rnd((2,), BF, 2), "weight": rnd((4, 4), BF, 3)}

    def load(t, weights):
        for name, w in weights:
            if name == "weight":
                param = layer.weight
                getattr(param, "weight_loader", default_loader)(param, w)

    return make_case(T, ck, load, "direct", plan="error", says=["weight"], updates=[])


def rebinding(load_one, *, tied: bool = False):
    """A case of a module whose loader replaces a parameter."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 3)
            self.head = nn.Linear(3, 4, bias=False)
            if tied:
                self.head.weight = self.embed.weight
            self.norm = nn.LayerNorm(3)

        def load_weights(self, weights) -> None:
            load_one(self, weights)

    module = fill(Model(), 1)
    view = LiveView(module)
    ck = {n: rnd(p.shape, p.dtype, 20 + i) for i, (n, p) in enumerate(view.items())}
    if tied:
        del ck["head.weight"]
    return make_case(
        view,
        ck,
        lambda t, weights: t.module.load_weights(weights),
        {n: "either" for n in ck},
        rebind=True,
        says=["embed", "head", "norm", "weight"],
        no_oracle=True,
        updates=[],
    )


def case_state_dict_assigned():
    """pytorch/pytorch#188346, TransformerLensOrg/TransformerLens#1725: assign=True gives each
    name a tensor of its own, and unties what was tied.
    """
    return rebinding(
        lambda module, weights: module.load_state_dict(dict(weights), strict=False, assign=True),
        tied=True,
    )


def case_parameters_swapped():
    """huggingface/diffusers#13751: swap_tensors keeps the Python object and exchanges what it
    holds.
    """

    def load(module, weights):
        for name, w in weights:
            torch.utils.swap_tensors(module.get_parameter(name), nn.Parameter(w))

    return rebinding(load)


def case_parameters_set_to_the_arriving_memory():
    """vllm-project/vllm#54477: repacking that changes data_ptr() breaks captured graphs; `set_`
    is the shortest way to it.
    """

    def load(module, weights):
        for name, w in weights:
            with torch.no_grad():
                module.get_parameter(name).data.set_(w)

    return rebinding(load)


def case_parameter_objects_replaced():
    """sgl-project/sglang#9855, #8390: layers register new parameters while they load."""

    def load(module, weights):
        for name, w in weights:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, nn.Parameter(w.clone(), requires_grad=False))

    return rebinding(load)


def case_scales_replaced_through_data():
    """sgl-project/sglang#28662: weight and scale are requantised, the scale by `.data =`."""
    T = {"w": rnd((2, 4), F8, 1), "s": rnd((2, 1), F32, 2), "norm": rnd((4,), BF, 3)}
    ck = {"norm": rnd((4,), BF, 4), "w": rnd((2, 4), F8, 5), "s": rnd((2, 1), F32, 6).abs() + 0.1}

    def load(t, weights):
        for name, w in weights:
            t[name].data.copy_(w)
        scale = torch.exp2(torch.ceil(torch.log2(t["s"].data)))
        t["w"].data.copy_((t["w"].data.float() * t["s"].data / scale).to(F8))
        t["s"].data = scale

    names = {"norm": "direct", "w": "either", "s": "either"}
    return make_case(
        T, ck, load, names, rebind=True, says=["`s`", "`w`"], updates=[], no_oracle=True
    )


# ------------------------------------------------------------------ state dicts, parametrisations
def case_state_dict_without_the_counter():
    """pytorch/pytorch#110361: load_state_dict adds a zero for the batch counter that an old file
    lacks.
    """

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(1, 2, 1)
            self.bn = nn.BatchNorm1d(2)

        def load_weights(self, weights) -> None:
            self.load_state_dict(dict(weights), strict=False)

    view = LiveView(fill(Model(), 1))
    ck = {
        n: rnd(p.shape, p.dtype, 20 + i) for i, (n, p) in enumerate(view.items()) if p.dtype == F32
    }
    return make_case(
        view,
        ck,
        lambda t, weights: t.module.load_weights(weights),
        "direct",
        required=list(ck),
    )


def case_state_dict_refused_is_whole():
    """pytorch/pytorch#28318, #34880: an expanded buffer cannot be copied into: load_state_dict
    says so at its end, when other names are written already.
    """

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(3.0).expand(2, 3))
            self.lin = nn.Linear(2, 2)

        def load_weights(self, weights) -> None:
            self.load_state_dict(dict(weights))

    model = Model()
    view = LiveView(model)
    ck = {n: rnd(p.shape, p.dtype, 20 + i) for i, (n, p) in enumerate(view.items())}
    return make_case(
        view,
        ck,
        lambda t, weights: t.module.load_weights(weights),
        "direct",
        plan="error",
        says=["table"],
        updates=[],
    )


def case_expanded_buffer_written_through_its_row():
    """pytorch/pytorch#34880: what can be written of an expanded buffer is its one row."""
    T = {"table": torch.zeros(3).expand(2, 3), "mask": torch.zeros(2, 4)}
    ck = {"table": rnd((2, 3), F32, 1), "mask": rnd((4,), F32, 2)}

    def load(t, weights):
        for name, w in weights:
            if name == "table":
                t[name][0].copy_(w[0])
            else:
                t[name].copy_(w.expand(2, 4))

    return make_case(T, ck, load, "direct", boxes={"table": [((0, 1), (0, 3))]})


def case_weight_norm_under_new_names():
    """huggingface/transformers#32194: weight_g and weight_v are called original0 and original1
    now.
    """

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 2, 2), dim=2)

        def load_weights(self, weights) -> None:
            new = {
                "weight_g": "parametrizations.weight.original0",
                "weight_v": "parametrizations.weight.original1",
            }
            for name, w in weights:
                owner, _, leaf = name.rpartition(".")
                with torch.no_grad():
                    self.get_parameter(f"{owner}.{new.get(leaf, leaf)}").copy_(w)

    view = LiveView(fill(Model(), 1))
    ck = {
        "conv.weight_g": rnd((1, 1, 2), F32, 2),
        "conv.weight_v": rnd((2, 2, 2), F32, 3),
        "conv.bias": rnd((2,), F32, 4),
    }
    return make_case(view, ck, lambda t, weights: t.module.load_weights(weights), "direct")


def case_weight_assigned_through_its_parametrisation():
    """huggingface/transformers#32194's other half: `module.weight = w` splits w, and gives the
    originals new memory.
    """

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))

        def load_weights(self, weights) -> None:
            for name, w in weights:
                if name == "lin.weight":
                    with torch.no_grad():
                        self.lin.weight = w
                else:
                    self.get_parameter(name).data.copy_(w)

    view = LiveView(fill(Model(), 1))
    ck = {"lin.weight": rnd((3, 2), F32, 2), "lin.bias": rnd((3,), F32, 3)}
    return make_case(
        view,
        ck,
        lambda t, weights: t.module.load_weights(weights),
        {"lin.weight": "either", "lin.bias": "either"},
        rebind=True,
        says=["lin"],
        no_oracle=True,
        updates=[],
    )


def case_leaf_written_with_gradients_on():
    """pytorch/pytorch#391: a view of a leaf is written in place without no_grad; torch refuses,
    and so must the plan, before other names are written.
    """
    T = {"a": rnd((3,), F32, 1), "w": nn.Parameter(rnd((2, 3), F32, 2))}
    ck = {"a": rnd((3,), F32, 3), "w": rnd((2, 3), F32, 4)}

    def load(t, weights):
        for name, w in weights:
            t[name][:] = w

    return make_case(T, ck, load, "direct", plan="error", says=["`w`", "leaf"], updates=[])


# ------------------------------------------------------------------ names, arrival, deltas
@functools.cache
def engine_name(name: str) -> str | None:
    for old, new in (
        ("model.language_model.", "model."),
        ("model.visual.", "visual."),
        ("_orig_mod.", ""),
    ):
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return None if ".rotary." in name else name.replace(".base_layer.", ".")


def case_prefixes_mapped_and_grouped():
    """huggingface/trl#5858, alibaba/ROLL#500, pytorch/pytorch#101107: names of a wrapper, of a
    compiled module, of an adapter; the loader groups the stream by its first part and reads one
    name ahead.
    """
    T = {
        "model.0.w": rnd((2, 3), BF, 1),
        "model.1.w": rnd((2, 3), BF, 2),
        "visual.w": rnd((4,), BF, 3),
        "lm_head": rnd((3,), BF, 4),
    }
    ck = {
        "model.visual.w": rnd((4,), BF, 5),
        "model.language_model.0.base_layer.w": rnd((2, 3), BF, 6),
        "model.language_model.0.rotary.inv_freq": rnd((4,), F32, 7),
        "_orig_mod.model.1.w": rnd((2, 3), BF, 8),
        "lm_head": rnd((3,), BF, 9),
    }

    def load(t, weights):
        renamed = ((new, w) for name, w in weights if (new := engine_name(name)) is not None)
        for _, group in itertools.groupby(renamed, key=lambda item: item[0].split(".")[0]):
            for name, w in group:
                t[name].data.copy_(w)

    names = dict.fromkeys(ck, "direct") | {"model.language_model.0.rotary.inv_freq": "unneeded"}
    return make_case(T, ck, load, names, reuse_buffer=True)


def case_arriving_tensors_with_strides():
    """vllm-project/vllm#50641, verl-project/verl#6919, radixark/miles#1608: a transposed or
    sliced tensor was sent as if its memory were its values.
    """
    T = {
        "t": rnd((3, 2), BF, 1),
        "gap": rnd((3, 2), F32, 2),
        "e": rnd((3, 2), BF, 3),
        "cast": rnd((3,), F32, 4),
        "sum": rnd((2,), F32, 5),
    }
    ck = {
        "t": rnd((4, 3), BF, 6).t(),
        "gap": rnd((3, 5), F32, 7)[:, 1:4],
        "e": rnd((1, 2), BF, 8).expand(3, 2),
        "cast": rnd((6,), BF, 9)[::2],
        "sum": rnd((3, 2), F32, 10).t(),
    }

    def load(t, weights):
        for name, w in weights:
            if name == "sum":
                w = w.sum(1)
            elif w.dim() == 2 and w.shape[1] > 2:
                w = w[:, 1:3]
            t[name].data.copy_(w)

    names = dict.fromkeys(ck, "direct") | {"cast": "either", "sum": "fallback"}
    again = {
        n: rnd(w.shape[::-1], w.dtype, 70 + i).permute(*range(w.dim())[::-1])
        for i, (n, w) in enumerate(ck.items())
    }
    return make_case(T, ck, load, names, updates=[again, new_like(ck, 80)], derived=["cast", "sum"])


def case_other_dtype_arrives_than_declared():
    """NovaSky-AI/SkyRL#1725: one rank kept float32, the receiver expected BF16 and read the bits
    as such.
    """
    T = {"w": rnd((2, 4), BF, 1), "inv_freq": rnd((4,), BF, 2)}
    ck = {"w": rnd((2, 4), BF, 3), "inv_freq": rnd((4,), BF, 4)}
    sent = dict(ck, inv_freq=ck["inv_freq"].float())

    def load(t, weights):
        for name, w in weights:
            t[name].data.copy_(w)

    return make_case(
        T, ck, load, "direct", arrive=sent, finish="error", says=["inv_freq"], updates=[]
    )


def case_sparse_delta_written_at_indices():
    """vllm-project/vllm#40096, huggingface/trl#5937: only changed elements arrive, with their
    places.
    """
    T = {"w": rnd((3, 4), BF, 1), "norm": rnd((4,), BF, 2)}
    ck = {
        "w.indices": torch.tensor([11, 0, 5], dtype=I32),
        "w.values": rnd((3,), BF, 3),
        "norm": rnd((4,), BF, 4),
    }

    def load(t, weights):
        got = dict(weights)
        t["norm"].data.copy_(got["norm"])
        t["w"].data.view(-1).index_copy_(0, got["w.indices"].long(), got["w.values"])

    other = {
        "w.indices": torch.tensor([1, 2, 11], dtype=I32),
        "w.values": rnd((3,), BF, 5),
        "norm": rnd((4,), BF, 6),
    }
    names = {"w.indices": "group", "w.values": "group", "norm": "direct"}
    return make_case(
        T,
        ck,
        load,
        names,
        updates=[other],
        required=["norm"],
        derived=["w.indices", "w.values"],
        no_oracle=True,
    )


def case_sparse_delta_added():
    """kvcache-ai/Mooncake#3747: differences are scattered onto what is live: once for each
    update.
    """
    T = {"w": rnd((12,), F32, 1), "norm": rnd((4,), BF, 2), "rows": rnd((3, 2), F32, 3)}
    ck = {
        "w.indices": torch.tensor([11, 0, 5]),
        "w.delta": rnd((3,), F32, 4),
        "norm": rnd((4,), BF, 5),
        "rows": rnd((2, 2), F32, 6),
    }

    def load(t, weights):
        got = dict(weights)
        t["norm"].data.copy_(got["norm"])
        t["w"].data.scatter_add_(0, got["w.indices"], got["w.delta"])
        t["rows"].data.index_add_(0, torch.tensor([2, 0]), got["rows"])

    def other(seed):
        return new_like(ck, seed) | {"w.indices": torch.tensor([seed % 12, 3, 4])}

    names = {"w.indices": "group", "w.delta": "group", "norm": "direct", "rows": "fallback"}
    return make_case(
        T,
        ck,
        load,
        names,
        updates=[other(61), other(62)],
        required=["norm"],
        derived=["w.indices", "w.delta", "rows"],
        no_oracle=True,
    )


def case_loader_that_wants_all_its_names():
    """vllm-project/vllm#49178: the loader checks at its end that every name of its layer came; a
    part of an update is refused by it, and one of its names is read by value.
    """
    T = {"mtp.w": rnd((2, 3), BF, 1), "mtp.s": rnd((), F32, 2), "norm": rnd((3,), BF, 3)}
    ck = {"mtp.w": rnd((2, 3), BF, 4), "norm": rnd((3,), BF, 5), "mtp.s": rnd((), F32, 6)}

    def load(t, weights):
        seen = set()
        for name, w in weights:
            seen.add(name)
            if name == "mtp.s":
                t[name].fill_(w.item() * 2)
            else:
                t[name].data.copy_(w)
        missing = {"mtp.w", "mtp.s"} - seen
        if missing:
            raise ValueError(f"missing weights of the draft model: {sorted(missing)}")

    names = {"mtp.w": "either", "norm": "either", "mtp.s": "fallback"}
    buckets = [["mtp.w"], ["norm"], ["mtp.s"]]
    return make_case(T, ck, load, names, buckets=buckets, value_read=["mtp.s"])


def case_arriving_tensor_changed_in_place():
    """HabanaAI/vllm-fork#1763: the loader scales what arrives in place, wrapper around wrapper,
    and reads it again under its first name.
    """
    T = {"w": rnd((2, 4), F32, 1), "copy": rnd((4,), F32, 2), "s": rnd((2,), F32, 3)}
    ck = {"w": rnd((2, 4), F32, 4), "s": rnd((2,), F32, 5)}

    def load(t, weights):
        first = {}
        for name, w in weights:
            first.setdefault(name, w[0])
            w.mul_(0.5)
            if name == "s":
                w.div_(w.abs().amax())
            t[name].data.copy_(w)
        t["copy"].data.copy_(first["w"])

    return make_case(T, ck, load, "fallback", derived=["w", "s"])


def case_filled_in_a_copy_and_put_back():
    """vllm-project/vllm#49601's replace_parameter, done in place: rows are set in a copy of the
    live weight, which is written back whole.
    """
    T = {"w": rnd((4, 3), BF, 1), "b": rnd((4,), BF, 2)}
    ck = {"w.0": rnd((2, 3), BF, 3), "b": rnd((4,), BF, 4)}

    def load(t, weights):
        for name, w in weights:
            if name == "b":
                t["b"].data.copy_(w)
                continue
            new = t["w"].data.clone()
            new[1:3] = w
            t["w"].data.copy_(new)

    return make_case(T, ck, load, "direct", required=["b"])


def case_master_weights_through_a_smaller_dtype():
    """NVIDIA-NeMo/RL#2631's kind, per PrimeIntellect-ai/prime-rl#2823: float32 masters are sent
    as BF16 values and kept in float32.
    """
    T = {"w": rnd((2, 3), F32, 1), "x": rnd((2, 3), BF, 2)}
    ck = {"w": rnd((2, 3), F32, 3), "x": rnd((2, 3), BF, 4)}

    def load(t, weights):
        for name, w in weights:
            t[name].data.copy_(w.to(BF).to(t[name].dtype))

    return make_case(T, ck, load, {"w": "fallback", "x": "direct"}, derived=["w"])


def case_coordinates_made_a_sparse_tensor():
    """kvcache-ai/Mooncake#3747: the pieces of a delta are put together as a COO tensor, which no
    plan can follow; what comes beside it is in the same dict.
    """
    T = {"w": rnd((3, 4), F32, 1), "norm": rnd((4,), BF, 2)}
    ck = {
        "w.at": torch.tensor([[0, 2], [1, 3]]),
        "norm": rnd((4,), BF, 3),
        "w.values": rnd((2,), F32, 4),
    }

    def load(t, weights):
        got = dict(weights)
        t["norm"].data.copy_(got["norm"])
        t["w"].data.copy_(torch.sparse_coo_tensor(got["w.at"], got["w.values"], (3, 4)).to_dense())

    other = new_like(ck, 60) | {"w.at": torch.tensor([[2, 0], [1, 1]])}
    names = {"w.at": "group", "w.values": "group", "norm": "either"}
    return make_case(T, ck, load, names, updates=[other], no_oracle=True)


def case_unchanged_tensors_are_skipped():
    """radixark/miles#881: what equals the live bytes is not copied again."""
    T = {"a": rnd((3, 4), BF, 1), "b": rnd((4,), F32, 2)}
    ck = {"a": rnd((3, 4), BF, 3), "b": rnd((4,), F32, 4)}

    def load(t, weights):
        for name, w in weights:
            if not torch.equal(t[name].data, w):
                t[name].data.copy_(w)

    again = {"a": ck["a"].clone(), "b": rnd((4,), F32, 5)}
    return make_case(
        T, ck, load, "fallback", updates=[again], value_read=["a", "b"], required=[], no_oracle=True
    )


def case_flat_buffer_cut_by_the_loader():
    """sgl-project/sglang#8079, #12664: one flat tensor of bytes; views of other dtypes are cut
    from it, one at an offset that its dtype does not divide.
    """
    T = {"a": rnd((3, 4), F32, 1), "b": rnd((3,), BF, 2), "c": rnd((2,), F32, 3)}
    ck = {"flat": rnd((6 + 2 + 48 + 1 + 8,), U8, 4)}

    def load(t, weights):
        for _, w in weights:
            t["b"].data.copy_(w[:6].view(BF))
            t["a"].data.copy_(w[8:56].view(F32).reshape(3, 4))
            t["c"].data.copy_(w[57:].clone().view(F32))

    return make_case(T, ck, load, "direct", boxes={"flat": [((0, 6),), ((8, 56),), ((57, 65),)]})


def quantised(w: Tensor) -> tuple[Tensor, Tensor]:
    scale = w.abs().amax(1, keepdim=True) / 127
    return (w / scale).round().to(I8), scale


class Int8Tensor(Tensor):
    """A wrapper as torchao has them: `copy_` of a plain tensor quantises it."""

    @staticmethod
    def __new__(cls, qdata: Tensor, scale: Tensor):
        return Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=F32)

    def __init__(self, qdata: Tensor, scale: Tensor) -> None:
        self.qdata, self.scale = qdata, scale

    def __tensor_flatten__(self):
        return ["qdata", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["qdata"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].qdata.detach(), args[0].scale.detach())
        assert func is torch.ops.aten.copy_.default, func
        to, w = args[:2]
        qdata, scale = (w.qdata, w.scale) if isinstance(w, cls) else quantised(w)
        to.qdata.copy_(qdata)
        to.scale.copy_(scale)
        return to


def wrapped(load_one) -> dict:
    module = nn.Module()
    inner = Int8Tensor(rnd((3, 4), I8, 1), rnd((3, 1), F32, 2))
    module.w = nn.Parameter(inner, requires_grad=False)
    module.b = nn.Parameter(rnd((3,), F32, 3), requires_grad=False)
    module.load_weights = lambda weights: (
        [load_one(module, name, w) for name, w in weights] and None
    )
    T = MemoryOf(module, **{"w.qdata": inner.qdata, "w.scale": inner.scale, "b": module.b.data})
    return dict(targets=T, load=lambda t, weights: t.module.load_weights(weights))


def case_wrapper_that_quantises_what_is_copied():
    """vllm-project/vllm#14231: the live parameter wraps codes and scales; the loader copies into
    it as into any other, and the wrapper computes both.
    """

    def load_one(module, name, w):
        module.get_parameter(name).data.copy_(w)

    ck = {"w": rnd((3, 4), F32, 5), "b": rnd((3,), F32, 6)}
    return make_case(
        checkpoint=ck,
        names={"w": "fallback", "b": "direct"},
        derived=["w"],
        required=["b"],
        value_read=["w"],
        **wrapped(load_one),
    )


def case_wrapper_filled_part_by_part():
    """huggingface/diffusers#13751: `param.data = ...` of a wrapper changes nothing inside; here
    its parts are copied, each under its own name.
    """

    def load_one(module, name, w):
        owner, _, part = name.partition(".")
        param = getattr(module, owner)
        (getattr(param, part) if part else param).data.copy_(w)

    ck = {"w.qdata": rnd((3, 4), I8, 5), "b": rnd((3,), F32, 6), "w.scale": rnd((3, 1), F32, 7)}
    return make_case(checkpoint=ck, names="direct", **wrapped(load_one))


def case_copy_that_a_parameter_overrides():
    """vllm-project/vllm#37010: for some quantised parameters `copy_` is taken over by
    __torch_function__, and packs.
    """

    class Packed(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is Tensor.copy_:
                with torch._C.DisableTorchFunctionSubclass():
                    codes = (args[1] * 10).round().clamp(-8, 7).to(I8) & 15
                    args[0].data.copy_(codes[:, ::2] | codes[:, 1::2] << 4)
                return args[0]
            return super().__torch_function__(func, types, args, kwargs or {})

    T = {"w": Packed(rnd((3, 2), I8, 1), requires_grad=False), "b": rnd((3,), F32, 2)}
    ck = {"w": rnd((3, 4), F32, 3), "b": rnd((3,), F32, 4)}

    def load(t, weights):
        for name, w in weights:
            t[name].copy_(w)

    return make_case(T, ck, load, {"w": "fallback", "b": "direct"}, derived=["w"])
