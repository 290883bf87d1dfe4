"""The checker itself, what it lets pass and what not: one that could not fail would make every other test worthless."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, dilated_attention, testing
from tests.cases import LAYOUTS

PATTERN = DilatedPattern.longnet([8, 16], [1, 3])


def results(qkv: tuple[Tensor, ...]) -> list[testing.Results]:
    """Of the oracle, and of plain PyTorch."""
    dout, dlse = torch.ones_like(qkv[0]), torch.ones(qkv[0].shape[:3])
    return [testing.oracle(qkv, PATTERN, dout, dlse, dtype=dtype) for dtype in (torch.float64, None)]


def test_error_counts_from_one() -> None:
    expected = torch.tensor([0.5, -0.25])
    assert testing.error(expected + 0.125, expected) == 0.125
    assert testing.error(8 * expected + 0.5, 8 * expected) == 0.125  # relative once values exceed 1
    for x in (torch.tensor([-math.inf, 1.0]), torch.zeros(0, 3)):
        assert testing.error(x, x) == 0
    for value in (math.nan, -math.inf):
        wrong = torch.tensor([value, 0.0])
        assert testing.error(wrong, torch.zeros(2)) == testing.error(torch.zeros(2), wrong) == math.inf
    assert testing.error(torch.zeros(1), torch.zeros(2)) == math.inf


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_a_single_wrong_number_is_noticed(dtype: torch.dtype, name: str) -> None:
    qkv = testing.make_qkv(1, 20, 2, 8, dtype=dtype)
    expected, plain = results(qkv)
    rounded = {key: x.to(dtype if key != "lse" else x.dtype) for key, x in expected.items()}
    testing.assert_exact(testing.Results(**rounded), expected, plain)
    wrong = rounded[name].clone()
    wrong[(0, 3) + (0,) * (wrong.dim() - 2)] += {torch.float64: 1e-9, torch.float32: 1e-3}.get(dtype, 0.5)
    with pytest.raises(AssertionError, match=f"{name} is off by"):
        testing.assert_exact(testing.Results(**rounded)._replace(**{name: wrong}), expected, plain)


def test_check_runs_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = testing.make_qkv(1, 20, 2, 8, dtype=torch.float64)
    testing.check(qkv, PATTERN)
    monkeypatch.setattr(testing, "dilated_attention", functools.partial(dilated_attention, scale=0.3))
    with pytest.raises(AssertionError, match=r"out is off by .*; lse is off by .*; dq .*; dk .*; dv"):
        testing.check(qkv, PATTERN)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_made_inputs(layout: str) -> None:
    qkv, again, other = (testing.make_qkv(2, 5, 6, 4, kv_heads=3, layout=layout, seed=seed) for seed in (3, 3, 4))
    assert [x.shape for x in qkv] == [(2, 5, 6, 4), (2, 5, 3, 4), (2, 5, 3, 4)]
    assert all(map(torch.equal, qkv, again))
    assert not torch.equal(qkv[0], other[0])
    assert not torch.equal(qkv[1], qkv[2])
    assert qkv[0].is_contiguous() == (layout == "contiguous")
    with pytest.raises(ValueError, match="unknown layout 'diagonal'"):
        testing.make_qkv(1, 2, 3, 4, layout="diagonal")
