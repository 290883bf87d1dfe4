"""Nothing masked, foreign or unwritten reaches a result: masked slots and single rows full of NaN or infinity.

The table of cases runs in memory that is full of NaN.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, dilated_attention, stream, testing
from dilated_attention.pattern import RULES
from dilated_attention.testing import Results
from tests.threads import run_sharded

BACKENDS = ("sdpa", "eager")


def run(pattern: DilatedPattern, qkv: tuple[Tensor, ...], dout: Tensor, dlse: Tensor, **options: Any) -> Results:
    def attention(*x: Tensor) -> Any:
        return dilated_attention(*x, pattern, enable_gqa=True, return_lse=True, **options)

    return testing.run(attention, qkv, dout, dlse)


def random_mask() -> Tensor:
    return torch.rand(3, 29, generator=torch.Generator().manual_seed(1)) < 0.4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_anything_may_stand_in_masked_slots(rule: str, backend: str, is_causal: bool, bad: float) -> None:
    q, k, v = testing.make_qkv(3, 29, 4, 8, dtype=torch.float64)
    mask = random_mask()
    mask[1, 20:] = True
    mask[2] = True
    dirty = (x.masked_fill(mask[:, :, None, None], bad) for x in (k, v))
    clean, got = (
        run(DilatedPattern(rule, (8, 16), (1, 3)), (q, *keys), q.flip(1), q[..., 0], key_padding_mask=mask,
            is_causal=is_causal, backend=backend)
        for keys in ((k, v), dirty)
    )  # fmt: skip
    for (name, x), (_, expected) in zip(got.items(), clean.items(), strict=True):
        assert torch.equal(x, expected), name
    for nothing in (got.dk[mask], got.dv[mask], got.out[2], got.dq[2]):
        assert (nothing == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize(("bad", "dtype"), [(math.nan, torch.float64), (math.nan, torch.float32), (math.inf, None)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", ["", "some", "all that a row sees"])
@pytest.mark.parametrize("queries", [29, 3])
def test_a_nan_query_stays_in_its_row(
    rule: str, backend: str, is_causal: bool, masked: str, queries: int, bad: float, dtype: torch.dtype | None
) -> None:
    """dk and dv are what the other rows send, whatever gradient comes to that row; its own out, lse and dq are NaN."""
    q, k, v = testing.make_qkv(2, 29, 4, 8, kv_heads=2, dtype=dtype or torch.float64)
    q, row = q[:, -queries:], torch.tensor([queries - 2])
    ones = torch.ones_like(q), torch.ones(q.shape[:3])
    mask = random_mask()[:2] if masked else None
    if mask is not None and masked != "some":
        mask[0, 16:] = True  # of one sample
    without, got = (
        run(DilatedPattern(rule, (8, 16), (1, 3)), (query, k, v), *sent, is_causal=is_causal, key_padding_mask=mask,
            backend=backend)
        for query, sent in ((q, [x.index_fill(1, row, 0.0) for x in ones]), (q.index_fill(1, row, bad), ones))
    )  # fmt: skip
    seen = without.lse[:, row] > -math.inf  # a row without keys has nothing to be NaN
    assert seen.any()
    others = [i for i in range(queries) if i != row]
    for name, wanted in without.items():
        x = getattr(got, name)
        if name in ("dk", "dv"):
            assert torch.equal(x, wanted), name
        else:
            assert torch.equal(x[:, others], wanted[:, others]), name
            assert torch.equal(x[:, row].isnan() if name == "lse" else x[:, row].isnan().all(-1), seen), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("exchange", "use_checkpointing"), [("ring", True), ("ring", False), ("allgather", True), ("alltoall", False)]
)
def test_a_nan_query_stays_in_its_row_over_ranks(exchange: str, use_checkpointing: bool, backend: str) -> None:
    pattern, lengths, rows = DilatedPattern.longnet([8, 64], [1, 3]), (10, 7, 12), torch.tensor([3, 20])
    q, k, v = testing.make_qkv(2, 29, 4, 8, dtype=torch.float64)
    dout, dlse = torch.ones_like(q), torch.ones(q.shape[:3], dtype=torch.float64)
    options = {"exchange": exchange, "use_checkpointing": use_checkpointing, "backend": backend}
    none = (x.index_fill(1, rows, 0.0) for x in (dout, dlse))
    without, _ = run_sharded((q, k, v), lengths, pattern, *none, **options)
    got, _ = run_sharded((q.index_fill(1, rows, math.nan), k, v), lengths, pattern, dout, dlse, **options)
    bad = torch.zeros(29, dtype=torch.bool).index_fill_(0, rows, True)
    for (name, x), (_, wanted) in zip(got.items(), without.items(), strict=True):
        if name in ("dk", "dv"):
            assert torch.equal(x, wanted), name
        else:
            assert x[:, bad].isnan().all(), name
            assert torch.equal(x[:, ~bad], wanted[:, ~bad]), name


@pytest.mark.parametrize("exchange", ["ring", "allgather", "alltoall"])
def test_a_nan_query_that_sees_nothing_sends_nothing_over_ranks(exchange: str) -> None:
    q, k, v = testing.make_qkv(1, 16, 2, 8, dtype=torch.float64)
    mask = torch.arange(16)[None] < 6
    pattern, wide = DilatedPattern.longnet([4, 12], [1, 2]), [torch.ones_like(q), torch.ones(q.shape[:3]).double()]
    rows = torch.arange(4)  # a causal row sees no later key
    options = {"exchange": exchange, "key_padding_mask": mask, "is_causal": True}
    without, _ = run_sharded((q, k, v), (5, 6, 5), pattern, *wide, **options)
    got, _ = run_sharded((q.index_fill(1, rows, math.nan), k, v), (5, 6, 5), pattern, *wide, **options)
    assert (without.lse[:, rows] == -math.inf).all()
    for (name, x), (_, wanted) in zip(got.items(), without.items(), strict=True):
        assert torch.equal(x, wanted), name


@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize("is_causal", [False, True])
def test_an_infinite_query_is_nan_in_a_stream(is_causal: bool) -> None:
    q, k, v = testing.make_qkv(1, 24, 1, 8)
    q[:, 5] = math.inf
    chunks = zip(*(x.split(3, 1) for x in (q, -k.abs(), v)), strict=True)
    out = torch.cat(list(stream(chunks, DilatedPattern.longnet([8, 16], [1, 2]), is_causal=is_causal)), 1)
    assert torch.equal(out.isnan().any(-1).flatten(), torch.arange(24) == 5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_key_or_gradient_reaches_what_its_rows_see_and_no_more(backend: str) -> None:
    pattern = DilatedPattern.longnet([8], [1])
    q, k, v = testing.make_qkv(1, 16, 1, 8)
    k[0, 9] = math.nan
    got = run(pattern, (q, k, v), torch.ones(q.shape), torch.ones(q.shape[:3]), backend=backend)
    for x in (got.out, got.dq, got.dk, got.dv):
        assert x[:, :8].isfinite().all()
        assert x[:, 8:].isnan().any(-1).all()

    q, k, v = testing.make_qkv(2, 24, 2, 8)
    row, touched = torch.zeros(2, 2, 24, 2, dtype=torch.bool)
    row[0, 9, 1] = True
    touched[0, 8:16, 1] = True  # the row's segment and head
    dout = torch.ones(q.shape).masked_fill(row[..., None], math.nan)
    got = run(pattern, (q, k, v), dout, torch.ones(q.shape[:3]), backend=backend)
    for x in (got.dk, got.dv):
        assert x[~touched].isfinite().all()
    assert got.dq[row].isnan().all()
    assert got.dq[~row].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_in_no_branch_are_neither_read_nor_left_unwritten(rule: str, backend: str, is_causal: bool) -> None:
    pattern = DilatedPattern(rule, (8, 7), (3, 5))
    covered = pattern.coverage(29, 4)
    assert covered.any()
    assert not covered.all()
    qkv = testing.make_qkv(2, 29, 4, 8, dtype=torch.float64)
    dirty = tuple(x.masked_fill(~covered[None, :, :, None], math.nan) for x in qkv)
    got = run(pattern, dirty, qkv[0], qkv[0][..., 0], is_causal=is_causal, backend=backend)
    assert (got.lse[:, ~covered] == -math.inf).all()
    assert got.lse[:, covered].isfinite().all()
    for x in (got.out, got.dq, got.dk, got.dv):
        assert (x[:, ~covered] == 0).all()
        assert x[:, covered].isfinite().all()
