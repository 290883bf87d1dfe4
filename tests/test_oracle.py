"""Gradients by finite differences, and what the table of cases leaves out: large scores, lse alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, dilated_attention, testing
from dilated_attention.pattern import RULES
from tests.cases import finite, leaves

BACKENDS = ("sdpa", "eager")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_large_scores_wide_heads_and_a_gradient_of_lse_alone(rule: str, backend: str) -> None:
    q, k, v = testing.make_qkv(2, 21, 4, 300, dtype=torch.float64)
    pattern = DilatedPattern(rule, (8, 16), (1, 3))
    testing.check((q * 10, k * 10, v), pattern, backend=backend)

    dlse, given = torch.randn(2, 21, 4, dtype=torch.float64), leaves(q, k, v)
    lse = dilated_attention(*given, pattern, backend=backend, return_lse=True)[1]
    grads = torch.autograd.grad(finite(lse), given, dlse)
    expected = testing.oracle((q, k, v), pattern, torch.zeros_like(q), dlse)
    for got, wanted in zip(grads, (expected.dq, expected.dk, expected.dv), strict=True):
        assert testing.error(got, wanted) < 1e-12
    assert (grads[2] == 0).all()


# --- gradients by finite differences: no oracle in between ------------------------------------------------------

PADDING = torch.tensor([[False, True, False, False, True, False]])
GRADCHECK = {
    "longnet": (DilatedPattern.longnet([4, 8], [1, 2]), 2, {"is_causal": True}),
    "uncovered rows": (DilatedPattern.longnet([3, 5], [2, 4]), 3, {"key_padding_mask": PADDING}),
    "zero keys": (DilatedPattern.torchscale([4, 8], [1, 2]), 2, {"key_padding_mask": PADDING}),
    "head_groups": (DilatedPattern.head_groups([4, 8], [1, 2]), 2, {"key_padding_mask": PADDING, "is_causal": True}),
    "grouped query": (DilatedPattern.longnet([4, 8], [1, 2]), 4, {"key_padding_mask": PADDING}),
    "dropout": (DilatedPattern.torchscale([4, 8], [1, 1]), 2, {"dropout_p": 0.4}),
}


@pytest.mark.parametrize(("name", "backend"), zip(GRADCHECK, itertools.cycle(BACKENDS), strict=False))
def test_gradcheck(name: str, backend: str) -> None:
    pattern, heads, options = GRADCHECK[name]
    qkv = testing.make_qkv(1, 6, heads, 2, kv_heads=2 if heads == 4 else heads, dtype=torch.float64)

    def attention(*x: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        out, lse = dilated_attention(*x, pattern, enable_gqa=True, backend=backend, return_lse=True, **options)
        return out, finite(lse)  # at -inf there is no difference quotient

    assert torch.autograd.gradcheck(attention, leaves(*qkv))
