"""Layerwise reloads of vLLM 0.33 models by plan, against vLLM's own load and post-processing.

    ./dev test-vllm layerwise [--only CASE ...] [--measure CASE ...] [-v]

Each case: a model is recorded, loaded and processed as vLLM does it; two updates go through one
plan.  After each, every tensor (parameters, buffers, plain attributes) has the bytes of a fresh
model that loaded the same weights and was processed, at the addresses of before.
"""

from __future__ import annotations

import argparse
import gc
import sys
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import measure_layerwise
import torch
import vllm_loaders as cases
from torch import Tensor, nn

import loadplan
import loadplan.vllm

DEFAULT = [
    "llama",
    "qwen2_tied",
    "llama_padded_vocab",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "mamba2",
    "qwen2_vl",
    "llama_fp8_block",
    "llama_gptq",
    "llama_awq",
    "gpt_oss_mxfp4",
]


cases._case(
    "llama_awq",
    "llama",
    "LlamaForCausalLM",
    cases.txt(
        **cases._Q,
        quantization_config={
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "zero_point": True,
            "version": "gemm",
        },
    ),
    metas=cases._int4("awq"),
    dtype=torch.float16,
)


def repacked(weight: Tensor) -> Tensor:
    """Other bytes in the same shape."""
    return weight.transpose(-1, -2).contiguous().view(weight.shape)


def prepack(weight: Tensor, output: Tensor, isa: str) -> None:
    output.copy_(repacked(weight))


def define_packing() -> None:
    """What only a CPU build of vLLM brings: it packs for kernels, which no test here runs."""
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("prepack_moe_weight(Tensor weight, Tensor(a!) output, str isa) -> ()")
    library.define("convert_weight_packed(Tensor weight) -> Tensor")
    library.define("causal_conv1d_weight_pack(Tensor weight) -> Tensor")
    library.define(
        "convert_weight_packed_scale_zp(Tensor weight, Tensor zeros, Tensor scales, int algorithm)"
        " -> (Tensor, Tensor, Tensor)"
    )
    library.impl("prepack_moe_weight", prepack, "CPU")
    library.impl("convert_weight_packed", repacked, "CPU")
    library.impl("causal_conv1d_weight_pack", repacked, "CPU")
    library.impl(
        "convert_weight_packed_scale_zp",
        lambda weight, zeros, scales, _: (repacked(weight), repacked(zeros), repacked(scales)),
        "CPU",
    )
    cases._KEEP.append(library)


def process(model: nn.Module) -> None:
    """vLLM's own post-processing."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    name, rank, size, config = model.vllm_case
    dtype = config.model_config.dtype
    with (
        cases.tensor_parallel(rank, size),
        set_current_vllm_config(config),
        cases._default_dtype(dtype),
    ):
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))


def build(case: str, rank: int, size: int) -> tuple[nn.Module, dict[str, cases.Meta]]:
    """Memory that nobody writes holds the same in every model."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return cases.build(case, rank, size)
    finally:
        torch.use_deterministic_algorithms(False)


