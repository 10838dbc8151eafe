"""Loaders that exchange tensors with the other ranks leave what an eager call leaves."""

from __future__ import annotations

import loader_collectives
import pytest
import shard_ranks
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")

# Rank 1 looks at no weight of its own in these.
RECEIVERS = ("send", "scatter_into_scratch", "distribute")


def test_what_a_collective_exchanges_goes_through_the_loader() -> None:
    reports = shard_ranks.launch(2, loader_collectives.of_one_name)
    assert len(reports) == 2 * len(loader_collectives.OF_ONE_NAME)
    for report in reports:
        # What this rank only receives has no name, so that every name goes through the loader.
        receives = report.rank == 1 and report.values["load"] in RECEIVERS
        others = "fallback" if receives else "direct"
        assert report.values["kinds"] == {"a": "fallback", "b": others}, report
        assert "exchanges tensors with other processes" in report.values["reasons"]["a"], report
        assert ".py:" in report.values["reasons"]["a"], report


def test_live_tensors_that_are_exchanged_make_every_name_a_fallback() -> None:
    for report in shard_ranks.launch(2, loader_collectives.of_live_tensors):
        assert report.values["kinds"] == {"a": "fallback", "b": "fallback"}, report
        assert "exchanges tensors with other processes" in report.values["reasons"]["a"], report


def test_tensors_of_the_loader_that_are_exchanged_make_every_name_a_fallback() -> None:
    for report in shard_ranks.launch(2, loader_collectives.of_own_tensors):
        assert report.values["kinds"] == {"a": "fallback", "b": "fallback"}, report
        assert "`c10d::allreduce_` exchanges tensors" in report.values["reasons"]["a"], report


def test_a_barrier_costs_nothing() -> None:
    for report in shard_ranks.launch(2, loader_collectives.of_none):
        assert report.values["kinds"] == {"a": "direct", "b": "direct"}, report
