"""Updates between processes: trainers' shards into inference ranks, over Gloo.

The whole matrix runs with LOADPLAN_TEST_DIST=1 (`./dev test-dist`), a part of it by default.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import shard_ranks
import torch
import torch.distributed as dist
from safetensors.torch import save_file

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")

WHOLE_MATRIX = os.environ.get("LOADPLAN_TEST_DIST") == "1"


def launched(trainers: tuple[str, ...], receivers: tuple[int, ...]) -> None:
    world = shard_ranks.NUM_TRAINERS + max(receivers)
    reports = shard_ranks.launch(world, shard_ranks.matrix, trainers, receivers)
    # Every rank of every pair of trainers and receivers came to the end.
    expected = sum(shard_ranks.NUM_TRAINERS + size for size in receivers) * len(trainers)
    assert len(reports) == expected
    kinds = {kind for r in reports for kind in r.values.get("kinds", ())}
    assert kinds == {"direct", "derived", "fallback", "unneeded"}
    assert any(r.values.get("in_place", 0) > 0 for r in reports)
    for report in reports:
        if "traffic" in report.values:
            assert 0 < report.values["traffic"] < report.values["broadcast"]


def test_updates_leave_the_bytes_of_the_loader() -> None:
    launched(("fsdp", "megatron"), (3,))


@pytest.mark.skipif(not WHOLE_MATRIX, reason="LOADPLAN_TEST_DIST=1 runs it")
def test_every_number_of_inference_ranks() -> None:
    launched(("fsdp", "megatron"), (2, 3, 4))


def failed(fault: str) -> dict[int, list[dict]]:
    """What each of four ranks raised, where rank 1 has a fault."""
    reports = shard_ranks.launch(4, shard_ranks.failing, fault)
    raised: dict[int, list[dict]] = {}
    for report in reports:
        assert report.label == "raised", report
        raised.setdefault(report.rank, []).append(report.values)
    return raised


def test_another_shape_is_refused_on_every_rank_before_a_byte_moves() -> None:
    raised = failed("shape")
    assert set(raised) == {0, 1, 2, 3}
    for (error,) in raised.values():
        assert (
            "`w` is (4096, 1024) float32 on rank 0 and (4095, 1024) float32 on rank 1"
            in (error["error"])
        )
        assert error["seconds"] < 12  # the time-out is 15 s
        assert error["state"] in (None, "idle")


def test_another_plan_is_refused_on_every_rank() -> None:
    raised = failed("plan")
    assert set(raised) == {0, 1, 2, 3}
    for rank, errors in raised.items():
        assert "another plan than the schedule" in errors[0]["error"]
        assert errors[0]["seconds"] < 12
        assert errors[0]["state"] == (None if rank < 2 else "failed")


def rest_of(reports: list[shard_ranks.Report]) -> list[shard_ranks.Report]:
    """Reports but those of what failed groups leave behind: nothing, as this makes sure."""
    for report in reports:
        if report.label == "rest":
            assert report.values["busy"] < 0.25, report  # of half a second
            assert report.values["destroyed"] < 5, report
    return [report for report in reports if report.label != "rest"]


def test_a_killed_sender_fails_every_rank() -> None:
    reports = rest_of(shard_ranks.launch(4, shard_ranks.failing, "killed"))
    raised = {rank: [r.values for r in reports if r.rank == rank] for rank in range(4)}
    assert raised.pop(1) == []
    for rank, errors in raised.items():
        assert errors[0]["seconds"] < 10, errors  # the time-out is 15 s
        if rank >= 2:
            assert errors[0]["state"] == "failed"
            assert "an earlier exchange of this group failed" in errors[1]["error"]


def test_a_receiver_that_is_killed_half_way_through_a_message_fails_the_sender() -> None:
    """Gloo says nothing to the sender of a message that has begun."""
    (report,) = rest_of(shard_ranks.launch(2, shard_ranks.failing, "killed half way", 1))
    assert report.rank == 0 and report.label == "raised"
    assert report.values["seconds"] < 10, report  # the time-out is 15 s


@pytest.mark.parametrize("dies", [0, 2])
def test_a_killed_rank_fails_every_rank_of_a_broadcast(dies: int) -> None:
    reports = rest_of(shard_ranks.launch(4, shard_ranks.dying_broadcast, dies))
    assert [report.rank for report in reports] == [rank for rank in range(4) if rank != dies]
    for report in reports:
        assert report.label == "raised"
        assert report.values["state"] == (None if report.rank == 0 else "failed")


@pytest.mark.parametrize("fault", ["shards", "broadcast"])
def test_a_rank_that_stops_with_the_store_in_it_fails_the_others(fault: str) -> None:
    reports = shard_ranks.launch(3, shard_ranks.with_the_store, fault, stops=(0,))
    assert [report.label for report in reports] == ["stops", "raised", "raised"]
    for report in reports[1:]:
        # One time-out for the rank, one for the store; it sends for a while before it stops.
        assert report.values["seconds"] < 2 * 3 + 4, report
        assert report.values["state"] == "failed"


@pytest.mark.parametrize("transport", ["shards", "files"])
def test_a_loader_that_raises_on_one_rank_fails_every_rank(transport: str, tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")
    save_file({"w": torch.ones(6, 4), "v": torch.ones(4)}, path)
    reports = shard_ranks.launch(2, shard_ranks.picky_loader, transport, path)
    assert [report.label for report in reports] == ["raised", "rest"] * 2
    for raised, rest in (reports[:2], reports[2:]):
        assert "the loader has no more disk" in raised.values["error"]
        assert raised.values["state"] == "idle" and rest.values["old"], "the update is atomic"


def test_a_rank_out_of_memory_fails_every_rank() -> None:
    raised = failed("memory")
    assert set(raised) == {0, 1, 2, 3}
    for rank, (first, second) in raised.items():
        assert first["seconds"] < 12, first  # the time-out is 15 s
        assert rank == 1 or "rank 1: " in first["error"], first
        assert "an earlier exchange of this group failed" in second["error"]
        assert first["state"] == (None if rank < 2 else "failed")


def test_a_slow_peer_fails_every_rank_within_the_time_out() -> None:
    raised = failed("slow")
    assert set(raised) == {0, 1, 2, 3}
    for rank, errors in raised.items():
        assert errors[0]["seconds"] < 2.0 + 5, errors
        if rank != 1:
            assert "not all of the 4 ranks came within 2 s" in errors[0]["error"]
        assert errors[0]["state"] == (None if rank < 2 else "failed")


def test_a_later_schedule_of_the_same_group_fails_every_rank_too() -> None:
    """What the ranks said to one another in an earlier exchange means nothing in this one."""
    reports = shard_ranks.launch(3, shard_ranks.scheduled_again)
    for rank in range(3):
        first, second = (report for report in reports if report.rank == rank)
        assert first.label == "no error", first
        assert second.label == "raised", (rank, second)
        assert "`v` arrived twice" in second.values["error"]


def test_broadcast_of_whole_tensors() -> None:
    reports = shard_ranks.launch(3, shard_ranks.broadcast, "none")
    assert [report.label for report in reports] == ["updated"] * 3


@pytest.mark.parametrize(
    ("fault", "words"),
    [("sender", "the trainer is out of memory"), ("receiver", "`scale` arrived twice")],
)
def test_a_failed_broadcast_fails_every_rank(fault: str, words: str) -> None:
    reports = shard_ranks.launch(3, shard_ranks.broadcast, fault)
    assert len(reports) == 3
    for report in reports:
        assert words in report.values["error"]
        assert report.values["state"] == (None if report.rank == 0 else "failed")


def test_ranks_read_a_file_together(tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")
    save_file(shard_ranks.checkpoint(7), path)
    reports = shard_ranks.launch(3, shard_ranks.read_together, path)
    assert [report.label for report in reports] == ["read"] * 3
    assert sum(r.values["read"] for r in reports) == reports[0].values["needed"]
    assert all(r.values["read"] > 0 and r.values["received"] > 0 for r in reports)


def test_files_that_one_rank_lacks_fail_every_rank(tmp_path: Path) -> None:
    weights = shard_ranks.checkpoint(7)
    del weights["layers.1.norm.weight"]
    path = str(tmp_path / "model.safetensors")
    save_file(weights, path)
    with pytest.raises(AssertionError, match="`layers.1.norm.weight` is needed and is in none of"):
        shard_ranks.launch(2, shard_ranks.read_together, path)


@pytest.mark.parametrize(
    ("fault", "words"), [("path", "FileNotFoundError"), ("idle", "needs an active reload")]
)
def test_a_rank_that_cannot_read_tells_the_others(tmp_path: Path, fault: str, words: str) -> None:
    path = str(tmp_path / "model.safetensors")
    save_file(shard_ranks.checkpoint(7), path)
    reports = shard_ranks.launch(3, shard_ranks.read_apart, path, fault)
    assert [report.label for report in reports] == ["raised"] * 3
    for report in reports:
        assert words in report.values["error"], report
        assert report.values["seconds"] < 20, report  # the time-out is a minute
        idle = report.rank == 1 and fault == "idle"
        assert report.values["state"] == ("idle" if idle else "failed")
