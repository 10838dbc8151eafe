"""More configurations of vLLM 0.33 loaders, in the manner of `vllm_loaders.py`.

That file stays as first written; this one has the same protocol (`cases`, `build`, `weights`,
`load`, `tensors`, `fill`), serves the cases of both, and adds what the first cannot say: stages of
a pipeline, redundant experts, models without a transformers class.

    python more_loaders.py --check [--tp 1 4] [--only NAME ...] [-v]
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import vllm_loaders as base
from vllm_loaders import Meta, fill, tensors, weights

FAMILIES = (
    "dense",
    "experts",
    "hybrids",
    "multimodal",
    "encoders",
    "drafts",
    "quantised",
    "places",
)

PIPELINE: dict[str, tuple[int, int]] = {}  # case -> (stage, stages)
CHANGES: dict[str, Callable[[Any], None]] = {}  # case -> what it changes in the VllmConfig
NAMED_BY_VLLM: dict[str, Callable[..., Any]] = {}  # case -> names of its metas, see `unfused`

__all__ = ["Meta", "build", "cases", "fill", "load", "parallel", "sizes", "tensors", "weights"]


def case(
    name: str,
    model_type: str,
    arch: str,
    kw: dict,
    *,
    pipeline: tuple[int, int] | None = None,
    change: Callable[[Any], None] | None = None,
    unfuse: Callable[..., Any] | None = None,
    **more: Any,
) -> None:
    """Adds a case.  ``unfuse``: names of the checkpoint come from vLLM's model, renamed by it."""
    assert name not in base._CASES, name
    if pipeline:
        PIPELINE[name] = pipeline
    if change:
        CHANGES[name] = change
    if unfuse:
        NAMED_BY_VLLM[name] = unfuse
    base._case(name, model_type, arch, kw, **more)


def plain_config(model_type: str, name: str = "PlainConfig") -> Callable[..., Any]:
    """A config class for a model whose own class is not part of transformers."""

    def make(**kw: Any) -> Any:
        from transformers import AutoConfig, PretrainedConfig

        cls = type(name, (PretrainedConfig,), {"model_type": model_type})
        AutoConfig.register(model_type, cls, exist_ok=True)
        return cls(**kw)

    return make


def cases() -> list[str]:
    for family in FAMILIES:
        importlib.import_module(f"loaders_{family}")
    return base.cases()


def sizes(name: str) -> tuple[int, ...]:
    """The sizes of tensor parallelism that a case can have."""
    return base._CASES[name].tp


# --------------------------------------------------------------------------- ranks


@contextlib.contextmanager
def pipeline(stage: int, stages: int) -> Iterator[None]:
    """vLLM believes it is one stage of a pipeline inside."""
    from vllm.distributed import parallel_state

    base._start()
    group = parallel_state.get_pp_group()
    old = vars(group).copy()
    group.ranks, group.rank = list(range(stages)), stage
    group.rank_in_group, group.world_size = stage, stages
    try:
        yield
    finally:
        vars(group).update(old)


@contextlib.contextmanager
def parallel(name: str, rank: int, size: int) -> Iterator[None]:
    """The rank that a case was built for, its stage included."""
    with pipeline(*PIPELINE.get(name, (0, 1))), base.tensor_parallel(rank, size):
        yield


# --------------------------------------------------------------------------- building


def _vllm_config(name: str, tp_size: int = 1, large: bool = False) -> Any:
    """The first file's, without prefix caching, which some models cannot have."""
    import tempfile

    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        ParallelConfig,
        VllmConfig,
    )

    one = base._CASES[name]
    folder = tempfile.mkdtemp(prefix=f"{name}_", dir=base._TMP.name)
    base.config(name, large).save_pretrained(folder)
    config = VllmConfig(
        model_config=ModelConfig(
            model=folder,
            skip_tokenizer_init=True,
            dtype=one.dtype,
            enforce_eager=True,
            max_model_len=32,
            **one.model_kw,
        ),
        cache_config=CacheConfig(enable_prefix_caching=False),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),
        load_config=LoadConfig(load_format="dummy"),
    )
    config.parallel_config.tensor_parallel_size = tp_size
    config.parallel_config.enable_expert_parallel = one.ep
    if change := CHANGES.get(name):
        change(config)
    return config


