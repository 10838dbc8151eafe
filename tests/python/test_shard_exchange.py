"""Updates between processes: trainers' shards into inference ranks, over Gloo.

The whole matrix runs with LOADPLAN_TEST_DIST=1 (`./dev test-dist`), a part of it by default.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import shard_ranks
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
        assert error["seconds"] < 5
        assert error["state"] in (None, "idle")


def test_another_plan_is_refused_on_every_rank() -> None:
    raised = failed("plan")
    assert set(raised) == {0, 1, 2, 3}
    for rank, errors in raised.items():
        assert "another plan than the schedule" in errors[0]["error"]
        assert errors[0]["seconds"] < 5
        assert errors[0]["state"] == (None if rank < 2 else "failed")


def test_a_killed_sender_fails_every_rank() -> None:
    raised = failed("killed")
    assert set(raised) == {0, 2, 3}  # rank 1 is gone
    for rank, errors in raised.items():
        assert errors[0]["seconds"] < 15, errors
        if rank >= 2:
            assert errors[0]["state"] == "failed"
            assert "an earlier exchange of this group failed" in errors[1]["error"]


def test_a_rank_out_of_memory_fails_every_rank() -> None:
    raised = failed("memory")
    assert set(raised) == {0, 1, 2, 3}
    for rank, (first, second) in raised.items():
        assert first["seconds"] < 5, first  # the time-out is 15 s
        assert rank == 1 or "rank 1: " in first["error"], first
        assert "an earlier exchange of this group failed" in second["error"]
        assert first["state"] == (None if rank < 2 else "failed")


def test_a_slow_peer_fails_every_rank_within_the_time_out() -> None:
    raised = failed("slow")
    assert set(raised) == {0, 1, 2, 3}
    for rank, errors in raised.items():
        assert errors[0]["seconds"] < 2.0 + 1.5, errors
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
