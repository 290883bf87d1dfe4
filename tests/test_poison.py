"""Nothing unwritten, masked or foreign reaches a result: allocations, masked slots and single rows full of NaN."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, dilated_attention, testing
from dilated_attention.pattern import RULES

BACKENDS = ("sdpa", "eager")
PATTERNS = {
    "dense_first": ([8, 16], [1, 3]),
    "rows_left_over": ([8, 16], [2, 3]),
    "no_row_at_the_tail": ([4, 6], [3, 4]),  # a tail shorter than the offset
    "rate_over_length": ([3], [5]),
}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every empty tensor made from Python comes full of NaN; returns the names of the makers as they are used."""
    used: list[str] = []

    def poison(owner: object, name: str) -> None:
        make: Callable[..., Tensor] = getattr(owner, name)

        def filled(*args, **kwargs) -> Tensor:
            used.append(name)
            x = make(*args, **kwargs)
            return x.fill_(math.nan) if x.is_floating_point() else x.fill_(-(2**30))

        monkeypatch.setattr(owner, name, filled)

    for name in ("empty", "empty_like", "empty_strided", "empty_permuted"):
        poison(torch, name)
    poison(torch.Tensor, "new_empty")
    poison(torch.Tensor, "new_empty_strided")
    return used


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """torch fills uninitialised memory with NaN itself, in its own kernels too."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


CASES = [
    pytest.param(*case, id="-".join(map(str, case)))
    for case in itertools.product(BACKENDS, RULES, PATTERNS, (False, True), ("none", "random", "sample"))
]


def check(backend: str, rule: str, name: str, is_causal: bool, mask: str) -> None:
    widths, rates = PATTERNS[name]
    pattern = DilatedPattern(rule, tuple(widths), tuple(rates))
    padding = {
        "none": None,
        "random": torch.rand(3, 29, generator=torch.Generator().manual_seed(0)) < 0.4,
        "sample": (torch.arange(3) == 1)[:, None].expand(-1, 29),
    }[mask]
    qkv = testing.make_qkv(3, 29, 6, 8, kv_heads=3, layout="transposed", dtype=torch.float64)
    testing.check(qkv, pattern, is_causal=is_causal, key_padding_mask=padding, backend=backend)


@pytest.mark.parametrize(("backend", "rule", "name", "is_causal", "mask"), CASES)
def test_poisoned_allocations(poisoned: list[str], backend, rule, name, is_causal, mask) -> None:
    check(backend, rule, name, is_causal, mask)
    assert poisoned, "no allocation was poisoned: the test shows nothing"


@pytest.mark.parametrize(("backend", "rule", "name", "is_causal", "mask"), CASES)
def test_filled_memory(filled_memory: None, backend, rule, name, is_causal, mask) -> None:
    check(backend, rule, name, is_causal, mask)


@pytest.mark.parametrize("rule", RULES)
def test_poisoned_allocations_with_dropout(poisoned: list[str], rule: str) -> None:
    pattern = DilatedPattern(rule, (8, 16), (2, 3))
    qkv = testing.make_qkv(2, 29, 4, 8)
    got = testing.run(
        lambda *x: dilated_attention(*x, pattern, dropout_p=0.5, return_lse=True),
        qkv,
        torch.ones(2, 29, 4, 8),
        torch.ones(2, 29, 4),
    )
    for name, x in got.items():
        assert not x.isnan().any(), name


# --- masked slots -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_anything_may_stand_in_masked_slots(rule: str, backend: str, is_causal: bool, bad: float) -> None:
    pattern = DilatedPattern(rule, (8, 16), (1, 3))
    q, k, v = testing.make_qkv(3, 29, 4, 8, dtype=torch.float64)
    mask = torch.rand(3, 29, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[1, 20:] = True
    mask[2] = True
    dout = torch.randn(q.shape, dtype=torch.float64)
    dlse = torch.randn(q.shape[:3], dtype=torch.float64)

    def results(k: Tensor, v: Tensor) -> testing.Results:
        return testing.run(
            lambda *x: dilated_attention(
                *x, pattern, key_padding_mask=mask, is_causal=is_causal, backend=backend, return_lse=True
            ),
            (q, k, v),
            dout,
            dlse,
        )

    clean = results(k, v)
    dirty = results(*(x.masked_fill(mask[:, :, None, None], bad) for x in (k, v)))
    for (name, got), (_, expected) in zip(dirty.items(), clean.items(), strict=True):
        assert torch.equal(got, expected), name
    assert (dirty.dk[mask] == 0).all()
    assert (dirty.dv[mask] == 0).all()
    assert (dirty.out[2] == 0).all()
    assert (dirty.dq[2] == 0).all()


# --- a bad row --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_nan_query_stays_in_its_row(rule: str, backend: str, is_causal: bool, dtype: torch.dtype) -> None:
    pattern = DilatedPattern(rule, (8, 16), (1, 3))
    q, k, v = testing.make_qkv(2, 29, 4, 8, dtype=dtype)
    options = {"is_causal": is_causal, "backend": backend, "return_lse": True}
    out, lse = dilated_attention(q, k, v, pattern, **options)
    bad = q.clone()
    bad[1, 9, 0, 3] = math.nan
    got, got_lse = dilated_attention(bad, k, v, pattern, **options)
    assert got[1, 9, 0].isnan().all()
    assert got_lse[1, 9, 0].isnan()
    got[1, 9, 0], got_lse[1, 9, 0] = out[1, 9, 0], lse[1, 9, 0]
    assert torch.equal(got, out)
    assert torch.equal(got_lse, lse)


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


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("queries", [29, 3])
def test_a_nan_query_stays_in_its_row_backward(
    rule: str, backend: str, is_causal: bool, masked: bool, queries: int, bad: float
) -> None:
    """dk and dv are what the other rows send, whatever gradient comes to that row; its own dq is NaN."""
    pattern = DilatedPattern(rule, (8, 16), (1, 3))
    q, k, v = testing.make_qkv(2, 29, 4, 8, kv_heads=2, dtype=torch.float64)
    q, row = q[:, -queries:], queries - 2
    mask = torch.rand(2, 29, generator=torch.Generator().manual_seed(1)) < 0.3 if masked else None
    dout, dlse = torch.ones_like(q), torch.ones(q.shape[:3], dtype=torch.float64)

    def results(q: Tensor, dout: Tensor, dlse: Tensor) -> testing.Results:
        options = {"is_causal": is_causal, "key_padding_mask": mask, "backend": backend, "enable_gqa": True}
        return testing.run(lambda *x: dilated_attention(*x, pattern, return_lse=True, **options), (q, k, v), dout, dlse)

    without = results(q, *(x.clone().index_fill_(1, torch.tensor([row]), 0.0) for x in (dout, dlse)))
    dirty = q.clone()
    dirty[:, row] = bad
    got = results(dirty, dout, dlse)
    assert got.lse is not None
    assert without.lse is not None
    seen = without.lse[:, row] > -math.inf  # a row without keys has nothing to be NaN
    assert seen.any()
    assert torch.equal(got.lse[:, row].isnan(), seen)
    assert torch.equal(got.dq[:, row].isnan().all(-1), seen)
    for name, wanted in without.items():
        if name in ("dk", "dv"):
            assert torch.equal(getattr(got, name), wanted), name
        elif name == "dq":
            others = [i for i in range(queries) if i != row]
            assert torch.equal(got.dq[:, others], wanted[:, others])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("exchange", ["ring", "allgather", "alltoall"])
@pytest.mark.parametrize("use_checkpointing", [True, False])
def test_a_nan_query_stays_in_its_row_over_ranks(exchange: str, use_checkpointing: bool, backend: str) -> None:
    pattern, lengths, rows = DilatedPattern.longnet([8, 64], [1, 3]), (10, 7, 12), torch.tensor([3, 20])
    q, k, v = testing.make_qkv(2, 29, 4, 8, dtype=torch.float64)
    dout, dlse = torch.ones_like(q), torch.ones(q.shape[:3], dtype=torch.float64)
    options = {"exchange": exchange, "use_checkpointing": use_checkpointing, "backend": backend}
    none = (x.index_fill(1, rows, 0.0) for x in (dout, dlse))
    without, _ = testing.run_sharded((q, k, v), lengths, pattern, *none, **options)
    got, _ = testing.run_sharded((q.index_fill(1, rows, math.nan), k, v), lengths, pattern, dout, dlse, **options)
    bad = torch.zeros(29, dtype=torch.bool).index_fill_(0, rows, True)
    for name, x in got.items():
        if name in ("dk", "dv"):
            assert torch.equal(x, dict(without.items())[name]), name
        else:
            assert x[:, bad].isnan().all(), name
            assert torch.equal(x[:, ~bad], dict(without.items())[name][:, ~bad]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_key_reaches_the_gradients_of_what_its_rows_see(backend: str) -> None:
    """The rows that see it are NaN, and what they send back is not left out."""
    q, k, v = testing.make_qkv(1, 16, 1, 8)
    k[0, 9] = math.nan
    got = testing.run(
        lambda *x: dilated_attention(*x, DilatedPattern.longnet([8], [1]), backend=backend),
        (q, k, v),
        torch.ones(q.shape),
    )
    for x in (got.out, got.dq, got.dk, got.dv):
        assert x[:, :8].isfinite().all()
        assert x[:, 8:].isnan().any(-1).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_in_no_branch_are_neither_read_nor_left_unwritten(rule: str, backend: str, is_causal: bool) -> None:
    pattern = DilatedPattern(rule, (8, 7), (3, 5))
    q, k, v = testing.make_qkv(2, 29, 4, 8, dtype=torch.float64)
    covered = pattern.coverage(29, 4)
    assert not covered.all()
    assert covered.any()
    q, k, v = (x.masked_fill(~covered[None, :, :, None], math.nan) for x in (q, k, v))
    got = testing.run(
        lambda *x: dilated_attention(*x, pattern, is_causal=is_causal, backend=backend, return_lse=True),
        (q, k, v),
        torch.randn(q.shape, dtype=torch.float64),
        torch.randn(q.shape[:3], dtype=torch.float64),
    )
    assert got.lse is not None
    assert (got.lse[:, ~covered] == -math.inf).all()
    assert got.lse[:, covered].isfinite().all()
    for x in (got.out, got.dq, got.dk, got.dv):
        assert (x[:, ~covered] == 0).all()
        assert x[:, covered].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_gradient_stays_in_what_it_touches(backend: str) -> None:
    pattern = DilatedPattern.longnet([8], [1])
    qkv = testing.make_qkv(2, 24, 2, 8)
    dout = torch.ones(2, 24, 2, 8)
    dout[0, 9, 1] = math.nan
    got = testing.run(lambda *x: dilated_attention(*x, pattern, backend=backend), qkv, dout)
    touched = torch.zeros(2, 24, 2, dtype=torch.bool)
    touched[0, 8:16, 1] = True  # the row's segment and head
    for x in (got.dk, got.dv):
        assert x[~touched].isfinite().all()
    rows = torch.zeros_like(touched)
    rows[0, 9, 1] = True
    assert got.dq[rows].isnan().all()
    assert got.dq[~rows].isfinite().all()
