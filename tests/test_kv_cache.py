"""KVCache against the whole: samples at different positions, chunks and single tokens; how much is kept."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, Global, Pattern, Prefix, Strided, Window, reference, testing
from dilated_attention.branches import KINDS, Branch
from dilated_attention.streaming.kv_cache import KVCache
from tests.cases import UNIONS
from tests.test_branches import drawn

TOKENS = 53
PATTERNS = [
    DilatedPattern.longnet([4, 8, 16], [1, 2, 4]),
    DilatedPattern.longnet([5, 7, 12], [2, 2, 3]),  # straddling, and some rows see nothing
    DilatedPattern.head_groups([4, 8, 64], [1, 2, 5]),
    DilatedPattern.torchscale([8, 16], [3, 5]),
]
# padding alone, prompts, a chunk for all, chunks of different lengths, a token for some, then one by one
STEPS = [[0, 0, 0], [7, 20, 13], [5, 5, 5], [1, 0, 4], [1, 0, 1], *[[1, 1, 1]] * 18]


def rows(x: Tensor, at: Tensor, n: int) -> Tensor:
    """n rows of each sample, from its own position on; beyond the end those of the last token."""
    index = (at[:, None] + torch.arange(n)).clamp(max=x.shape[1] - 1)
    return x[torch.arange(len(at))[:, None], index]


def check(pattern: Pattern, steps: list[list[int]], tokens: int | None, qkv: tuple[Tensor, ...]) -> KVCache:
    """These numbers of tokens of each sample, step by step, against the oracle."""
    expected = reference.attention(*qkv, pattern, is_causal=True)
    kept = KVCache(pattern, qkv[1], tokens)
    at = torch.zeros(len(steps[0]), dtype=torch.int64)
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
                wanted = whole[sample, first : first + length]
                assert torch.equal(got[sample, :length].isfinite(), wanted.isfinite())
                assert testing.error(got[sample, :length], wanted) <= 1e-12
                assert (got[sample, length:] == nothing).all()
        at += count
    return kept


@pytest.mark.parametrize("tokens", [None, 1], ids=["full", "growing"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_prompts_then_chunks_and_tokens(pattern: DilatedPattern, tokens: int | None) -> None:
    kept = check(pattern, STEPS, tokens, testing.make_qkv(3, TOKENS, 6, 4, kv_heads=3, dtype=torch.float64))
    assert kept.nbytes <= 8 * 2 * 3 * 4 * sum(-(-x.length // x.rate) * len(x.members) for x in pattern.branches_for(3))


@pytest.mark.parametrize("counts", ["once", "sum"])
@pytest.mark.parametrize("name", UNIONS)
def test_unions(name: str, counts: str) -> None:
    pattern = Pattern(UNIONS[name], counts=counts)
    check(pattern, STEPS, 1, testing.make_qkv(3, TOKENS, 6, 4, kv_heads=3, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_alone_and_beside_others(kind: str) -> None:
    """In random chunks, and token by token."""
    pick = random.Random(kind)
    for _ in range(12):
        n = pick.randint(1, 40)
        branches = [drawn(kind, n, pick), *(drawn(pick.choice([*KINDS]), n, pick) for _ in range(pick.randint(0, 2)))]
        pick.shuffle(branches)
        pattern = Pattern(branches, counts=pick.choice(["once", "sum"]))
        steps, left = [], n
        while left:
            steps.append(min(left, pick.choice([1, 1, 2, 7, 20])))
            left -= steps[-1]
        qkv = testing.make_qkv(1, n, 4, 3, kv_heads=2, dtype=torch.float64, seed=n)
        check(pattern, [[step] for step in steps], pick.choice([1, n]), qkv)


@pytest.mark.parametrize(
    ("branches", "slots"),
    [
        ([Window(7)], 8),
        ([Window(3, rate=4)], 13),
        ([Window(5), Prefix(2)], 6 + 2),
        ([Strided(4, 1, length=30)], 8),
        ([Global(3)], 3),
        ([Global([0, 9])], 10),
        ([Strided(100)], 12),
    ],
    ids=repr,
)
def test_how_many_rows_are_kept(branches: list[Branch], slots: int) -> None:
    """Of a long sequence; all of them are read, and nothing that was written over."""
    pattern, tokens = Pattern(branches), 1_000
    q, k, v = testing.make_qkv(1, tokens, 2, 4, dtype=torch.float64)
    kept = KVCache(pattern, k, 1)
    for first in range(0, tokens - 1, 150):
        part = slice(first, min(first + 150, tokens - 1))
        kept.reserve(part.stop)
        kept.keep(k[:, part], v[:, part], torch.tensor([first]))
    assert kept.nbytes == 8 * 2 * 2 * 4 * slots
    assert KVCache(pattern, k, tokens).nbytes <= kept.nbytes
    out, _ = kept.attend(q[:, -1:], k[:, -1:], v[:, -1:], torch.tensor([tokens - 1]))
    assert testing.error(out, reference.attention(q, k, v, pattern, is_causal=True)[0][:, -1:]) <= 1e-12


def test_nan_of_a_row_that_is_no_longer_seen_goes_nowhere() -> None:
    """Though it is still in a slot."""
    pattern = Pattern([DilatedPattern.longnet([8], [1]).branches_for(2)[0], Window(2), Prefix(1)])
    q, k, v = testing.make_qkv(1, 14, 2, 4, dtype=torch.float64)
    expected = reference.attention(q, k.index_fill(1, torch.tensor(5), 0.0), v, pattern, is_causal=True)[0]
    k[:, 5], v[:, 5] = torch.nan, torch.nan
    kept, outs = KVCache(pattern, k), []
    for token in range(14):
        one = [x[:, token : token + 1] for x in (q, k, v)]
        outs.append(kept.attend(*one, torch.tensor([token]))[0])
    assert all(out.isnan().all() for out in outs[5:8])
    assert testing.error(torch.cat(outs[8:], 1), expected[:, 8:]) <= 1e-12


def test_a_cache_that_grows_wants_to_know_how_far() -> None:
    with pytest.raises(ValueError, match=r"a cache of Pattern\(\[Strided\(rate=3\)\]\) grows with the sequence"):
        KVCache(Pattern([Strided(3)]), torch.zeros(1, 0, 2, 4))


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


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_backend_by_name(backend: str) -> None:
    qkv = testing.make_qkv(2, 30, 4, 4, kv_heads=2, dtype=torch.float64)
    pattern = Pattern(UNIONS["far first"])
    kept = KVCache(pattern, qkv[1])
    expected = reference.attention(*qkv, pattern, is_causal=True)
    for first, last in ((0, 28), (28, 29), (29, 30)):
        q, k, v = (x[:, first:last] for x in qkv)
        at = torch.full((2,), first)
        for got, whole in zip(kept.attend(q, k, v, at, backend=backend), expected, strict=True):
            assert testing.error(got, whole[:, first:last]) <= 1e-12
        kept.keep(k, v, at)
    with pytest.raises(ValueError, match="'triton' cannot run this call"):
        kept.attend(q, k, v, at, backend="triton")
