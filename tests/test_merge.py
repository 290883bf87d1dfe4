"""The (out, lse) monoid against softmax over unions of keys; the laws themselves are in test_properties."""

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


@pytest.mark.parametrize("cuts", [(3, 4), (1, 6), (2, 2, 3), (1, 1, 1, 1, 1, 1, 1)])
@pytest.mark.parametrize("size", [1.0, 50.0, 1e4])
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


def test_the_identity_on_either_side_changes_no_bit() -> None:
    out, lse = torch.randn(4, 3), torch.tensor([0.0, -3.0, 90.0, -90.0])
    empty, empty_lse = torch.zeros(4, 3), torch.full((4,), -INF)
    for got in (merged((out, lse), (empty, empty_lse)), merged((empty, empty_lse), (out, lse))):
        assert torch.equal(got[0], out)
        assert torch.equal(got[1], lse)


def test_nothing_merged_with_nothing_is_nothing() -> None:
    empty = torch.zeros(2, 3), torch.full((2,), -INF)
    out, lse = merged(empty, empty)
    assert torch.equal(out, empty[0])
    assert torch.equal(lse, empty[1])


def test_an_lse_of_zero_is_a_weight_of_one() -> None:
    one, two = torch.full((1, 2), 4.0), torch.full((1, 2), 8.0)
    out, lse = merged((one, torch.zeros(1)), (two, torch.zeros(1)))
    assert torch.equal(out, torch.full((1, 2), 6.0))
    torch.testing.assert_close(lse, torch.full((1,), math.log(2.0)))

    out, lse = merged((one, torch.zeros(1)), (two, torch.full((1,), math.log(3.0))))
    torch.testing.assert_close(out, torch.full((1, 2), 7.0))
    torch.testing.assert_close(lse, torch.full((1,), math.log(4.0)))


def test_rows_of_all_kinds_side_by_side() -> None:
    lse = torch.tensor([-INF, -INF, 0.0, 2.0])
    part_lse = torch.tensor([-INF, 1.0, -INF, 2.0])
    out = torch.tensor([[0.0], [0.0], [3.0], [5.0]])
    part = torch.tensor([[0.0], [4.0], [0.0], [7.0]])
    merge_(out, lse, part, part_lse)
    assert torch.equal(out, torch.tensor([[0.0], [4.0], [3.0], [6.0]]))
    torch.testing.assert_close(lse, torch.tensor([-INF, 1.0, 0.0, 2.0 + math.log(2.0)]))


@pytest.mark.parametrize("far", [200.0, 1e4, 1e30])
def test_a_negligible_part_neither_overflows_nor_leaks(far: float) -> None:
    out, lse = torch.ones(1, 2), torch.tensor([far])
    part, part_lse = torch.full((1, 2), 5.0), torch.tensor([-far])
    for one, other in (((out, lse), (part, part_lse)), ((part, part_lse), (out, lse))):
        got, got_lse = merged(one, other)
        assert torch.equal(got, out)
        assert torch.equal(got_lse, lse)


def test_merging_writes_in_place_and_only_there() -> None:
    whole, whole_lse = torch.zeros(4, 6, 2), torch.full((4, 6), -INF)
    out, lse = whole[:, 1::2], whole_lse[:, 1::2]
    part, part_lse = torch.randn(4, 3, 2), torch.randn(4, 3)
    kept, kept_lse = part.clone(), part_lse.clone()
    merge_(out, lse, part, part_lse)
    assert torch.equal(whole[:, 1::2], part)
    assert torch.equal(whole_lse[:, 1::2], part_lse)
    assert (whole[:, ::2] == 0).all()
    assert (whole_lse[:, ::2] == -INF).all()
    assert torch.equal(part, kept)
    assert torch.equal(part_lse, kept_lse)


def test_half_precision_parts_are_merged_without_rounding() -> None:
    out, lse = torch.full((1, 2), 1.0), torch.zeros(1)
    merge_(out, lse, torch.full((1, 2), 1.0078125, dtype=torch.bfloat16), torch.zeros(1))  # the next one after 1
    assert out.dtype is torch.float32
    assert torch.equal(out, torch.full((1, 2), 1.00390625))


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_zero_keys_are_keys_of_score_and_value_zero(count: int, as_tensor: bool) -> None:
    scores = torch.randn(5, 7, dtype=torch.float64)
    values = torch.randn(7, 3, dtype=torch.float64)
    out, lse = state(scores, values)
    log_count = torch.full((5,), math.log(count), dtype=torch.float64) if as_tensor else math.log(count)
    add_zero_keys_(out, lse, log_count)
    expected, expected_lse = state(
        torch.cat([scores, scores.new_zeros(5, count)], 1), torch.cat([values, values.new_zeros(count, 3)])
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)


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

    def merged(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        found, found_lse = out.clone(), lse.clone()
        for first in range(0, rows, step):
            some = slice(first, first + step)
            merge_(found[some], found_lse[some], part[some], part_lse[some])
            add_zero_keys_(found[some], found_lse[some], 0.7)
        return found, found_lse

    for step in (1, 5, 100):
        for got, wanted in zip(merged(step), merged(rows), strict=True):
            assert torch.equal(got, wanted), step
