"""Nothing masked, foreign or unwritten reaches a result: masked slots and single rows full of NaN or infinity.

The table of cases runs in memory that is full of NaN.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, dilated_attention, testing
from dilated_attention.pattern import RULES
from dilated_attention.testing import Results
from tests.cases import DTYPES
from tests.threads import run_sharded

BY_BACKEND = pytest.mark.parametrize("backend", ["sdpa", "eager"])
BY_RULE = pytest.mark.parametrize("rule", RULES)
BOTH = pytest.mark.parametrize("is_causal", [False, True])


def run(pattern: DilatedPattern, qkv: tuple[Tensor, ...], dout: Tensor, dlse: Tensor, **options: Any) -> Results:
    attention = functools.partial(dilated_attention, pattern=pattern, enable_gqa=True, return_lse=True, **options)
    return testing.run(attention, qkv, dout, dlse)


def check_equal(got: Results, wanted: Results, bad: Tensor) -> None:
    """To the bit, but in rows (B, N, H) that are ``bad``: those are NaN, and send nothing to keys and values."""
    for (name, x), (_, expected) in zip(got.items(), wanted.items(), strict=True):
        if name in ("dk", "dv"):
            assert torch.equal(x, expected), name
        else:
            assert torch.equal(x[~bad], expected[~bad]), name
            assert x[bad].isnan().all(), name


@BY_BACKEND
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 513, 517])
@pytest.mark.parametrize("where", ["query", "key"])
def test_nan_reaches_its_rows_in_segments_of_any_length(
    tokens: int, where: str, dtype: torch.dtype, backend: str
) -> None:
    """In float32 torch's kernel for CPUs gives out 0 and lse 0 where fewer than 16 keys all score NaN."""
    q, k, v = testing.make_qkv(2, tokens, 2, 8, dtype=dtype)
    bad = torch.zeros(2, tokens, 2, dtype=torch.bool)
    bad[1, tokens // 2, 1] = True
    if where == "query":
        q[bad] = math.nan
    else:  # every key of one head, so that no score is finite
        bad[1, :, 1] = True
        k[bad] = math.nan
    out, lse = dilated_attention(q, k, v, DilatedPattern.longnet([tokens], [1]), backend=backend, return_lse=True)
    assert torch.equal(lse.isnan(), bad)
    assert torch.equal(out.isnan(), bad.unsqueeze(-1).expand_as(out))


@pytest.mark.parametrize(("bad", "dtype"), [(math.nan, "f64"), (math.nan, "f32"), (math.inf, "f64")])
@BY_BACKEND
@BY_RULE
@BOTH
@pytest.mark.parametrize("masked", ["", "some", "all that a row sees"])
@pytest.mark.parametrize("queries", [29, 3])
def test_a_nan_query_stays_in_its_row(
    rule: str, backend: str, is_causal: bool, masked: str, queries: int, bad: float, dtype: str
) -> None:
    """dk and dv are what the other rows send, whatever gradient comes to that row; its own out, lse and dq are NaN."""
    q, k, v = testing.make_qkv(2, 29, 4, 8, kv_heads=2, dtype=DTYPES[dtype])
    q, row = q[:, -queries:], torch.arange(queries)[:, None] == queries - 2
    mask = torch.rand(2, 29, generator=torch.Generator().manual_seed(1)) < 0.4 if masked else None
    if masked == "all that a row sees":
        mask[0, 16:] = True  # of one sample
    options = {"is_causal": is_causal, "key_padding_mask": mask, "backend": backend}
    pattern, ones = DilatedPattern(rule, (8, 16), (1, 3)), torch.ones_like(q)
    none, dirty = ones.masked_fill(row[..., None], 0.0), q.masked_fill(row[..., None], bad)
    without = run(pattern, (q, k, v), none, none[..., 0], **options)
    seen = row & (without.lse > -math.inf)  # a row without keys has nothing to be NaN
    assert seen.any()
    check_equal(run(pattern, (dirty, k, v), ones, ones[..., 0], **options), without, seen)


@BY_BACKEND
@pytest.mark.parametrize(
    ("exchange", "recompute"), [("ring", True), ("ring", False), ("allgather", True), ("alltoall", False)]
)
@pytest.mark.parametrize("sees_nothing", [False, True])
def test_a_nan_query_stays_in_its_row_over_ranks(
    exchange: str, recompute: bool, sees_nothing: bool, backend: str
) -> None:
    """And where it sees nothing, it is a row without keys."""
    options: dict[str, Any] = {"exchange": exchange, "use_checkpointing": recompute, "backend": backend}
    rows = (torch.arange(29) == 3) | (torch.arange(29) == 20) & (not sees_nothing)
    if sees_nothing:  # a causal row sees no later key
        options |= {"key_padding_mask": (torch.arange(29) < 6)[None].expand(2, -1), "is_causal": True}
    q, k, v = testing.make_qkv(2, 29, 4, 8, dtype=torch.float64)
    bad, ones = rows[:, None].expand(2, 29, 4), torch.ones_like(q)
    none, dirty = ones.masked_fill(bad[..., None], 0.0), q.masked_fill(bad[..., None], math.nan)
    given = (10, 7, 12), DilatedPattern.longnet([8, 64], [1, 3])
    without, _ = run_sharded((q, k, v), *given, none, none[..., 0], **options)
    got, _ = run_sharded((dirty, k, v), *given, ones, ones[..., 0], **options)
    assert not sees_nothing or (without.lse[bad] == -math.inf).all()
    check_equal(got, without, bad & (not sees_nothing))


@BY_BACKEND
@pytest.mark.parametrize("tokens", [4, 40])
def test_an_infinite_query_whose_scores_are_all_low_is_nan(tokens: int, backend: str) -> None:
    """Each score is -inf then, which a kernel may take for a row without keys."""
    q, k, v = testing.make_qkv(1, tokens, 1, 8)
    q[:, 1] = math.inf
    sent = torch.ones(q.shape), torch.ones(q.shape[:3])
    got = run(DilatedPattern.longnet([tokens], [1]), (q, -k.abs(), v), *sent, backend=backend)
    for x in (got.out, got.dq):
        assert x[:, 1].isnan().all()
        assert x[:, 2:].isfinite().all()
    assert got.lse[:, 1].isnan().all()
    assert all(x.isfinite().all() for x in (got.dk, got.dv))


@BY_BACKEND
@BY_RULE
@BOTH
def test_rows_in_no_branch_are_neither_read_nor_left_unwritten(rule: str, backend: str, is_causal: bool) -> None:
    pattern = DilatedPattern(rule, (8, 7), (3, 5))
    covered = pattern.coverage(29, 4).expand(2, -1, -1)
    assert 0 < covered.sum() < covered.numel()
    qkv = testing.make_qkv(2, 29, 4, 8, dtype=torch.float64)
    dirty = tuple(x.masked_fill(~covered[..., None], math.nan) for x in qkv)
    out, lse, *grads = run(pattern, dirty, qkv[0], qkv[0][..., 0], is_causal=is_causal, backend=backend)
    assert torch.equal(lse > -math.inf, covered)
    for x in (out, *grads):
        assert not x[~covered].any()
        assert x[covered].isfinite().all()
