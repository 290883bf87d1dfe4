"""Parts merged, written and added in one launch, against `merge` in float64. Run by test_triton: in Triton's
interpreter, and on a GPU if there is one.

What lies around a view is poisoned with NaN, and so is what a state at -inf holds: neither may matter or change.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, merge
from dilated_attention.backends.triton import fuse
from dilated_attention.blocks import View
from dilated_attention.call import Call
from dilated_attention.plan import plan
from tests.cases import INTERPRETED
from tests.on_gpu import DEVICE

# the interpreter knows no bfloat16
HALVES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
INF = math.inf

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of -inf - -inf


class Place(NamedTuple):
    """Rows of a tensor (B, N, H, ...) and how many query heads there are for each of their heads."""

    rows: View
    whole: tuple[int, int, int]
    group: int = 1

    def view(self, x: Tensor) -> Tensor:
        return self.rows.of(x, self.group)

    def shape(self) -> tuple[int, int, int]:
        return (self.rows.samples * self.rows.segments, self.rows.rows, self.rows.heads * self.group)


def one(rows: int, heads: int = 3, samples: int = 2) -> Place:
    """All heads of every second token."""
    view = View(0, samples, 1, 1, 2 * rows, rows, 2, head=0, heads=heads, head_step=1, token_step=0)
    return Place(view, (samples, 2 * rows, heads))


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def transposed(place: Place, dim: int, dtype: torch.dtype, seed: int = 1) -> tuple[Tensor, Tensor]:
    """A part and its lse as cuDNN may give them: rows side by side for each head."""
    batch, rows, heads = place.shape()
    part = randn(batch, heads, rows, dim, dtype=dtype, seed=seed).transpose(1, 2)
    return part, 3 * randn(batch, heads, rows, seed=seed + 1).transpose(1, 2)


def poisoned(place: Place, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out, lse) of all tokens with numbers in the view and NaN around it."""
    out = torch.full((*place.whole, dim), math.nan, dtype=dtype, device=DEVICE)
    lse = torch.full(place.whole, math.nan, device=DEVICE)
    place.view(out).copy_(randn(*place.shape(), dim, seed=3))
    place.view(lse).copy_(3 * randn(*place.shape(), seed=4))
    return out, lse


def close(got: Tensor, exact: Tensor) -> None:
    rtol = 1.01 * {torch.float16: 2**-11, torch.bfloat16: 2**-8}.get(got.dtype, 1e-6)
    torch.testing.assert_close(got.double(), exact, rtol=rtol, atol=2e-6, equal_nan=True)


def untouched(place: Place, after: Tensor, before: Tensor) -> None:
    after, before = after.clone(), before.clone()
    for x in (after, before):
        place.view(x).zero_()
    assert torch.equal(after.isnan(), before.isnan())
    assert torch.equal(after.nan_to_num(), before.nan_to_num())


def check(
    place: Place, dim: int, dtype: torch.dtype = torch.float32, part_dtype: torch.dtype = torch.float16, *,
    first: bool = False, zeros: Tensor | float | None = None, empty: tuple[Any, Any] = ((), ()),
) -> None:  # fmt: skip
    """One merge, or one write. ``empty``: the rows, as an index, where (out, lse) is at -inf, and where the part is."""
    out, lse = poisoned(place, dim, dtype)
    part, part_lse = transposed(place, dim, part_dtype)
    states = ((place.view(out), place.view(lse), empty[0]), (part, part_lse, empty[1]))
    for state, state_lse, where in states:
        if where != ():
            state_lse[where], state[where] = -INF, math.nan
    before, before_lse, kept, kept_lse = (x.clone() for x in (out, lse, part, part_lse))
    # the same in float64, from clean states
    (exact, exact_lse), (other, other_lse) = (
        (x.double().masked_fill(y.unsqueeze(-1) == -INF, 0.0), y.double()) for x, y, _ in states
    )
    if zeros is not None:
        merge.add_zero_keys_(other, other_lse, torch.as_tensor(zeros, device=DEVICE).double())
    if first:
        exact, exact_lse = other, other_lse
    else:
        merge.merge_(exact, exact_lse, other, other_lse)
    fuse.merge_(place.view(out), place.view(lse), part, part_lse, zeros, first=first)
    got = place.view(out)
    if not first:  # nothing came of nothing: not even what stood there is touched
        got = got.masked_fill(exact_lse.unsqueeze(-1) == -INF, 0.0)
    close(got, exact)
    close(place.view(lse), exact_lse)
    untouched(place, out, before)
    untouched(place, lse, before_lse)
    assert torch.equal(part.nan_to_num(), kept.nan_to_num())
    assert torch.equal(part_lse, kept_lse)
    for add in (False, True):
        check_put(place, dim, dtype, part_dtype, add)


