"""Plans the loaders of vLLM 0.33 and compares every live byte with the eager load.

    ./dev test-vllm [--only CASE ...] [--tp 1 4] [--rank R] [-v]
    ./dev test-vllm --large CASE ... | --update CASE ...

Each case is planned as one tensor-parallel rank; two updates with new random weights go through
the one plan.  A second model of the same first bytes loads the same weights eagerly.  Exit code 1:
a byte differs, tracing changed a byte, or a name goes through the loader without need.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import multiprocessing.connection
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import measure
import more_loaders as cases
import torch
from torch import Tensor, nn

import loadplan.vllm
from loadplan import LoadPlan, ParamMeta, Targets

# Names that need the loader (digits folded), and the reason: it asks for the value with `item`, or
# branches on what the update before left in the bytes that the name writes.
READS = "reads its value"
STEERS = "the loader looks at the bytes of"
OVERLAP = "writes too"  # two names of one byte: in the order of their arrival, by the loader
_EXPERTS = "language_model.model.layers.#.feed_forward.experts."
_PROJECTION = "model.layers.#.mlp.experts.#."
_MODELOPT = {
    f"{_EXPERTS}{matrix}_{scale}_scale": READS
    for matrix in ("gate_up_proj", "down_proj")
    for scale in ("weight", "input")
}
MUST_FALL_BACK: dict[str, dict[str, str]] = {
    "llama4_mm_modelopt": _MODELOPT,
    "llama4_mm_modelopt_ep": _MODELOPT,
    # Made anew by each call of the loader: a plan has no memory that it could write.
    "phi": {"lm_head.bias": "`lm_head.bias = ...`"},
    "llama_classify_bias": {"score.bias": "`score.bias = ...`"},
    "dflash_qwen3": {
        "layers.#.self_attn.k_proj.weight": "`model._fused_kv_weight = ...`",
        "layers.#.self_attn.v_proj.weight": "`model._fused_kv_weight = ...`",
        "layers.#.self_attn.k_norm.weight": "`model._k_norm_weights = ...`",
    },
    "qwen3_moe_ct_fp8": {
        _PROJECTION + "gate_proj.input_scale": READS,
        _PROJECTION + "up_proj.input_scale": STEERS,
        _PROJECTION + "down_proj.input_scale": STEERS,
    },
}

Bytes = dict[str, Tensor]
Weights = Iterable[tuple[str, Tensor]]


@dataclass
class Outcome:
    """One row of the table."""

    case: str
    rank: str
    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    fell_back: set[str] = field(default_factory=set)  # names, folded
    names: int = 0
    trace_seconds: float = 0.0
    meta_seconds: float | None = None


def storage_bytes(tensor: Tensor) -> Tensor:
    """The whole storage, padding between rows included."""
    storage = tensor.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def live_bytes(model: nn.Module) -> Bytes:
    """Parameters, buffers and plain tensor attributes."""
    return {name: storage_bytes(tensor).clone() for name, tensor in cases.tensors(model).items()}


def differences(wanted: Bytes, found: Bytes) -> list[str]:
    differing = [f"`{name}` is missing" for name in wanted.keys() ^ found.keys()]
    for name in wanted.keys() & found.keys():
        if wanted[name].shape != found[name].shape:
            differing.append(f"`{name}` has {len(found[name])} bytes, not {len(wanted[name])}")
        elif count := int((wanted[name] != found[name]).sum()):
            differing.append(f"`{name}` differs in {count} of {len(wanted[name])} bytes")
    return sorted(differing)


def fold(text: str) -> str:
    """`layers.3.w2` and `layers.11.w2` alike."""
    return re.sub(r"\d+", "#", text)


def declare(metas: dict[str, cases.Meta]) -> list[ParamMeta]:
    return [ParamMeta(name, shape, dtype) for name, (shape, dtype) in metas.items()]


def targets_of(model: nn.Module) -> Targets:
    return loadplan.vllm.targets(model, model.vllm_case[3])


def update(targets: Targets, plan: LoadPlan, weights: Weights) -> None:
    loadplan.start_reload(targets)
    loadplan.load_planned(targets, plan, weights)
    loadplan.finish_reload(targets)


def seconds_on_meta(case: str, rank: int, size: int, large: bool = False) -> float | None:
    """The same loader on meta tensors: what tracing costs at least.  None: it reads a value."""
    best = None
    try:
        model, metas = cases.build(case, rank, size, device="meta", large=large)
        weights = [
            (name, torch.empty(shape, dtype=dtype, device="meta"))
            for name, (shape, dtype) in metas.items()
        ]
        for _ in range(3):
            start = time.perf_counter()
            cases.load(model, iter(weights))
            seconds = time.perf_counter() - start
            best = seconds if best is None else min(best, seconds)
    except (RuntimeError, NotImplementedError):
        return None
    return best


def run(case: str, rank: int, size: int) -> Outcome:
    outcome = Outcome(case, f"{rank}/{size}")
    model, metas = cases.build(case, rank, size)
    eager, _ = cases.build(case, rank, size)
    with cases.parallel(case, rank, size):
        compare(outcome, model, eager, metas)
    outcome.meta_seconds = seconds_on_meta(case, rank, size)
    return outcome


def compare(
    outcome: Outcome, model: nn.Module, eager: nn.Module, metas: dict[str, cases.Meta]
) -> None:
    case = outcome.case
    cases.fill(model)
    # What a model is made with may be uninitialised: both start from the same bytes.
    of_eager = cases.tensors(eager)
    for name, tensor in cases.tensors(model).items():
        storage_bytes(of_eager[name]).copy_(storage_bytes(tensor))
    before = live_bytes(model)

    targets = targets_of(model)
    start = time.perf_counter()
    plan = loadplan.plan_loads(targets, declare(metas))
    outcome.trace_seconds = time.perf_counter() - start
    outcome.names = len(plan.entries)
    outcome.kinds = Counter(entry.kind for entry in plan.entries.values())
    wrong = differences(before, live_bytes(model))
    outcome.faults += [f"tracing changed a live byte: {text}" for text in wrong]
    must = MUST_FALL_BACK.get(case, {})
    for entry in plan.entries.values():
        if entry.reason:
            outcome.reasons[f"{entry.kind}: {fold(entry.reason)}"] += 1
        if entry.kind == "fallback":
            outcome.fell_back.add(fold(entry.name))
            wanted = must.get(fold(entry.name))
            if entry.reason.endswith(OVERLAP):
                continue
            if wanted is None or wanted not in entry.reason:
                outcome.faults.append(f"`{entry.name}` falls back: {entry.reason}")

    for seed in (1, 2):
        update(targets, plan, cases.weights(case, metas, seed))
        cases.load(eager, cases.weights(case, metas, seed))
        wrong = differences(live_bytes(eager), live_bytes(model))
        outcome.faults += [f"update {seed}: {text}" for text in wrong]


def run_guarded(case: str, rank: int, size: int, verbose: bool) -> Outcome:
    try:
        return run(case, rank, size)
    except Exception as error:
        if verbose:
            traceback.print_exc()
        text = next(iter(str(error).splitlines()), "")
        return Outcome(case, f"{rank}/{size}", faults=[f"{type(error).__name__}: {text}"])
    finally:
        gc.collect()


def send_outcome(sender: Connection, case: str, rank: int, size: int, verbose: bool) -> None:
    sender.send(run_guarded(case, rank, size, verbose))


def run_apart(jobs: list[tuple[str, int, int]], verbose: bool) -> Iterator[Outcome]:
    """Each run in a process of its own, as many at a time as there are processors.

    vLLM's transformers backend changes classes of transformers for good.
    """
    for case in ("llama", "mixtral"):
        run_guarded(case, 0, 1, verbose)  # imports vLLM and warms the operators, once for all
    fork = multiprocessing.get_context("fork")
    waiting, running = jobs[::-1], {}
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            job = waiting.pop()
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=send_outcome, args=(sender, *job, verbose))
            process.start()
            sender.close()
            running[receiver] = process, job
        for ready in multiprocessing.connection.wait(list(running)):
            process, (case, rank, size) = running.pop(ready)
            try:
                outcome = ready.recv()
            except EOFError:
                outcome = Outcome(case, f"{rank}/{size}", faults=["the process died"])
            process.join()
            yield outcome


def print_row(outcome: Outcome) -> None:
    counts = "".join(f"{outcome.kinds[kind]:>10}" for kind in KINDS)
    meta = outcome.meta_seconds
    compared = (
        "         -      -"
        if not meta
        else f"{meta * 1e3:10.1f}" + (f"{outcome.trace_seconds / meta:7.2f}")
    )
    verdict = f"{len(outcome.faults)} faults" if outcome.faults else "ok"
    print(
        f"{outcome.case:29}{outcome.rank:>5}{outcome.names:>7}{counts}"
        f"{outcome.trace_seconds * 1e3:10.1f}{compared}  {verdict}",
        flush=True,
    )


KINDS = ("direct", "derived", "fallback", "unneeded")
HEADER = (
    f"{'case':29}{'rank':>5}{'names':>7}"
    + "".join(f"{kind:>10}" for kind in KINDS)
    + f"{'plan ms':>10}{'meta ms':>10}{'ratio':>7}"
)


def print_large(case: str, rank: int, size: int) -> None:
    """Real sizes, parameters on meta: planned, and the same loader on meta tensors."""
    model, metas = cases.build(case, rank, size, device="meta", large=True)
    outcome = Outcome(case, f"{rank}/{size}", names=len(metas))
    targets, declared = targets_of(model), declare(metas)
    for _ in range(3):
        with cases.parallel(case, rank, size):
            plan = loadplan.plan_loads(targets, declared)
        if not outcome.trace_seconds or plan.trace_seconds < outcome.trace_seconds:
            outcome.trace_seconds = plan.trace_seconds
    outcome.kinds = Counter(entry.kind for entry in plan.entries.values())
    outcome.meta_seconds = seconds_on_meta(case, rank, size, large=True)
    print_row(outcome)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=cases.cases(), metavar="CASE")
    parser.add_argument("--tp", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--rank", type=int, help="another rank than 1 of 4, 0 of 1")
    parser.add_argument("--large", nargs="*", metavar="CASE", help="time real sizes on meta, TP 8")
    parser.add_argument("--update", nargs="*", metavar="CASE", help="time one update, real sizes")
    parser.add_argument("-v", "--verbose", action="store_true", help="print tracebacks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.update is not None:
        print(measure.HEADER)
        return 0 if all([measure.measure(case, 1, 8) for case in arguments.update]) else 1
    print(HEADER)
    if arguments.large is not None:
        for case in arguments.large:
            print_large(case, 1, 8)
        return 0
    jobs = [
        (case, min(1, size - 1) if arguments.rank is None else arguments.rank, size)
        for case in arguments.only
        for size in arguments.tp
        if size in cases.sizes(case)
    ]
    outcomes = []
    for outcome in run_apart(jobs, arguments.verbose):
        print_row(outcome)
        outcomes.append(outcome)
    totals = sum((outcome.kinds for outcome in outcomes), Counter())
    print("names: " + ", ".join(f"{totals[kind]} {kind}" for kind in KINDS))
    for reason, count in sum((outcome.reasons for outcome in outcomes), Counter()).most_common():
        print(f"{count:6}  {reason}")
    faults = [
        f"{outcome.case} {outcome.rank}: {text}" for outcome in outcomes for text in outcome.faults
    ]
    # Some rank may hold none of the experts whose scales fall back.
    for case in sorted({outcome.case for outcome in outcomes}):
        fell_back = set().union(*(o.fell_back for o in outcomes if o.case == case))
        left = MUST_FALL_BACK.get(case, {}).keys() - fell_back
        faults += [f"{case}: `{name}` falls back no more: say so" for name in sorted(left)]
    for text in faults:
        print(f"FAULT {text}")
    configurations = len({outcome.case for outcome in outcomes})
    print(f"{configurations} configurations, {len(outcomes)} runs, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
