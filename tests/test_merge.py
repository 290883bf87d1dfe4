"""The (out, lse) monoid: its laws, and softmax over unions of keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dilated_attention.merge import add_zero_keys_, merge_

INF = math.inf


def state(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of a softmax over these keys."""
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def merged(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    out, lse = (x.clone() for x in parts[0])
    for part in parts[1:]:
        merge_(out, lse, *part)
    return out, lse


@pytest.mark.parametrize("cuts", [(3, 4), (2, 2, 3), (1,) * 7])
@pytest.mark.parametrize("size", [1.0, 50.0, 1e30])
def test_merging_parts_is_one_softmax_over_all_keys(cuts: tuple[int, ...], size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 7, generator=generator, dtype=torch.float64) * size
    values = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    parts = [state(*part) for part in zip(scores.split(cuts, 1), values.split(cuts, 0), strict=True)]
    for order in (parts, parts[::-1]):
        out, lse = merged(*order)
        expected, expected_lse = state(scores, values)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-14, atol=1e-12)
    assert all(map(torch.equal, merged((out, lse), (torch.zeros_like(out), torch.full_like(lse, -INF))), (out, lse)))


def test_rows_of_all_kinds_side_by_side() -> None:
    """Nothing merged with nothing is nothing; an lse of 0 is a weight of 1."""
    lse = torch.tensor([-INF, -INF, 0.0, 2.0, 0.0])
    out, part = torch.tensor([[0.0, 0.0, 3.0, 5.0, 4.0], [0.0, 4.0, 0.0, 7.0, 8.0]]).unsqueeze(-1)
    merge_(out, lse, part, torch.tensor([-INF, 1.0, -INF, 2.0, 0.0]))
    assert out.squeeze(-1).tolist() == [0.0, 4.0, 3.0, 6.0, 6.0]
    torch.testing.assert_close(lse, torch.tensor([-INF, 1.0, 0.0, 2.0 + math.log(2.0), math.log(2.0)]))


def test_zero_keys_at_the_edges() -> None:
    out, lse = torch.tensor([[0.0], [0.0], [3.0]]), torch.tensor([-INF, -INF, 1.0])
    add_zero_keys_(out, lse, torch.tensor([-INF, 0.0, -INF]))  # none, one, none
    assert torch.equal(out, torch.tensor([[0.0], [0.0], [3.0]]))
    assert torch.equal(lse, torch.tensor([-INF, 0.0, 1.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_do_not_depend_on_where_a_number_stands(dtype: torch.dtype) -> None:
    """A CPU treats the last numbers of a tensor, which fill no vector, by other code."""
    generator = torch.Generator().manual_seed(0)
    rows = 1037
    out, part = (torch.randn(rows, 3, generator=generator, dtype=dtype) for _ in range(2))
    lse, part_lse = (4 * torch.randn(rows, generator=generator, dtype=dtype) for _ in range(2))

    def merged_by(step: int) -> tuple[Tensor, Tensor]:
        found, found_lse = out.clone(), lse.clone()
        for first in range(0, rows, step):
            some = slice(first, first + step)
            merge_(found[some], found_lse[some], part[some], part_lse[some])
            add_zero_keys_(found[some], found_lse[some], 0.7)
        return found, found_lse

    for step in (1, 5, 100):
        assert all(map(torch.equal, merged_by(step), merged_by(rows))), step
