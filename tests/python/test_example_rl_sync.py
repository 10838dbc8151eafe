"""The reinforcement-learning demo in small: it proves its own bytes and log-probabilities."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")

PROGRAM = """
from examples.rl_sync.demo import Setup, launch
from examples.rl_sync.policy import Config

config = Config(vocab=150, size=32, layers=2, heads=4, kv_heads=2, wide=48, length=10)
launch(Setup(trainers=2, engine=2, steps=2, config=config))
"""


def test_two_trainers_and_two_engine_ranks() -> None:
    # A process of its own: ranks print where the server that forks them printed when it began, in
    # this process where an earlier test had it begin.
    root = Path(__file__).parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "step 1: reward" in run.stdout
    assert "bytes of the engine equal the eager loader's" in run.stdout
    assert "times as many" in run.stdout