def inner(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from inner(item, f"{path}[{index}]")


def tensors(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for mapping in (module._parameters, module._buffers, vars(module)):
            for name, value in mapping.items():
                if not name.startswith("_") or isinstance(value, Tensor):
                    found.update(inner(value, f"{path}.{name}"))
    return found


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def addresses(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        name: (t.data_ptr(), tuple(t.shape), t.stride(), t.dtype)
        for name, t in tensors(model).items()
    }


def differences(wanted: nn.Module, found: nn.Module) -> list[str]:
    ours, theirs = tensors(wanted), tensors(found)
    wrong = [f"`{name}` is on one side only" for name in ours.keys() ^ theirs.keys()]
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            wrong.append(f"`{name}`: {tuple(b.shape)} {b.dtype}, not {tuple(a.shape)} {a.dtype}")
        elif not torch.equal(raw(a), raw(b)):
            count = int((raw(a) != raw(b)).sum())
            wrong.append(f"`{name}` differs in {count} of {a.nbytes} bytes")
    return sorted(wrong)


def run(case: str, rank: int, size: int) -> tuple[list[str], str]:
    model, metas = build(case, rank, size)
    loadplan.record_metadata_for_reloading(model)
    cases.load(model, cases.weights(case, metas, 0))
    load_format = addresses(model)
    process(model)
    kernel_format = addresses(model)
    changed = sum(load_format.get(name) != place for name, place in kernel_format.items())
    faults: list[str] = []
    targets = loadplan.vllm.targets(model, model.vllm_case[3])
    plan = None
    peak = 0
    with cases.tensor_parallel(rank, size):
        for seed in (1, 2):
            loadplan.start_reload(targets, mode="layerwise")
            if plan is None:
                declared = [loadplan.ParamMeta(n, s, d) for n, (s, d) in metas.items()]
                plan = loadplan.plan_loads(targets, declared)
            loadplan.load_planned(targets, plan, cases.weights(case, metas, seed))
            receipt = loadplan.finish_reload(targets)
            peak = max(peak, receipt.peak_staging_nbytes)
            fresh, _ = build(case, rank, size)
            cases.load(fresh, cases.weights(case, metas, seed))
            process(fresh)
            faults += [f"update {seed}: {text}" for text in differences(fresh, model)]
            now = addresses(model)
            moved = [name for name, place in kernel_format.items() if now.get(name) != place]
            faults += [f"update {seed}: `{name}` moved" for name in moved]
    kinds = {k: sum(e.kind == k for e in plan.entries.values()) for k in ("direct", "fallback")}
    total = sum(p.nbytes for p in model.parameters())
    return faults, (
        f"{len(metas):6}{kinds['direct']:8}{kinds['fallback']:10}{changed:9}"
        f"{peak / 1e3:12.1f}{total / 1e3:12.1f}"
    )


def run_lora(rank: int, size: int) -> list[str]:
    """Base layers under LoRA take the checkpoint's names; what LoRA added stays."""
    from vllm.lora.layers import MergedQKVParallelLinearWithLoRA, RowParallelLinearWithLoRA

    model, metas = build("llama", rank, size)
    loadplan.record_metadata_for_reloading(model)
    cases.load(model, cases.weights("llama", metas, 0))
    process(model)
    with cases.tensor_parallel(rank, size):
        for layer in model.model.layers:
            layer.self_attn.qkv_proj = MergedQKVParallelLinearWithLoRA(layer.self_attn.qkv_proj)
            layer.self_attn.o_proj = RowParallelLinearWithLoRA(layer.self_attn.o_proj)
        places = addresses(model)
        targets = loadplan.vllm.targets(model, model.vllm_case[3])
        loadplan.start_reload(targets, mode="layerwise")
        declared = [loadplan.ParamMeta(n, s, d) for n, (s, d) in metas.items()]
        plan = loadplan.plan_loads(targets, declared)
        loadplan.load_planned(targets, plan, cases.weights("llama", metas, 1))
        loadplan.finish_reload(targets)
    fresh, _ = build("llama", rank, size)
    cases.load(fresh, cases.weights("llama", metas, 1))
    process(fresh)
    ours = {name.replace(".base_layer", ""): tensor for name, tensor in tensors(model).items()}
    faults = [
        f"`{name}` differs"
        for name, tensor in tensors(fresh).items()
        if not torch.equal(raw(ours[name]), raw(tensor))
    ]
    return faults + [f"`{name}` moved" for name, p in addresses(model).items() if places[name] != p]


def run_placement() -> list[str]:
    """A plan that was made for experts elsewhere is refused before any write."""
    model, metas = build("mixtral", 0, 1)
    loadplan.record_metadata_for_reloading(model)
    cases.load(model, cases.weights("mixtral", metas, 0))
    process(model)
    experts = next(m for m in model.modules() if type(m).__name__ == "RoutedExperts")
    state = vars(experts)["eplb_state"] = SimpleNamespace()
    state.logical_to_physical_map = torch.arange(4)
    before = {name: raw(tensor).clone() for name, tensor in tensors(model).items()}
    targets = loadplan.vllm.targets(model, model.vllm_case[3])
    with cases.tensor_parallel(0, 1):
        loadplan.start_reload(targets, mode="layerwise")
        declared = [loadplan.ParamMeta(n, s, d) for n, (s, d) in metas.items()]
        plan = loadplan.plan_loads(targets, declared)
        state.logical_to_physical_map = torch.tensor([1, 0, 2, 3])
        try:
            loadplan.load_planned(targets, plan, cases.weights("mixtral", metas, 1))
        except RuntimeError as error:
            faults = [] if "placement has changed" in str(error) else [str(error)]
        else:
            faults = ["another placement was not refused"]
        loadplan.abort_reload(targets)
    after = tensors(model)
    return faults + [
        f"`{n}` differs" for n, b in before.items() if not torch.equal(raw(after[n]), b)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=DEFAULT, metavar="CASE")
    parser.add_argument("--tp", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--measure", nargs="*", metavar="CASE", help="against vLLM's own reload")
    parser.add_argument("-v", "--verbose", action="store_true", help="print tracebacks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    define_packing()
    if arguments.measure is not None:
        print(measure_layerwise.HEADER)
        same = [measure_layerwise.measure(case, 1, 8, process) for case in arguments.measure]
        return 0 if all(same) else 1
    print(
        f"{'case':22}{'rank':>5}{'names':>6}{'direct':>8}{'fallback':>10}{'changed':>9}"
        f"{'staged kB':>12}{'model kB':>12}"
    )
    count = 0
    for case in arguments.only:
        for size in arguments.tp:
            rank = min(1, size - 1)
            try:
                faults, row = run(case, rank, size)
            except Exception as error:
                if arguments.verbose:
                    traceback.print_exc()
                text = next(iter(str(error).splitlines()), "")
                faults, row = [f"{type(error).__name__}: {text}"], ""
            count += len(faults)
            verdict = f"{len(faults)} faults" if faults else "ok"
            print(f"{case:22}{f'{rank}/{size}':>5}{row}  {verdict}", flush=True)
            for text in faults[:8]:
                print(f"FAULT {case} {rank}/{size}: {text}")
            gc.collect()
    if arguments.only is DEFAULT:
        for name, faults in (
            ("LoRA 0/1", run_lora(0, 1)),
            ("LoRA 1/4", run_lora(1, 4)),
            ("placement", run_placement()),
        ):
            print(f"{name:22}  {len(faults)} faults" if faults else f"{name:22}  ok")
            for text in faults[:8]:
                print(f"FAULT {name}: {text}")
            count += len(faults)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
