"""What a plan file saves a restart: Kimi-K2's 69,975 names planned, saved and loaded.

    python bench/plan_file_k2.py [--parallel tp|ep] [--repeat 5]

Planning is the rival: it runs the loader once (that of trace_k2.py, its expert mapping indexed).
Loading includes all that `loadplan.load_plan` compares. CPU seconds, best of the repetitions.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import trace_k2

import loadplan


def best(count: int, work: Callable[[], Any]) -> tuple[float, Any]:
    seconds, result = [], None
    for _ in range(count):
        start = time.process_time()
        result = work()
        seconds.append(time.process_time() - start)
    return min(seconds), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallel", choices=("tp", "ep"), default="tp")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    metas = [loadplan.ParamMeta(*name) for name in trace_k2.checkpoint_names(61)]
    engine = trace_k2.Engine(61, options.parallel == "ep", True)
    targets = loadplan.Targets(engine.params, load_weights=engine.load_weights)
    planning, plan = best(1, lambda: loadplan.plan_loads(targets, metas))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "k2.loadplan")
        saving, _ = best(options.repeat, lambda: plan.save(path))
        loading, loaded = best(options.repeat, lambda: loadplan.load_plan(path, targets))
        size = os.path.getsize(path) / 1e6
    if len(loaded.entries) != len(metas) or loaded.report() != plan.report():
        raise SystemExit("the loaded plan is another one: nothing was measured")
    print(f"K2/{options.parallel.upper()}8: {len(metas):,} names, {size:.1f} MB (target <= 20)")
    print(f"plan_loads {planning:.2f} s; save {saving:.3f} s, load_plan {loading:.3f} s of CPU")
    print(f"load_plan / plan_loads: {loading / planning:.3f}; targets <= 0.1 s each")


if __name__ == "__main__":
    main()
