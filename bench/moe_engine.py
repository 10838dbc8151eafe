"""The loader of an engine, as engines write it for models with experts: what benchmarks run.

A dict of parameters, each with its own weight loader; fused projections found in a list of
substrings, experts by a scan of `(param_name, weight_name, expert_id, shard_id)`.  *Indexed*: the
same with that table in a dict, the best that such a loader can be.  Of rank 1 of 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

RANK, RANKS = 1, 8

Weights: TypeAlias = Iterable[tuple[str, Tensor]]
Fused: TypeAlias = tuple[str, str, int]  # param_name, weight_name, part
ExpertRoute: TypeAlias = tuple[str, str, int, str]  # param_name, weight_name, expert_id, shard_id

EXPERT_PARTS = (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))


def load_whole(param: Tensor, loaded: Tensor) -> None:
    assert param.shape == loaded.shape
    param.data.copy_(loaded)


def load_rows(param: Tensor, loaded: Tensor) -> None:
    """Column parallel: this rank's block of rows."""
    share = param.shape[0]
    param.data.copy_(loaded.narrow(0, RANK * share, share))


def load_columns(param: Tensor, loaded: Tensor) -> None:
    """Row parallel: this rank's block of columns."""
    share = param.shape[1]
    param.data.copy_(loaded.narrow(1, RANK * share, share))


def load_part_of_rows(param: Tensor, loaded: Tensor, part: int) -> None:
    """Several projections of one height in one parameter, each cut by rank."""
    share = loaded.shape[0] // RANKS
    place = param.data.narrow(0, part * share, share)
    place.copy_(loaded.narrow(0, RANK * share, share))


@dataclass(frozen=True)
class ExpertLoader:
    """Cuts every expert by rank, or keeps whole experts of which this rank has a block."""

    local_of: dict[int, int]
    cut: bool

    def __call__(self, param: Tensor, loaded: Tensor, shard_id: str, expert_id: int) -> bool:
        local = self.local_of.get(expert_id, -1)
        if local == -1:
            return False
        expert = param.data[local]
        if shard_id == "w2":
            if self.cut:
                share = expert.shape[1]
                loaded = loaded.narrow(1, RANK * share, share)
            expert.copy_(loaded)
            return True
        share = expert.shape[0] // 2
        if self.cut:
            loaded = loaded.narrow(0, RANK * share, share)
        expert.narrow(0, 0 if shard_id == "w1" else share, share).copy_(loaded)
        return True


class Engine:
    """The parameters of one rank, zeros on ``device``, and `load_weights`."""

    def __init__(
        self, experts: int, fused: Sequence[Fused], *, indexed: bool, device: str = "cpu"
    ) -> None:
        self.params: dict[str, Tensor] = {}
        self.fused = fused
        self.indexed = indexed
        self.device = device
        self.routes: list[ExpertRoute] = [
            ("experts.w2_" if shard == "w2" else "experts.w13_", f"experts.{e}.{name}.", e, shard)
            for e in range(experts)
            for shard, name in EXPERT_PARTS
        ]
        self.route_of = {route[1]: [route] for route in self.routes}

    def add(
        self,
        name: str,
        loader: Callable[..., object],
        *shape: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        data = torch.zeros(shape, dtype=dtype, device=self.device)
        param = nn.Parameter(data, requires_grad=False)
        param.weight_loader = loader
        self.params[name] = param

    def routes_for(self, name: str) -> list[ExpertRoute]:
        """All routes, for the scan; or the one that fits, where the mapping is indexed."""
        if not self.indexed:
            return self.routes
        _, found, rest = name.partition(".mlp.experts.")
        return self.route_of["experts." + rest.removesuffix("weight")] if found else []

    def load_weights(self, weights: Weights) -> set[str]:
        params = self.params
        written: set[str] = set()
        for name, loaded in weights:
            if "rotary_emb.inv_freq" in name:
                continue
            for param_name, weight_name, part in self.fused:
                if weight_name not in name or "mlp.experts." in name:
                    continue
                name = name.replace(weight_name, param_name)
                param = params[name]
                param.weight_loader(param, loaded, part)
                break
            else:
                is_expert = False
                for param_name, weight_name, expert_id, shard_id in self.routes_for(name):
                    if weight_name not in name:
                        continue
                    is_expert = True
                    mapped = name.replace(weight_name, param_name)
                    param = params[mapped]
                    if param.weight_loader(param, loaded, shard_id=shard_id, expert_id=expert_id):
                        name = mapped
                        break
                else:
                    if is_expert:  # an expert of another rank
                        continue
                    param = params[name]
                    param.weight_loader(param, loaded)
            written.add(name)
        return written
