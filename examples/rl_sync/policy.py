"""The policy as a trainer writes it: a small transformer, every matrix a parameter of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    vocab: int = 500
    size: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    wide: int = 352
    prompt: int = 4
    length: int = 20

    @property
    def head(self) -> int:
        return self.size // self.heads


def rotate(x: Tensor) -> Tensor:
    """Rotary positions of ``x`` (batch, heads, length, head)."""
    half = x.shape[-1] // 2
    speed = 10000.0 ** (-torch.arange(half) / half)
    angle = torch.arange(x.shape[-2])[:, None] * speed
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of (batch, heads, length, head); heads share keys and values in groups."""
    share = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(share, 1) for part in (rotate(key), value))
    context = F.scaled_dot_product_attention(rotate(query), key, value, is_causal=True)
    return context.transpose(1, 2).flatten(2)


def split_heads(x: Tensor, head: int) -> Tensor:
    return x.unflatten(-1, (-1, head)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head = config.head
        kv = config.kv_heads * config.head
        self.q_proj = nn.Linear(config.size, config.size, bias=False)
        self.k_proj = nn.Linear(config.size, kv, bias=False)
        self.v_proj = nn.Linear(config.size, kv, bias=False)
        self.o_proj = nn.Linear(config.size, config.size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = (split_heads(p(x), self.head) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(*parts))


class Mlp(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.size, config.wide, bias=False)
        self.up_proj = nn.Linear(config.size, config.wide, bias=False)
        self.down_proj = nn.Linear(config.wide, config.size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(config.size, eps=1e-6)
        self.self_attn = Attention(config)
        self.post_norm = nn.RMSNorm(config.size, eps=1e-6)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Policy(nn.Module):
    """Logits of the next token, (batch, length, vocab)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.size, eps=1e-6)
        self.lm_head = nn.Linear(config.size, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of each token given those before it, (batch, length - 1)."""
    scores = logits[:, :-1].log_softmax(-1)
    return scores.gather(-1, tokens[:, 1:, None])[..., 0]
