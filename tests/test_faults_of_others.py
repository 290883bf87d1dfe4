"""Faults found in what people use today, on one device, and tests that notice them without an oracle.

More of them are noticed by the table of cases, test_poison, test_edges and test_mixing.
"""

from __future__ import annotations

import math

import pytest
import torch

from dilated_attention import DilatedPattern, dilated_attention, testing
from dilated_attention.pattern import RULES

BY_BACKEND = pytest.mark.parametrize("backend", ["sdpa", "eager"])
FIVE = ((4, 8, 16, 32, 64), (1, 2, 4, 6, 12))


@pytest.mark.parametrize("rule", RULES)
@BY_BACKEND
def test_no_causal_leak_at_any_position(rule: str, backend: str) -> None:
    """Wrapped indices, or a division by sums over all rows, show the future to some row."""
    x = testing.make_qkv(1, 23, 4, 4, dtype=torch.float64)[0].requires_grad_()
    out = dilated_attention(x, x, x, DilatedPattern(rule, (6, 20), (1, 3)), is_causal=True, backend=backend)
    for row in range(23):
        (grad,) = torch.autograd.grad(out[:, row].sum(), x, retain_graph=True)
        assert (grad[:, row + 1 :] == 0).all(), f"row {row} sees a later token"


@pytest.mark.parametrize("rule", ["longnet", "head_groups"])
@pytest.mark.parametrize("is_causal", [False, True])
@BY_BACKEND
def test_the_weights_of_a_row_sum_to_one(rule: str, is_causal: bool, backend: str) -> None:
    """Not to the number of branches, nor to 4 or 6."""
    q, k, v = testing.make_qkv(1, 70, 12, 4, dtype=torch.float64)
    options = {"is_causal": is_causal, "backend": backend, "return_lse": True}
    out, lse = dilated_attention(q, k, torch.ones_like(v), DilatedPattern(rule, *FIVE), **options)
    assert testing.error(out, (lse > -math.inf).to(out.dtype)[..., None].expand_as(out)) < 1e-12


@pytest.mark.parametrize(("rule", "zeros"), [("longnet", 0), ("head_groups", 0), ("torchscale", 3)])
def test_tokens_that_are_not_there_are_not_attended(rule: str, zeros: int) -> None:
    """A tail padded with zeros would count zero keys; only torchscale's rule asks for them, once."""
    q, k, v = testing.make_qkv(1, 5, 2, 4, dtype=torch.float64)
    out, lse = dilated_attention(q, k, v, DilatedPattern(rule, (4,), (1,)), return_lse=True)
    weight = ((q[:, 4] * k[:, 4]).sum(-1) / 2).exp()
    assert testing.error(out[:, 4], v[:, 4] * (weight / (weight + zeros))[..., None]) < 1e-12
    assert testing.error(lse[:, 4], (weight + zeros).log()) < 1e-12


def test_dropout_is_honoured_and_only_when_asked() -> None:
    """There is no training mode in a function: without dropout_p nothing is dropped and no random number drawn."""
    qkv, pattern = testing.make_qkv(1, 32, 4, 8), DilatedPattern.longnet([8, 32], [1, 2])
    before = torch.get_rng_state()
    one, two = (dilated_attention(*qkv, pattern) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.allclose(dilated_attention(*qkv, pattern, dropout_p=0.5), one, atol=1e-2)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_a_second_training_step_works(rule: str, dropout_p: float) -> None:
    torch.manual_seed(0)
    project = torch.nn.Linear(16, 3 * 16)
    optimiser = torch.optim.SGD(project.parameters(), lr=0.5)
    pattern, target = DilatedPattern(rule, (8, 32), (1, 3)), torch.randn(2, 33, 4, 4)
    losses = []
    for tokens in (33, 20, 33, 33, 33):
        x = torch.randn(2, 33, 16, generator=torch.Generator().manual_seed(1))[:, :tokens]
        q, k, v = project(x).view(2, tokens, 12, 4).chunk(3, 2)
        loss = (dilated_attention(q, k, v, pattern, dropout_p=dropout_p) - target[:, :tokens]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[4] < losses[2] < losses[0]
