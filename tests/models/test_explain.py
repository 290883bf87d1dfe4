"""Attention maps and rollout, against dense matrices that the oracle's counts give."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dilated_attention import reference
from dilated_attention.models import AttentionMap, SlideEncoder
from tests.models.golden import COORDS, PATTERN, TILES, UNION, small
from tests.over_ranks import changed

ONE, PLACES = TILES[:1], COORDS[:1]


def model(**options: Any) -> SlideEncoder:
    return changed(small(**{"pattern": PATTERN, "depth": 3} | options).double())


@torch.no_grad()
def dense(encoder: SlideEncoder) -> list[Tensor]:
    """The attention of each layer as a matrix, (H, N, N), zero keys left out."""
    found = []
    for layer, x in zip(encoder.encoder.layers, encoder._explained(ONE, PLACES, None), strict=True):
        attn = layer.self_attn
        q, k, _ = attn.project(layer.self_attn_layer_norm(x))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
        counts, zeros = reference.key_counts(attn.pattern, x.shape[1], attn.num_heads, None, False, 1, q)
        weights = counts.sum(0) * scores.exp()
        found.append((weights / (weights.sum(-1, keepdim=True) + zeros))[0])
    return found


def joined(found: AttentionMap) -> Tensor:
    return torch.cat([found.cls.unsqueeze(-1), found.tiles], dim=-1)


close = functools.partial(torch.testing.assert_close, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("pattern", [PATTERN, UNION])
@pytest.mark.parametrize("query", ["cls", 0, np.int64(7), 22, 40])
def test_a_map_is_a_row_of_the_matrix(query: Any, pattern: Any) -> None:
    encoder = model(pattern=pattern)
    wanted = torch.stack(dense(encoder))
    row = 0 if query == "cls" else query + 1
    found = encoder.attention_map(ONE, PLACES, query, layer=None)
    close(joined(found), wanted[:, :, row])
    close(joined(found).sum(-1) + found.zeros, torch.ones(3, 4, dtype=torch.float64))
    assert bool(found.zeros.any()) == (
        pattern is PATTERN and query in (22, 40)
    )  # where 42 tokens do not fill a segment
    for layer, head in ((0, 1), (-1, np.int64(3)), (1, None)):
        some = encoder.attention_map(ONE, PLACES, query, layer=layer, head=head)
        close(joined(some), wanted[layer, slice(None) if head is None else head, row])
    assert encoder.attention_map(ONE, PLACES, query, head=0).tiles.shape == (41,)


@pytest.mark.parametrize(("query", "global_pool"), [(None, False), (None, True), ("mean", False), (5, True)])
def test_a_rollout_is_the_product_of_the_matrices(query: Any, global_pool: bool) -> None:
    encoder = model(global_pool=global_pool)
    product = torch.eye(42, dtype=torch.float64)
    for weights in dense(encoder):
        product = (weights.mean(0) + torch.eye(42, dtype=torch.float64)) / 2 @ product
    wanted = (
        product[1:].mean(0)
        if query == "mean" or (query is None and global_pool)
        else product[query + 1 if query else 0]
    )
    found = encoder.rollout(ONE, PLACES, query)
    close(joined(found), wanted)
    close(joined(found).sum() + found.zeros, torch.tensor(1.0, dtype=torch.float64))
    assert found.zeros > 1e-4
    close(joined(encoder.rollout(ONE[0], PLACES[0], query)), wanted)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"query": 41}, "query must be 'cls' or from 0 to 40"),
        ({"query": "mean"}, "query must be"),
        ({"layer": 3}, "layer must be from -3 to 2"),
        ({"head": -5}, "head must be from -4 to 3"),
        ({"tiles": TILES, "coords": COORDS}, "one slide, got 2"),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        model().attention_map(**{"tiles": ONE, "coords": PLACES} | options)
    with pytest.raises(ValueError, match="training mode"):
        model().train().rollout(ONE, PLACES)


def test_nan_is_not_hidden_and_inference_mode_changes_nothing() -> None:
    encoder, tiles = model(), ONE.clone()
    with torch.inference_mode():
        found = encoder.rollout(ONE, PLACES)
    close(joined(found), joined(encoder.rollout(ONE, PLACES)))
    tiles[0, 3] = torch.nan
    assert encoder.attention_map(tiles, PLACES).tiles.isnan().any()
