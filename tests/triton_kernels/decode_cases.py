"""The decoding kernel against the oracle, where the table of cases leaves something out: sizes, splits, bad numbers.
Run by test_triton: in Triton's interpreter, which takes milliseconds a program, and on a GPU if there is one."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention import (
    Blocks,
    Dilated,
    DilatedPattern,
    Global,
    Pattern,
    Prefix,
    Strided,
    Window,
    dilated_attention,
    explain,
    reference,
    testing,
)
from dilated_attention.backends.problem import Inputs
from dilated_attention.backends.triton import decode
from dilated_attention.backends.triton.decode import DecodeConfig
from dilated_attention.backends.triton.endless import endless
from dilated_attention.call import ON_DEVICE, Call
from tests.on_gpu import DEVICE

CONFIG = DecodeConfig(rows=16, keys=16, splits=3)
PATTERN = DilatedPattern.longnet([8, 16, 32], [1, 2, 4])


def run(
    qkv: tuple[Tensor, ...], pattern: Pattern, offset: int | Tensor, *, is_causal: bool = True,
    padding: Tensor | None = None, config: DecodeConfig | None = CONFIG,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    positions = offset if isinstance(offset, Tensor) else None
    start = ON_DEVICE if isinstance(offset, Tensor) else offset
    call = Call(pattern, is_causal, 0.3).of(qkv[0], qkv[1], padding, start)
    return decode.forward(call, Inputs(*qkv, padding, None, positions), config)


def check(qkv: tuple[Tensor, ...], pattern: Pattern, offset: int | Tensor, **options: Any) -> None:
    """By the rule of `testing`: out and lse, in half precision beside plain PyTorch in the same dtype."""
    got = dict(zip(("out", "lse"), run(qkv, pattern, offset, **options), strict=True))
    assert (got["out"].dtype, got["lse"].dtype) == (qkv[0].dtype, torch.float32)
    given = {"is_causal": options.get("is_causal", True), "scale": 0.3, "query_offset": offset}
    exact, plain = (
        dict(zip(got, reference.attention(*qkv, pattern, dtype=dtype, **given), strict=True))
        for dtype in (torch.float64, None)
    )
    limits = testing.limits(exact, plain, qkv[0].dtype)
    assert all(testing.error(got[name], exact[name]) <= limits[name] for name in got)


def make(queries: int, tokens: int, heads: int = 2, kv_heads: int = 2, dim: int = 8, **options: Any) -> Any:
    samples = options.pop("samples", 1)
    q, k, v = testing.make_qkv(samples, tokens, heads, dim, kv_heads=kv_heads, device=DEVICE, **options)
    return q[:, :queries], k, v


def positions(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(1, torch.float32), (15, torch.float16), (16, torch.float32), (17, torch.float16), (129, torch.float32)],
)
def test_numbers_of_rows(rows: int, dtype: torch.dtype) -> None:
    """As many keys as fill a tile, one fewer, one more; the last query sees so many."""
    pattern = DilatedPattern.longnet([256], [1])
    check(make(1, rows, dtype=dtype), pattern, rows - 1, config=CONFIG._replace(keys=128 if rows > 100 else 16))


@pytest.mark.parametrize("queries", [16, 17])
def test_numbers_of_queries(queries: int) -> None:
    """Tiles of queries: full, not quite, one more; with two queries a group, and with branches they sit out."""
    check(make(queries, 41, 4), DilatedPattern.longnet([16, 64], [1, 3]), 5, is_causal=False)


@pytest.mark.parametrize(("splits", "is_causal"), [(1, True), (2, False), (7, True)])
def test_any_number_of_splits(splits: int, is_causal: bool) -> None:
    """Fewer and more than there are tiles; one launch or two."""
    check(make(2, 61), PATTERN, 57, is_causal=is_causal, config=CONFIG._replace(splits=splits))


WINDOWS = {
    "window": Pattern([Window(20, 15)]),
    "steps": Pattern([Window(9, 6, rate=3), Strided(4, 1), Prefix(2)]),
    "cut": Pattern([Window(17), Dilated(40, 5), Global([3, 70])]),
}


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", WINDOWS)
def test_limits_fall_anywhere_in_a_tile(name: str, is_causal: bool) -> None:
    """Of keys: the first and the last that a tile of queries sees move on by one."""
    for queries, offset in ((1, 0), (1, 32), (1, 75), (3, 16), (5, 36), (17, 50)):
        check(make(queries, 80, 2, 1), WINDOWS[name], offset, is_causal=is_causal)


def test_patterns_of_very_many_rectangles_are_refused() -> None:
    many = Pattern([Window(3), Blocks(8, [(2 * row, row) for row in range(97)])])
    with pytest.raises(ValueError, match=r"up to 64 rectangles of rows, and the branches \(window, blocks\) have more"):
        dilated_attention(*make(1, 800), many, backend="triton")
    assert endless(Pattern([Window(3, rate=50)]), 2)[-1].query == 49


def test_the_cache_may_have_another_dtype() -> None:
    q, k, v = make(2, 29)
    out, lse = run((q.half(), k, v), PATTERN, 20)
    expected, expected_lse = run((q.half(), k.half(), v.half()), PATTERN, 20)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize(("rule", "is_causal"), [("longnet", True), ("torchscale", False), ("head_groups", True)])
def test_other_rows_may_hold_anything(rule: str, is_causal: bool) -> None:
    """Also rows that are ignored; and what one head sees and another does not."""
    pattern, (q, k, v) = DilatedPattern.of(rule, [8, 16], [2, 3]), make(2, 37, 2)
    mask = (torch.rand(1, 37, generator=torch.Generator().manual_seed(1)) < 0.3).to(DEVICE)
    seen = torch.zeros(37, 2, dtype=torch.bool, device=DEVICE)
    for i, head in itertools.product(range(2), range(2)):
        seen[list(pattern.keys(18 + i, head, num_tokens=37, num_heads=2, is_causal=is_causal)), head] = True
    unseen = (~seen | mask[0].unsqueeze(1))[None, :, :, None]
    poisoned = (q, k.masked_fill(unseen, math.nan), v.masked_fill(unseen, math.nan))
    both = [run(given, pattern, 18, is_causal=is_causal, padding=mask) for given in (poisoned, (q, k, v))]
    for got, expected in zip(*both, strict=True):
        assert torch.equal(got, expected)


def test_a_row_does_not_see_what_its_neighbour_sees() -> None:
    """NaN in a value that only the other query of the tile has: 0 * NaN must not reach this one."""
    pattern = DilatedPattern.longnet([16, 4], [2, 1])
    q, k, v = make(2, 32, 1, 1)
    expected, _ = run((q, k, v), pattern, 20)
    v[0, 18] = math.nan
    for splits in (1, 3):
        out, _ = run((q, k, v), pattern, 20, config=CONFIG._replace(splits=splits))
        assert out[0, 0].isnan().all()  # position 20 is at the offset of the head
        assert testing.error(out[0, 1], expected[0, 1]) < 1e-6  # position 21 is in the short branch only


@pytest.mark.parametrize(("offset", "is_causal"), [(-1, True), (-40, False), (36, True), (500, False)])
def test_rows_outside_the_keys_see_nothing(offset: int, is_causal: bool) -> None:
    """Positions on the device cannot be checked without waiting for it."""
    q, k, v = make(3, 37, samples=2)
    out, lse = run((q, k, v), PATTERN, positions(20, offset), is_causal=is_causal)
    exact, _ = reference.attention(q, k, v, PATTERN, query_offset=20, is_causal=is_causal, scale=0.3)
    assert testing.error(out[0], exact[0]) < 5e-6
    inside = [0 <= offset + i < 37 for i in range(3)]
    assert lse[1].isfinite().all(1).tolist() == inside
    assert out[1].any(2).all(1).tolist() == inside
    assert not out[1, [not x for x in inside]].any()


def test_nothing_to_see_and_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote reaches nothing."""
    make_empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: make_empty(*args, **kwargs).fill_(math.nan))
    q, k, v = make(2, 37)
    everything = torch.ones(1, 37, dtype=torch.bool, device=DEVICE)
    for splits in (1, 3):
        out, lse = run((q, k, v), PATTERN, 20, padding=everything, config=CONFIG._replace(splits=splits))
        assert (out == 0).all()
        assert (lse == -math.inf).all()
    out, lse = run((q[:, :0], k, v), PATTERN, 20)
    assert (out.shape, lse.shape) == ((1, 0, 2, 8), (1, 0, 2))


@pytest.mark.parametrize(("queries", "on_device", "ours"), [(64, False, True), (65, False, False), (65, True, True)])
def test_more_queries_are_the_librarys(queries: int, on_device: bool, ours: bool) -> None:
    """Unless their positions are on the device."""
    x = make(100, 100, 4, 4, 16, samples=2)[0]
    told = explain(x[:, :queries], x, x, PATTERN, query_offset=positions(3, 30) if on_device else None)
    assert told.backend == ("triton" if ours else "sdpa")
    assert ours or "up to 64 queries" in told.why_not["triton"][0]


def test_a_sign_that_is_still_to_be_turned() -> None:
    given = make(1, 40)
    expected = dilated_attention(*given, PATTERN, backend="triton")
    for which, x in enumerate(given):
        turned = (*given[:which], torch._neg_view(-x), *given[which + 1 :])
        assert torch.equal(dilated_attention(*turned, PATTERN, backend="triton"), expected)