def check_put(place: Place, dim: int, dtype: torch.dtype, part_dtype: torch.dtype, add: bool) -> None:
    was, (part, _) = poisoned(place, dim, dtype)[0], transposed(place, dim, part_dtype)
    fuse.put_(place.view(whole := was.clone()), part, add)
    assert torch.equal(place.view(whole), (part.float() + place.view(was).float() if add else part).to(dtype))
    untouched(place, whole, was)


@pytest.mark.parametrize(
    ("rows", "dim", "first"),
    [(1, 5, False), (3, 80, True), (63, 16, False), (64, 64, True), (65, 20, False), (129, 80, False), (7, 1, True),
     (7, 300, False)],
)  # fmt: skip
def test_sizes(rows: int, dim: int, first: bool) -> None:
    check(one(rows, heads=2, samples=1), dim, first=first)


@pytest.mark.parametrize("part_dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_dtypes(dtype: torch.dtype, part_dtype: torch.dtype) -> None:
    check(one(33), 24, dtype, part_dtype, first=dtype is part_dtype)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("zeros", [None, 0.7])
def test_empty_states(first: bool, zeros: float | None) -> None:
    """Nothing there, nothing to merge, neither; side by side with rows that have both."""
    rows = torch.arange(8)
    here, there = (rows % 2 == 1, rows % 4 >= 2)
    for empty in (((slice(None), here), (slice(None), there)), ((...,), (...,))):
        check(one(8), 16, first=first, zeros=zeros, empty=empty)


@pytest.mark.parametrize(("rule", "group"), [("longnet", 1), ("torchscale", 2), ("head_groups", 2)])
def test_every_block_of_a_plan(rule: str, group: int) -> None:
    """Segments in the batch, short last ones, heads in steps and on diagonals."""
    shape = {"samples": 2, "queries": 22, "keys": 22, "heads": 4 * group, "kv_heads": 4}
    blocks = plan(Call(DilatedPattern.of(rule, [6, 16], [1, 3]), head_dim=8, total=22, **shape)).blocks
    assert len(blocks) > 3
    assert any(block.queries.token_step for block in blocks) or rule != "longnet"
    for block in blocks:
        check(Place(block.queries, (2, 22, 4 * group), group), 8)
        check_put(Place(block.queries, (2, 22, 4)), 8, torch.float16, torch.float16, True)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", ["number", "heads"])
def test_zero_keys(kind: str, first: bool) -> None:
    place = one(17)
    zeros = 1.5
    if kind == "heads":
        zeros = randn(2, 1, 3, seed=9)
        zeros[1, 0, 2] = -INF  # none of them
    check(place, 16, first=first, zeros=zeros, empty=((slice(None), slice(2, 9)), (slice(None), slice(6, 13))))


def test_nan_and_infinity_are_not_hidden() -> None:
    """As in `merge`: an lse of NaN spreads; +inf has all the weight, and two of them have no mean."""
    values = [math.nan, INF, -INF, 0.5]
    lse = torch.tensor(values, device=DEVICE)[None, :, None].expand(4, 4, 1).contiguous()
    part_lse = lse.transpose(0, 1).contiguous()
    out, part = randn(4, 4, 1, 8), randn(4, 4, 1, 8, seed=1)
    exact, exact_lse = out.double(), lse.double()
    merge.merge_(exact, exact_lse, part.double(), part_lse.double())
    fuse.merge_(out, lse, part, part_lse, first=False)
    close(out, exact)
    close(lse, exact_lse)


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (2, 0, 2, 8), (2, 4, 0, 8), (2, 4, 2, 0)])
def test_nothing_to_do(shape: tuple[int, ...]) -> None:
    out, lse = torch.empty(shape, device=DEVICE), torch.zeros(shape[:3], device=DEVICE)
    fuse.merge_(out, lse, out, lse, first=False)
    fuse.put_(out, out, add=True)
