"""The reinforcement-learning demo in small: it proves its own bytes and log-probabilities."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")


def test_two_trainers_and_two_engine_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    from examples.rl_sync.demo import Setup, launch
    from examples.rl_sync.policy import Config

    config = Config(vocab=150, size=32, layers=2, heads=4, kv_heads=2, wide=48, length=10)
    launch(Setup(trainers=2, engine=2, steps=2, config=config))
    printed = capfd.readouterr().out
    assert "step 1: reward" in printed
    assert "bytes of the engine equal the eager loader's" in printed
    assert "times as many" in printed
