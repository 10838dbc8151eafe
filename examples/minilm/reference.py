"""The yardstick: an unsharded BERT under the checkpoint's own names, loaded eagerly."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from .checkpoint import Config


class Attention(nn.Module):
    """``attention.self.{query,key,value}`` and ``attention.output.{dense,LayerNorm}``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads = config.num_attention_heads
        names = ("query", "key", "value")
        self.add_module("self", nn.ModuleDict({name: nn.Linear(size, size) for name in names}))
        self.output = Output(config, size)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        parts = self.get_submodule("self")
        batch, length, size = hidden.shape

        def by_head(name: str) -> Tensor:
            return parts[name](hidden).view(batch, length, self.heads, -1).transpose(1, 2)

        query, key, value = by_head("query"), by_head("key"), by_head("value")
        scores = query @ key.transpose(2, 3) / (size // self.heads) ** 0.5
        scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
        context = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, size)
        return self.output(context, hidden)


class Output(nn.Module):
    """``output.{dense,LayerNorm}``: projection back to the hidden size, residual, norm."""

    def __init__(self, config: Config, in_features: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, inner: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(inner) + residual)


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        wide = config.intermediate_size
        self.attention = Attention(config)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(config.hidden_size, wide)})
        self.output = Output(config, wide)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        hidden = self.attention(hidden, mask)
        return self.output(F.gelu(self.intermediate["dense"](hidden)), hidden)


class Embeddings(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        size = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size)
        self.LayerNorm = nn.LayerNorm(size, config.layer_norm_eps)
        self.register_buffer("position_ids", torch.arange(config.max_position_embeddings)[None])

    def forward(self, ids: Tensor) -> Tensor:
        positions = self.position_embeddings(self.position_ids[:, : ids.shape[1]])
        token_types = self.token_type_embeddings(torch.zeros_like(ids))
        return self.LayerNorm(self.word_embeddings(ids) + positions + token_types)


class ReferenceBert(nn.Module):
    """BERT as published.  The pooler is there for its names only: sentence embeddings skip it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layer": layers})
        size = config.hidden_size
        self.pooler = nn.ModuleDict({"dense": nn.Linear(size, size)})

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.embeddings(ids)
        for layer in self.encoder["layer"]:
            hidden = layer(hidden, mask)
        return hidden


def load_reference(config: Config, path: Path) -> ReferenceBert:
    """Every tensor of the file under its own name; a missing or unknown name is an error."""
    with torch.device("meta"):  # no random initialisation of weights that are replaced anyway
        model = ReferenceBert(config)
    model.load_state_dict(load_file(path), strict=True, assign=True)
    return model.eval()


def sentence_embeddings(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean over the real tokens, then unit length, as the checkpoint's ``modules.json`` says."""
    weight = mask[:, :, None].to(hidden.dtype)
    return F.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)
