"""Gradients by finite differences, and what the table of cases leaves out: other scales, large scores, lse alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dilated_attention import DilatedPattern, dilated_attention, testing
from dilated_attention.pattern import RULES

BACKENDS = ("sdpa", "eager")
SMALL = {
    "longnet": DilatedPattern.longnet([8, 16], [1, 3]),
    "torchscale": DilatedPattern.torchscale([8, 16], [1, 3]),
    "head_groups": DilatedPattern.head_groups([8, 16], [1, 3]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale", [1e-3, 4.0])
def test_any_scale(rule: str, scale: float, backend: str) -> None:
    qkv = testing.make_qkv(2, 21, 4, 8, kv_heads=2, dtype=torch.float64)
    testing.check(qkv, SMALL[rule], scale=scale, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_large_scores(rule: str, backend: str) -> None:
    q, k, v = testing.make_qkv(2, 21, 4, 8, dtype=torch.float64)
    testing.check((q * 10, k * 10, v), SMALL[rule], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_a_gradient_of_lse_alone(rule: str, backend: str) -> None:
    qkv = testing.make_qkv(2, 21, 4, 8, dtype=torch.float64)
    dlse = torch.randn(2, 21, 4, dtype=torch.float64)

    def lse_only(*x: Tensor) -> Tensor:
        lse = dilated_attention(*x, SMALL[rule], backend=backend, return_lse=True)[1]
        return lse.masked_fill(lse == -torch.inf, 0.0)

    leaves = [x.detach().requires_grad_() for x in qkv]
    grads = torch.autograd.grad(lse_only(*leaves), leaves, dlse)
    expected = testing.oracle(qkv, SMALL[rule], torch.zeros_like(qkv[0]), dlse)
    for got, wanted in zip(grads, (expected.dq, expected.dk, expected.dv), strict=True):
        assert testing.error(got, wanted) < 1e-12
    assert (grads[2] == 0).all()


# --- gradients by finite differences: no oracle in between ------------------------------------------------------

GRADCHECK = [
    pytest.param(DilatedPattern.longnet([4, 8], [1, 2]), 2, 2, id="longnet"),
    pytest.param(DilatedPattern.longnet([3, 5], [2, 4]), 3, 3, id="longnet-with-uncovered-rows"),
    pytest.param(DilatedPattern.torchscale([4, 8], [1, 2]), 2, 2, id="torchscale-with-zero-keys"),
    pytest.param(DilatedPattern.head_groups([4, 8], [1, 2]), 2, 2, id="head_groups"),
    pytest.param(DilatedPattern.longnet([4, 8], [1, 2]), 4, 2, id="grouped-query"),
]


WAYS = [("none", False, "sdpa"), ("random", True, "sdpa"), ("random", False, "eager"), ("none", True, "eager")]


@pytest.mark.parametrize("way", range(2))
@pytest.mark.parametrize(("pattern", "heads", "kv_heads"), GRADCHECK)
def test_gradcheck(pattern: DilatedPattern, heads: int, kv_heads: int, way: int) -> None:
    tokens = 6
    mask, is_causal, backend = WAYS[2 * way + len(pattern.rule) % 2]
    qkv = testing.make_qkv(1, tokens, heads, 2, kv_heads=kv_heads, dtype=torch.float64)
    padding = torch.tensor([[False, True, False, False, True, False]]) if mask == "random" else None

    def attention(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = dilated_attention(
            *x,
            pattern,
            is_causal=is_causal,
            key_padding_mask=padding,
            enable_gqa=True,
            backend=backend,
            return_lse=True,
        )
        return out, lse.masked_fill(lse == -torch.inf, 0.0)  # no difference quotient there

    assert torch.autograd.gradcheck(attention, [x.requires_grad_() for x in qkv])


@pytest.mark.parametrize("rule", RULES)
def test_gradcheck_with_dropout(rule: str) -> None:
    qkv = testing.make_qkv(1, 6, 2, 2, dtype=torch.float64)
    pattern = DilatedPattern(rule, (4, 8), (1, 1))

    def attention(*x: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        return dilated_attention(*x, pattern, dropout_p=0.4, return_lse=True)

    assert torch.autograd.gradcheck(attention, [x.requires_grad_() for x in qkv])