class _Claims:
    """A platform that says that it is CUDA where a layer asks whether its kernel could run."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cuda_alike(self) -> bool:
        return True


def _start() -> None:
    """Also what only other platforms have: chosen when a model is made, and never run here."""
    global _started
    if _started:
        return
    _started = True
    _plain_start()
    from vllm.model_executor.layers.fused_moe import config as experts
    from vllm.platforms.cpu import CpuPlatform
    from vllm.triton_utils import triton
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    _allow_kernels()
    experts.current_platform = _Claims(experts.current_platform)
    if not hasattr(triton, "set_allocator"):
        triton.set_allocator = lambda allocate: None
    choose = CpuPlatform.get_attn_backend_cls.__func__

    def choose_dense(cls: Any, backend: Any, attn_selector_config: Any, **more: Any) -> Any:
        dense = attn_selector_config._replace(use_sparse=False)
        if attn_selector_config.use_sparse:
            # A processor with AMX has another one, which does not take what sparse layers give.
            backend = AttentionBackendEnum.CPU_MLA
        return choose(cls, backend, attn_selector_config=dense, **more)

    CpuPlatform.get_attn_backend_cls = classmethod(choose_dense)
    # No attention runs here: processors without AVX512-BF16 or AMX keep such caches as well.
    attention = AttentionBackendEnum.CPU_ATTN.get_class()
    attention.supports_kv_cache_dtype = classmethod(lambda cls, kv_cache_dtype: True)


class _Kernel:
    """Stands for a kernel that would multiply quantised matrices."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        self.config = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kw: None

    @classmethod
    def get_supported_act_types(cls) -> list:
        return []


def _allow_kernels() -> None:
    """Where vLLM finds no kernel for a quantised layer on this machine, the first of its list."""
    import pkgutil

    from vllm.model_executor.layers import quantization
    from vllm.model_executor.layers.fused_moe import oracle, unquantized_fused_moe_method

    def try_first(choose: Callable[..., Any], instead: Callable[[], Any]) -> Callable[..., Any]:
        def chosen(*args: Any, **kw: Any) -> Any:
            try:
                return choose(*args, **kw)
            except Exception:
                return instead()

        return chosen

    chosen: dict[str, Callable[..., Any]] = {}
    for info in pkgutil.iter_modules(oracle.__path__):
        module = importlib.import_module(f"{oracle.__name__}.{info.name}")
        backends = {
            k.lower(): v for k, v in vars(module).items() if k.lower().endswith("moebackend")
        }
        for name, function in list(vars(module).items()):
            if name.startswith("select_") and name.endswith("_moe_backend"):
                kind = name[len("select_") : -len("_moe_backend")].split("_")[-1]
                enum = backends.get(f"{kind.replace('_', '')}moebackend") or next(
                    iter(backends.values()), None
                )
                if enum is not None:
                    first = getattr(enum, "TRITON", None) or next(iter(enum))
                    chosen[name] = try_first(function, lambda first=first: (first, None))
    modules = [unquantized_fused_moe_method]
    for info in pkgutil.walk_packages(quantization.__path__, f"{quantization.__name__}."):
        with contextlib.suppress(Exception):
            modules.append(importlib.import_module(info.name))
    for module in modules:
        for name in list(vars(module)):
            if name in chosen:
                # The first file has chosen for these two.
                if module.__name__.endswith(("quantization.fp8", "quantization.mxfp4")):
                    continue
                setattr(module, name, chosen[name])
            elif name == "choose_mp_linear_kernel":
                setattr(module, name, try_first(getattr(module, name), lambda: _Kernel))
            elif name.startswith("init_") and name.endswith("_linear_kernel"):
                setattr(module, name, try_first(getattr(module, name), _Kernel))


_started = False
_plain_start = base._start
base._start = _start


_plain_metas = base._metas


@functools.cache
def _metas(name: str, large: bool) -> dict[str, Meta]:
    unfuse = NAMED_BY_VLLM.get(name)
    if unfuse is None:
        return _plain_metas(name, large)
    from vllm.model_executor.model_loader.utils import initialize_model

    one = base._CASES[name]
    config = base.vllm_config(name, 1, large)
    with base.tensor_parallel(0, 1), base._default_dtype(one.dtype):
        model = initialize_model(config)
    metas = {unfuse(key): meta for key, meta in unfused(model).items()}  # None: not on disk
    metas.pop(None, None)
    return one.metas(metas, base.config(name, large)) if one.metas else metas


