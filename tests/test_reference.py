"""The oracle against still plainer code: loops over keys. test_golden has outputs of the released code."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch

from dilated_attention import DilatedPattern, reference, testing
from dilated_attention.pattern import RULES

PATTERNS = [([4, 8], [1, 2]), ([3, 9], [5, 4]), ([5], [2]), ([6, 40], [1, 3])]
BY_RULE = pytest.mark.parametrize("rule", RULES)
CAUSAL_OR_NOT = pytest.mark.parametrize("is_causal", [False, True])
CLOSE = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-13)


@BY_RULE
@pytest.mark.parametrize(("lengths", "rates"), PATTERNS)
@CAUSAL_OR_NOT
@pytest.mark.parametrize(("heads", "kv_heads", "masked"), [(4, 4, False), (6, 2, False), (4, 4, True)])
def test_row_by_row(rule: str, lengths, rates, is_causal: bool, heads: int, kv_heads: int, masked: bool) -> None:
    """A softmax over the row's keys and zero keys, in plain steps. A masked key might as well not be there."""
    pattern, tokens, scale = DilatedPattern(rule, tuple(lengths), tuple(rates)), 13, 0.7
    q, k, v = testing.make_qkv(2, tokens, heads, 3, kv_heads=kv_heads, dtype=torch.float64)
    mask = torch.zeros(2, tokens, dtype=torch.bool)
    mask[[0, 0, 0, 1], [0, 3, 6, 5]] = masked  # none at the end: torchscale's length stays
    out, lse = reference.attention(
        q, k, v, pattern, scale=scale, is_causal=is_causal, key_padding_mask=mask if masked else None
    )
    row = {"num_tokens": tokens, "num_heads": heads, "num_kv_heads": kv_heads, "is_causal": is_causal}
    for b, i, h in itertools.product(range(2), range(tokens), range(heads)):
        keys = [key for key in pattern.keys(i, h, **row) if not mask[b, key]]
        zeros, kv = torch.zeros(pattern.zero_keys(i, h, **row), 3, dtype=q.dtype), h // (heads // kv_heads)
        scores = torch.cat([k[b, keys, kv], zeros]) @ q[b, i, h] * scale
        CLOSE(lse[b, i, h], scores.logsumexp(0))
        CLOSE(out[b, i, h], scores.softmax(0) @ torch.cat([v[b, keys, kv], zeros]))


@BY_RULE
@CAUSAL_OR_NOT
def test_a_right_padded_sample_is_the_sample_alone(rule: str, is_causal: bool) -> None:
    """Where everything is padding, it is nothing."""
    pattern = DilatedPattern(rule, (4, 30), (1, 3))
    qkv, ends = testing.make_qkv(5, 13, 4, 3, dtype=torch.float64), (13, 9, 4, 1, 0)
    mask = torch.arange(13) >= torch.tensor(ends)[:, None]
    out, lse = reference.attention(*qkv, pattern, key_padding_mask=mask, is_causal=is_causal)
    for b, end in enumerate(ends):
        alone = reference.attention(*(x[b : b + 1, :end] for x in qkv), pattern, is_causal=is_causal)
        CLOSE([x[b : b + 1, :end] for x in (out, lse)], [*alone])
    assert not out[4].any()
    assert (lse[4] == -math.inf).all()


@BY_RULE
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_large_scores(rule: str, size: float) -> None:
    q, k, v = testing.make_qkv(1, 8, 4, 4)
    results = reference.attention(q.abs() + 1, size * (k.abs() + 1), v, DilatedPattern(rule, (3, 8), (1, 1)))
    assert all(x.isfinite().all() for x in results)
