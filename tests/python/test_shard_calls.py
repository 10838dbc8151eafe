"""Updates between processes in which some rank does what the others do not expect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import shard_calls
import shard_ranks
import torch
import torch.distributed as dist
from safetensors.torch import save_file

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")

FAULTS = {
    "other ranks": "rank 0 says that rank 7 holds [3:6, 0:4], and there is no such rank",
    "no shards": "`w` has no shards",
    "memory": "scheduling: ",
    "thread": "a thread for the store of the process group",
    "swapped": "is at another update or schedule than rank",
    "broadcasts": "where rank",
    "schedules": "all ranks have to make the same calls",
    "missing": "missing='no'; expected 'error' or 'skip'",
    "another missing": "schedules with other options than rank",
    "time-out": "`timeout`, `max_bytes_in_flight` and `bucket_nbytes` have to be positive",
    "kind of time-out": "Expected a value of type 'float'",
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


@pytest.mark.parametrize("transport", ["shards", "files"])
def test_a_signal_on_one_rank_fails_every_rank(transport: str, tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")
    save_file({"w": torch.ones(6, 4)}, path)
    reports = shard_ranks.launch(3, shard_calls.interrupted, transport, path)
    assert [report.label for report in reports] == ["raised", "rest"] * 3
    for raised, rest in zip(reports[::2], reports[1::2], strict=True):
        words = "interrupted" if raised.rank == 1 else "rank 1: KeyboardInterrupt"
        assert words in raised.values["error"], raised
        assert raised.values["seconds"] < 45, raised  # the time-out is 60
        assert rest.values["old"], rest


# A header, its text, the bucket: what one rank leaves out the others wait for.
@pytest.mark.parametrize(("rank", "count"), [(0, 4), (0, 5), (1, 2), (1, 5)])
def test_a_message_that_is_broadcast_in_part_fails_every_rank(rank: int, count: int) -> None:
    reports = shard_ranks.launch(3, shard_calls.half_sent, rank, count)
    assert [report.label for report in reports] == ["raised"] * 3
    words = "KeyboardInterrupt" if rank == 0 else "no memory for it"
    for report in reports:
        assert report.rank == rank or words in report.values["error"], report
        assert report.values["seconds"] < 45, report  # the time-out is 60


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["1", "2"], "reads other files than rank"),
        (["1", "undeclared"], "reads other files|holds `x` which was not declared"),
        (["undeclared"], "holds `x` which was not declared when the plan was made"),
        (["1", "no such file \udcff"], "does not exist"),
    ],
)
def test_ranks_that_give_other_files(files: list[str], words: str, tmp_path: Path) -> None:
    """Of one checkpoint each rank would take a part from another's."""
    for file in ("1", "2"):
        save_file({"w": torch.full((6, 4), float(file))}, tmp_path / file)
    save_file({"w": torch.ones(6, 4), "x": torch.ones(2)}, tmp_path / "undeclared")
    paths = [str(tmp_path / file) for file in files]
    reports = shard_ranks.launch(2, shard_calls.files_of_their_own, paths, {})
    assert [report.label for report in reports] == ["raised"] * 2
    for report in reports:
        assert re.search(words, report.values["error"]), report
        assert report.values["seconds"] < 45, report  # the time-out is 60
    if files == ["undeclared"]:
        skip = {"undeclared": "skip"}
        reports = shard_ranks.launch(2, shard_calls.files_of_their_own, paths, skip)
        assert [report.label for report in reports] == ["no error"] * 2
