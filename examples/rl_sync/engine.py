"""The policy as an inference engine holds it: fused, padded, one tensor-parallel rank a process.

Nothing in this file knows that loads can be planned, or that there is a trainer.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .policy import Config, attend, split_heads

VOCAB_MULTIPLE = 64  # engines pad the vocabulary so that every rank gets the same, aligned, share


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, float("nan")), requires_grad=False)


class EngineLayer(nn.Module):
    def __init__(self, config: Config, size: int) -> None:
        super().__init__()
        self.head = config.head
        self.heads, self.kv_heads = config.heads // size, config.kv_heads // size
        self.qkv = weight((self.heads + 2 * self.kv_heads) * self.head, config.size)
        self.o = weight(config.size, self.heads * self.head)
        self.gate_up = weight(2 * config.wide // size, config.size)
        self.down = weight(config.size, config.wide // size)
        self.input_norm = weight(config.size)
        self.post_norm = weight(config.size)

    def attention(self, x: Tensor) -> Tensor:
        """A partial sum over ranks."""
        sizes = [n * self.head for n in (self.heads, self.kv_heads, self.kv_heads)]
        parts = F.linear(x, self.qkv).split(sizes, -1)
        return F.linear(attend(*(split_heads(part, self.head) for part in parts)), self.o)

    def mlp(self, x: Tensor) -> Tensor:
        """A partial sum over ranks."""
        gate, up = F.linear(x, self.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down)


class Engine(nn.Module):
    """Rank ``rank`` of ``size``, which talk through ``group``."""

    def __init__(
        self, config: Config, rank: int, size: int, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__()
        self.config, self.rank, self.size, self.group = config, rank, size, group
        multiple = VOCAB_MULTIPLE * size
        self.share = -(-config.vocab // multiple) * VOCAB_MULTIPLE
        self.embed = weight(self.share, config.size)
        self.lm_head = weight(self.share, config.size)
        self.norm = weight(config.size)
        self.layers = nn.ModuleList(EngineLayer(config, size) for _ in range(config.layers))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, loaded in weights:
            parts = name.removesuffix(".weight").split(".")
            layer = self.layers[int(parts[1])] if parts[0] == "layers" else None
            self._load(layer, parts[-1], loaded)

    def _load(self, layer: nn.Module | None, kind: str, loaded: Tensor) -> None:
        if kind in ("embed_tokens", "lm_head"):
            rows = (self.embed if kind == "embed_tokens" else self.lm_head).data
            first = self.rank * self.share
            real = min(self.config.vocab - first, self.share)
            rows[:real].copy_(loaded.narrow(0, first, real))
            rows[real:].zero_()
        elif layer is None:
            self.norm.data.copy_(loaded)
        elif kind in ("q_proj", "k_proj", "v_proj"):
            place = {"q_proj": 0, "k_proj": layer.heads, "v_proj": layer.heads + layer.kv_heads}
            self._rows(layer.qkv, place[kind] * layer.head, loaded)
        elif kind in ("gate_proj", "up_proj"):
            half = self.config.wide // self.size
            self._rows(layer.gate_up, half if kind == "up_proj" else 0, loaded)
        elif kind in ("o_proj", "down_proj"):
            param = layer.o if kind == "o_proj" else layer.down
            count = loaded.shape[1] // self.size
            param.data.copy_(loaded.narrow(1, self.rank * count, count))
        else:
            getattr(layer, kind).data.copy_(loaded)

    def _rows(self, param: nn.Parameter, at: int, loaded: Tensor) -> None:
        """This rank's rows of ``loaded`` at row ``at`` of a fused weight."""
        count = loaded.shape[0] // self.size
        param.data.narrow(0, at, count).copy_(loaded.narrow(0, self.rank * count, count))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, (batch, length, vocab), on every rank."""
        local = tokens - self.rank * self.share
        mine = (local >= 0) & (local < self.share)
        x = self._sum(F.embedding(local.where(mine, 0), self.embed) * mine[..., None])
        for layer in self.layers:
            x = x + self._sum(layer.attention(F.rms_norm(x, x.shape[-1:], layer.input_norm, 1e-6)))
            x = x + self._sum(layer.mlp(F.rms_norm(x, x.shape[-1:], layer.post_norm, 1e-6)))
        logits = F.linear(F.rms_norm(x, x.shape[-1:], self.norm, 1e-6), self.lm_head)
        shares = [torch.empty_like(logits) for _ in range(self.size)]
        dist.all_gather(shares, logits.contiguous(), group=self.group)
        return torch.cat(shares, -1)[..., : self.config.vocab]

    def _sum(self, partial: Tensor) -> Tensor:
        dist.all_reduce(partial, group=self.group)
        return partial

    @torch.no_grad()
    def generate(self, prompts: Tensor, seed: int) -> Tensor:
        """Samples up to the full length; every rank draws the same tokens."""
        generator = torch.Generator().manual_seed(seed)
        tokens = prompts
        while tokens.shape[1] < self.config.length:
            chances = self(tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
        return tokens
