"""Updates between processes in which some rank does what the others do not expect."""

from __future__ import annotations

import pytest
import shard_calls
import shard_ranks
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")

FAULTS = {
    "other ranks": "rank 0 says that rank 7 holds [3:6, 0:4], and there is no such rank",
    "no shards": "`w` has no shards",
    "memory": "scheduling: ",
    "thread": "a thread for the store of the process group",
    "swapped": "is at another update or schedule than rank",
    "broadcasts": "where rank",
    "schedules": "all ranks have to make the same calls",
    "no model": "cannot create weak reference to 'dict' object",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_rank_hears_at_once(fault: str) -> None:
    world = 3 if fault in ("memory", "thread") else 2
    reports = shard_ranks.launch(world, shard_calls.same_calls, fault)
    assert [report.label for report in reports] == ["raised"] * world
    for report in reports:
        assert FAULTS[fault] in report.values["error"], report
        assert report.values["seconds"] < 45, report  # the time-out is 60


def test_shards_follow_parameters_that_are_moved() -> None:
    reports = shard_ranks.launch(3, shard_calls.moved)
    assert [report.label for report in reports] == ["sent", "sent", "received"]


@pytest.mark.parametrize("case", ["part_of_the_names", "in_own_memory"])
def test_ranks_that_train_and_infer(case: str) -> None:
    reports = shard_ranks.launch(2, getattr(shard_calls, case))
    assert [report.label for report in reports] == ["updated"] * 2


def test_broadcast_out_of_one_buffer() -> None:
    """A sender may use the memory of a tensor again as soon as the next one is asked for."""
    reports = shard_ranks.launch(3, shard_calls.broadcast, "one buffer")
    assert [report.label for report in reports] == ["no error"] * 3


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no plan", "a rank that receives gives its model and its plan"),
        ("no weights", "rank 0 gives `weights` and no model"),
    ],
)
def test_broadcast_without_what_it_needs(case: str, words: str) -> None:
    reports = shard_ranks.launch(3, shard_calls.broadcast, case)
    assert [report.label for report in reports] == ["raised"] * 3
    for report in reports:
        assert words in report.values["error"], report
        assert report.values["seconds"] < 20, report
