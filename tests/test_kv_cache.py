"""KVCache against the whole: samples at different positions, chunks and single tokens; how much is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, reference, testing
from dilated_attention.streaming.kv_cache import KVCache

TOKENS = 53
PATTERNS = [
    DilatedPattern.longnet([4, 8, 16], [1, 2, 4]),
    DilatedPattern.longnet([5, 7, 12], [2, 2, 3]),  # straddling, and some rows see nothing
    DilatedPattern.head_groups([4, 8, 64], [1, 2, 5]),
    DilatedPattern.torchscale([8, 16], [3, 5]),
]


def rows(x: Tensor, at: Tensor, n: int) -> Tensor:
    """n rows of each sample, from its own position on; beyond the end those of the last token."""
    index = (at[:, None] + torch.arange(n)).clamp(max=x.shape[1] - 1)
    return x[torch.arange(len(at))[:, None], index]


@pytest.mark.parametrize("tokens", [None, 1], ids=["full", "growing"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_prompts_then_chunks_and_tokens(pattern: DilatedPattern, tokens: int | None) -> None:
    qkv = testing.make_qkv(3, TOKENS, 6, 4, kv_heads=3, dtype=torch.float64)
    expected = reference.attention(*qkv, pattern, is_causal=True)
    kept = KVCache(pattern, qkv[1], tokens)
    at = torch.zeros(3, dtype=torch.int64)
    # padding alone, prompts, a chunk for all, chunks of different lengths, a token for some, then one by one
    steps = [[0, 0, 0], [7, 20, 13], [5, 5, 5], [1, 0, 4], [1, 0, 1], *[[1, 1, 1]] * 18]
    for step in steps:
        count, n = torch.tensor(step), max(step) or 4
        unreal = (torch.arange(n) >= count[:, None])[:, :, None, None]
        q, k, v = (rows(x, at, n).masked_fill(unreal, torch.nan if n == 1 else 7.0) for x in qkv)
        kept.reserve(int(at.max()) + n)
        found = kept.attend(q, k, v, at, count)
        if n > 1:
            kept.keep(k, v, at, count)
        for got, whole, nothing in zip(found, expected, (0.0, -torch.inf), strict=True):
            for sample, (first, length) in enumerate(zip(at.tolist(), step, strict=True)):
                assert testing.error(got[sample, :length], whole[sample, first : first + length]) <= 1e-12
                assert (got[sample, length:] == nothing).all()
        at += count
    assert at.max() > 40  # several of the longest segments, or most of it
    assert kept.nbytes <= 8 * 2 * 3 * 4 * sum(-(-one.length // one.rate) * len(one.heads) for one in kept.branches)


def test_a_scale_and_the_samples_that_go_on() -> None:
    pattern, scale = PATTERNS[0], 0.3
    qkv = testing.make_qkv(2, TOKENS, 4, 4, kv_heads=2, dtype=torch.float64)
    whole, _ = reference.attention(*qkv, pattern, is_causal=True, scale=scale)
    kept, chosen, at = KVCache(pattern, qkv[1]), torch.arange(2), torch.zeros(2, dtype=torch.int64)
    for n in (21, 1, 1):  # a chunk, then a token, then one of the samples that go on
        if at[0] > 21:
            chosen = torch.tensor([1, 1, 0])
            kept.select(chosen)
            at = at[chosen]
        q, k, v, expected = (rows(x[chosen], at, n) for x in (*qkv, whole))
        assert testing.error(kept.attend(q, k, v, at, scale=scale)[0], expected) <= 1e-12
        kept.keep(k, v, at)
        at += n


def test_gradients_are_refused() -> None:
    q, k, v = testing.make_qkv(1, 3, 2, 4)
    kept = KVCache(PATTERNS[3], k)
    with pytest.raises(ValueError, match="no gradients"):
        kept.attend(q.requires_grad_(), k, v, torch.zeros(1, dtype=torch.int64))


def test_the_dtype_of_autocast() -> None:
    q, k, v = testing.make_qkv(1, 20, 2, 4)
    kept = KVCache(PATTERNS[0], k.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        for first, last in ((0, 19), (19, 20)):
            given = [x[:, first:last] for x in (q, k, v)]
            out, _ = kept.attend(*given, torch.tensor([first]))
            kept.keep(given[1], given[2], torch.tensor([first]))
            assert out.dtype is torch.bfloat16
