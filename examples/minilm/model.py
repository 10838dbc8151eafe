"""BERT the way an inference engine holds it: fused and sharded, one module per rank.

What the loader below does to the checkpoint is the everyday work of engines: it renames, narrows
by rank, fuses query, key and value into one matrix, pads the vocabulary, and skips what it does
not serve.  Nothing in this file knows that loads can be planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checkpoint import Config

VOCAB_MULTIPLE = 64  # engines pad the vocabulary so that every rank gets the same, aligned, share


@dataclass(frozen=True)
class Rank:
    index: int
    size: int


def parameter(*shape: int, loader: Callable[..., None]) -> nn.Parameter:
    """An uninitialised parameter that carries its own way of being loaded."""
    result = nn.Parameter(torch.empty(*shape), requires_grad=False)
    result.weight_loader = loader
    return result


def load_whole(param: Tensor, loaded: Tensor) -> None:
    assert param.shape == loaded.shape, f"expected {param.shape}, got {loaded.shape}"
    param.data.copy_(loaded)


class VocabParallelEmbedding(nn.Module):
    """Rows ``[index * share, (index + 1) * share)`` of the padded vocabulary."""

    def __init__(self, rows: int, size: int, rank: Rank) -> None:
        super().__init__()
        self.rows = rows
        multiple = VOCAB_MULTIPLE * rank.size
        self.share = -(-rows // multiple) * VOCAB_MULTIPLE
        self.first = rank.index * self.share
        self.weight = parameter(self.share, size, loader=self.load)

    def load(self, param: Tensor, loaded: Tensor) -> None:
        real = min(self.rows - self.first, self.share)
        param.data[:real].copy_(loaded.narrow(0, self.first, real))
        param.data[real:].fill_(0)

    def forward(self, ids: Tensor) -> Tensor:
        """Zero for ids of other ranks, so that the sum over ranks is the lookup."""
        local = ids - self.first
        mine = (local >= 0) & (local < self.share)
        return F.embedding(local.where(mine, 0), self.weight) * mine[..., None]


class ColumnParallelLinear(nn.Module):
    """``parts`` matrices, each cut into row blocks by rank, stacked into one weight."""

    def __init__(self, size: int, outputs: int, rank: Rank, parts: Sequence[str] = ("",)) -> None:
        super().__init__()
        self.rank, self.parts, self.share = rank, tuple(parts), outputs // rank.size
        rows = self.share * len(self.parts)
        self.weight = parameter(rows, size, loader=self.load)
        self.bias = parameter(rows, loader=self.load)

    def load(self, param: Tensor, loaded: Tensor, part: str = "") -> None:
        place = param.data.narrow(0, self.parts.index(part) * self.share, self.share)
        place.copy_(loaded.narrow(0, self.rank.index * self.share, self.share))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A column block of the matrix.  The bias is whole everywhere and added by rank 0 alone."""

    def __init__(self, inputs: int, size: int, rank: Rank) -> None:
        super().__init__()
        self.rank, self.share = rank, inputs // rank.size
        self.weight = parameter(size, self.share, loader=self.load)
        self.bias = parameter(size, loader=load_whole)

    def load(self, param: Tensor, loaded: Tensor) -> None:
        param.data.copy_(loaded.narrow(1, self.rank.index * self.share, self.share))

    def forward(self, inner: Tensor) -> Tensor:
        return F.linear(inner, self.weight, self.bias if self.rank.index == 0 else None)


class Layer(nn.Module):
    def __init__(self, config: Config, rank: Rank) -> None:
        super().__init__()
        size, wide, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.heads = config.num_attention_heads // rank.size
        self.qkv = ColumnParallelLinear(size, size, rank, parts=("q", "k", "v"))
        self.out = RowParallelLinear(size, size, rank)
        self.attention_norm = nn.LayerNorm(size, eps)
        self.up = ColumnParallelLinear(size, wide, rank)
        self.down = RowParallelLinear(wide, size, rank)
        self.norm = nn.LayerNorm(size, eps)

    def attend(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """This rank's heads; a partial sum of the attention output."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(hidden).chunk(3, dim=-1)
        )
        keys = mask[:, None, None, :]
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=keys)
        return self.out(context.transpose(1, 2).flatten(2))

    def expand(self, hidden: Tensor) -> Tensor:
        """This rank's columns of the wide layer; a partial sum of its output."""
        return self.down(F.gelu(self.up(hidden)))


class BertRank(nn.Module):
    """What one rank of the engine holds."""

    FUSED = (  # (in the checkpoint's name, in the parameter's name, part)
        (".attention.self.query.", ".qkv.", "q"),
        (".attention.self.key.", ".qkv.", "k"),
        (".attention.self.value.", ".qkv.", "v"),
    )
    RENAMED = (
        ("embeddings.LayerNorm.", "embedding_norm."),
        ("embeddings.word_", "word_"),
        ("embeddings.position_", "position_"),
        ("embeddings.token_type_", "token_type_"),
        ("encoder.layer.", "layers."),
        (".attention.output.dense.", ".out."),
        (".attention.output.LayerNorm.", ".attention_norm."),
        (".intermediate.dense.", ".up."),
        (".output.dense.", ".down."),
        (".output.LayerNorm.", ".norm."),
    )
    SKIPPED = ("pooler.", "embeddings.position_ids")  # the engine serves mean-pooled embeddings

    def __init__(self, config: Config, rank: Rank) -> None:
        super().__init__()
        size = config.hidden_size
        self.word_embeddings = VocabParallelEmbedding(config.vocab_size, size, rank)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size)
        self.embedding_norm = nn.LayerNorm(size, config.layer_norm_eps)
        layers = (Layer(config, rank) for _ in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads this rank's share of a checkpoint; returns the names of the parameters written."""
        params = dict(self.named_parameters())
        loaded: set[str] = set()
        for name, weight in weights:
            if name.startswith(self.SKIPPED):
                continue
            for theirs, ours, part in self.FUSED:
                if theirs in name:
                    name = name.replace(theirs, ours)
                    extra: tuple[str, ...] = (part,)
                    break
            else:
                extra = ()
            for theirs, ours in self.RENAMED:
                name = name.replace(theirs, ours)
            param = params[name]
            getattr(param, "weight_loader", load_whole)(param, weight, *extra)
            loaded.add(name)
        return loaded


def all_reduce(partials: Iterable[Tensor]) -> Tensor:
    """What a collective does between processes: every rank goes on with the sum."""
    return torch.stack(list(partials)).sum(0)


def forward(ranks: Sequence[BertRank], ids: Tensor, mask: Tensor) -> Tensor:
    """All ranks in lock step in one process, each with its own copy of what is replicated."""
    words = all_reduce(rank.word_embeddings(ids) for rank in ranks)
    positions = torch.arange(ids.shape[1])
    hidden = [
        rank.embedding_norm(
            words + rank.position_embeddings(positions) + rank.token_type_embeddings.weight[0]
        )
        for rank in ranks
    ]
    for layers in zip(*(rank.layers for rank in ranks), strict=True):
        total = all_reduce(layer.attend(h, mask) for layer, h in zip(layers, hidden, strict=True))
        hidden = [layer.attention_norm(total + h) for layer, h in zip(layers, hidden, strict=True)]
        total = all_reduce(layer.expand(h) for layer, h in zip(layers, hidden, strict=True))
        hidden = [layer.norm(total + h) for layer, h in zip(layers, hidden, strict=True)]
    return hidden[0]
