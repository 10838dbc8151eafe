"""Where the elements of a DTensor lie, on every rank of its mesh."""

from __future__ import annotations

import functools
import itertools
from typing import Any, TypeAlias

import torch
from torch import Tensor

Run: TypeAlias = tuple[int, int]  # [start, stop) of a dimension
LocalBox: TypeAlias = tuple[
    tuple[Run, ...], tuple[slice, ...]
]  # the box; where in the local tensor


def is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def boxes_of_dtensor(name: str, tensor: Any) -> dict[int, list[LocalBox]]:
    """By rank of the mesh.  A strided shard has several boxes, an empty one has none."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    for placement in tensor.placements:
        if placement.is_partial():
            raise ValueError(
                f"`{name}` is {placement}: a partial value is on no rank; redistribute it first"
            )
        # A class of its own may cut in a way of its own.
        if type(placement) not in (Replicate, Shard, _StridedShard):
            raise ValueError(
                f"`{name}` is placed by {placement!r}, which is not known here; write its boxes "
                "out as explicit `Shards`"
            )
    return _boxes(tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements))


@functools.lru_cache(maxsize=4096)
def _boxes(
    shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]
) -> dict[int, list[LocalBox]]:
    key = _placement_keys(placements)
    result: dict[int, list[LocalBox]] = {}
    for coordinate in itertools.product(*(range(extent) for extent in mesh.mesh.shape)):
        rank = int(mesh.mesh[coordinate])
        runs = [
            _runs(extent, dim, tuple(mesh.mesh.shape), key)[coordinate]
            for dim, extent in enumerate(shape)
        ]
        result[rank] = [_local_box(parts) for parts in itertools.product(*runs)]
    return result


def _local_box(parts: tuple[tuple[Run, int], ...]) -> LocalBox:
    box = tuple(run for run, _ in parts)
    where = tuple(slice(at, at + stop - start) for (start, stop), at in parts)
    return box, where


def _placement_keys(placements: tuple[Any, ...]) -> tuple[tuple[int, int] | None, ...]:
    """(tensor dimension, split factor) of each mesh dimension; None where it replicates."""
    return tuple(
        None if p.is_replicate() else (p.dim, int(getattr(p, "split_factor", 1)))
        for p in placements
    )


@functools.lru_cache(maxsize=4096)
def _runs(
    extent: int,
    dim: int,
    mesh_shape: tuple[int, ...],
    placements: tuple[tuple[int, int] | None, ...],
) -> dict[tuple[int, ...], list[tuple[Run, int]]]:
    """For each coordinate of the mesh the runs of ``dim`` that it holds, and where they lie there.

    The placements cut the list of all indices, as they cut a tensor: what a placement does is asked
    of the placement.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    parts: dict[tuple[int, ...], Tensor] = {(): torch.arange(extent)}
    for size, placed in zip(mesh_shape, placements, strict=True):
        cut: dict[tuple[int, ...], Tensor] = {}
        for coordinate, indices in parts.items():
            if placed is None or placed[0] != dim:
                pieces = [indices] * size
            else:
                split_factor = placed[1]
                placement = (
                    Shard(0) if split_factor == 1 else _StridedShard(0, split_factor=split_factor)
                )
                pieces, _ = placement._split_tensor(
                    indices, size, with_padding=False, contiguous=False
                )
            for i, piece in enumerate(pieces):
                cut[(*coordinate, i)] = piece
        parts = cut
    return {coordinate: _runs_of(indices) for coordinate, indices in parts.items()}


def _runs_of(indices: Tensor) -> list[tuple[Run, int]]:
    if indices.numel() == 0:
        return []
    breaks = (indices.diff() != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    stops = [*breaks.tolist(), indices.numel()]
    return [
        ((int(indices[start]), int(indices[stop - 1]) + 1), start)
        for start, stop in zip(starts, stops, strict=True)
    ]
