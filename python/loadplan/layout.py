"""Where a Megatron-like trainer keeps what: degrees of parallelism, patterns of names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from .metadata import ParamMeta

Box: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees, and which names they cut.  All patterns are searched for in the checkpoint's name.

    Ranks count tensor-parallel first: ``rank = tp_rank + tp * (dp_rank + dp * stage)``.  Within a
    stage, experts lie on the same ``tp * dp`` ranks in another order: ``etp`` ranks share an expert
    and count first, then ``ep`` groups of them hold different experts, the rest are replicas.

    ``tp_dims``: the dimension that tensor parallelism cuts, by pattern; the first that is found
    counts, and a name that no pattern is found in is whole on every rank.  Cuts are even.
    ``expert``: its first group is the number of an expert, of ``num_experts`` in all.
    ``layer``: its first group is the number of a layer, of ``num_layers`` in all, which stages hold
    in even blocks, or in ``vpp`` even blocks each, dealt out in turns (interleaved stages);
    ``stages`` gives the stage of names that belong to no layer.

    Layouts that this does not describe (uneven cuts, fused tensors, layers dealt out by hand) are
    written as explicit `Shards`.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    tp_dims: Mapping[str, int] = field(default_factory=dict)
    expert: str | None = None
    num_experts: int = 0
    layer: str | None = None
    num_layers: int = 0
    stages: Mapping[str, int] = field(default_factory=dict)
    vpp: int = 1

    def __post_init__(self) -> None:
        for degree in ("tp", "dp", "pp", "ep", "etp", "vpp"):
            if getattr(self, degree) < 1:
                raise ValueError(f"{degree}={getattr(self, degree)}; a degree is 1 or more")
        if (self.tp * self.dp) % (self.ep * self.etp) != 0:
            raise ValueError(
                f"ep={self.ep} times etp={self.etp} does not divide tp={self.tp} times dp={self.dp}"
            )
        if self.expert is not None and (self.num_experts < 1 or self.num_experts % self.ep != 0):
            raise ValueError(f"{self.num_experts} experts cannot be dealt evenly to ep={self.ep}")
        blocks = self.pp * self.vpp
        if self.pp > 1 and (self.layer is None or self.num_layers % blocks != 0):
            times = f" times vpp={self.vpp}" if self.vpp > 1 else ""
            raise ValueError(
                f"pp={self.pp}{times} needs `layer` and a `num_layers` that it divides "
                f"(it is {self.num_layers})"
            )

    @property
    def num_ranks(self) -> int:
        """Of the trainer; ranks are counted from 0."""
        return self.tp * self.dp * self.pp

    def pieces(self, meta: ParamMeta) -> list[tuple[int, Box]]:
        """(rank, box) of every shard of a tensor; ValueError where it cannot be cut evenly."""
        whole: Box = tuple((0, extent) for extent in meta.shape)
        first = self._stage(meta.name) * self.tp * self.dp
        expert = self._number(self.expert, meta.name)
        if expert is not None and expert >= self.num_experts:
            raise ValueError(f"`{meta.name}` is of expert {expert} of {self.num_experts}")
        cut = self.tp if expert is None else self.etp
        dim = next((d for p, d in self.tp_dims.items() if re.search(p, meta.name)), None)
        pieces = []
        for rank in range(self.tp * self.dp):
            if expert is not None:
                group = rank // self.etp % self.ep
                if expert // (self.num_experts // self.ep) != group:
                    continue
            pieces.append((first + rank, self._cut(meta, whole, dim, rank % cut, cut)))
        return pieces

    @staticmethod
    def _cut(meta: ParamMeta, whole: Box, dim: int | None, index: int, count: int) -> Box:
        if dim is None or count == 1:
            return whole
        if not -len(whole) <= dim < len(whole):
            raise ValueError(f"`{meta.name}` of shape {tuple(meta.shape)} has no dimension {dim}")
        dim %= len(whole)
        extent = meta.shape[dim]
        if extent % count != 0:
            raise ValueError(
                f"dimension {dim} of `{meta.name}` has {extent} elements, which {count} ranks "
                "cannot share evenly; describe it by explicit shards"
            )
        step = extent // count
        return (*whole[:dim], (index * step, (index + 1) * step), *whole[dim + 1 :])

    @staticmethod
    def _number(pattern: str | None, name: str) -> int | None:
        found = re.search(pattern, name) if pattern is not None else None
        if found is None:
            return None
        if not found.re.groups or not (found[1] or "").isdecimal():
            raise ValueError(
                f"the first group of {pattern!r} is no number in `{name}`; put the number's "
                r"digits in brackets, as (\d+)"
            )
        return int(found[1])

    def _stage(self, name: str) -> int:
        if self.pp == 1:
            return 0
        layer = self._number(self.layer, name)
        if layer is not None:
            if layer >= self.num_layers:
                raise ValueError(f"`{name}` is in layer {layer} of {self.num_layers}")
            return layer // (self.num_layers // (self.pp * self.vpp)) % self.pp
        for pattern, stage in self.stages.items():
            if re.search(pattern, name):
                return stage
        raise ValueError(f"`{name}` belongs to no layer; give its stage in `stages`")