base.vllm_config = _vllm_config
base._metas = _metas


def build(name: str, rank: int = 0, size: int = 1, **more: Any) -> Any:
    base._start()
    base.metas(name, more.get("large", False))  # of the whole model, not of one stage
    with pipeline(*PIPELINE.get(name, (0, 1))):
        return base.build(name, rank, size, **more)


def load(model: torch.nn.Module, pairs: Any) -> object:
    with pipeline(*PIPELINE.get(model.vllm_case[0], (0, 1))):
        return base.load(model, pairs)


# --------------------------------------------------------------------------- names

_PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def unfused(model: torch.nn.Module) -> dict[str, Meta]:
    """What a checkpoint of vLLM's own model, built as one rank, holds: fused parameters apart."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    packed = {**_PACKED, **(getattr(model, "packed_modules_mapping", None) or {})}
    out: dict[str, Meta] = {}
    seen: set[int] = set()  # a parameter of two modules has one name on disk
    for path, module in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        for kind, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{kind}" if path else kind
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if isinstance(module, RoutedExperts) and kind.startswith(("w13_", "w2_")):
                at = parent if leaf == "routed_experts" else path
                out.update(_experts_apart(at, kind, parameter))
                continue
            shape, dtype = tuple(parameter.shape), parameter.dtype
            if isinstance(module, VocabParallelEmbedding):
                shape = (module.org_vocab_size, *shape[1:])
            sizes = None
            if isinstance(module, QKVParallelLinear):
                kv = module.total_num_kv_heads
                value = getattr(module, "v_head_size", module.head_size)
                query = module.total_num_heads * module.head_size
                sizes = [query, kv * module.head_size, kv * value]
            elif isinstance(module, MergedColumnParallelLinear):
                sizes = module.output_sizes
            names = packed.get(leaf)
            if sizes is None or names is None or len(names) != len(sizes):
                out[name] = shape, dtype
                continue
            for part, extent in zip(names, _extents(parameter, sizes), strict=True):
                out[f"{parent}.{part}.{kind}"] = extent, dtype
    return out


def _extents(parameter: torch.Tensor, sizes: list[int]) -> list[tuple[int, ...]]:
    """The shapes of the parts of a fused parameter, packed or a scale as it may be."""
    from vllm.model_executor.parameter import PerTensorScaleParameter

    shape = tuple(parameter.shape)
    if isinstance(parameter, PerTensorScaleParameter):
        return [()] * len(sizes)
    dim = getattr(parameter, "output_dim", None if parameter.dtype == torch.int64 else 0)
    if dim is None or shape[dim] == 1:
        return [shape] * len(sizes)
    parts = [-(-shape[dim] * size // sum(sizes)) for size in sizes]
    return [(*shape[:dim], part, *shape[dim + 1 :]) for part in parts]


def _experts_apart(at: str, kind: str, parameter: torch.Tensor) -> dict[str, Meta]:
    part, ending = kind.split("_", 1)
    shape, dtype = tuple(parameter.shape[1:]), parameter.dtype
    out = {}
    for expert in range(parameter.shape[0]):
        if part == "w2":
            out[f"{at}.{expert}.down_proj.{ending}"] = shape, dtype
            continue
        half = shape
        if shape == (2,):
            half = ()
        elif (
            len(shape) > 1
            and "input_scale" not in ending
            and "shape" not in ending
            or "bias" in ending
        ):
            dim = min(int(getattr(parameter, "is_transposed", False)), len(shape) - 1)
            half = (*shape[:dim], shape[dim] // 2, *shape[dim + 1 :])
        out[f"{at}.{expert}.gate_proj.{ending}"] = half, dtype
        out[f"{at}.{expert}.up_proj.{ending}"] = half, dtype
    return out


if __name__ == "__main__":
    import argparse
    import sys

    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tp", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--only", nargs="*")
    parser.add_argument("-v", "--verbose", action="store_true")
    arguments = parser.parse_args()
    sys.modules["more_loaders"] = sys.modules["__main__"]
    every = cases()
    base.build, base.load = build, load
    if arguments.check:
        sys.exit(bool(base.check(arguments.only or every, arguments.tp, arguments.verbose)))
    print("\n".join(every))
