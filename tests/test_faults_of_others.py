"""Faults found in what people use today, on one device, and tests that notice them without an oracle.

More of them are noticed by the table of cases, test_poison, test_properties and test_mixing.
"""

from __future__ import annotations

import math

import pytest
import torch

from dilated_attention import DilatedPattern, dilated_attention, testing
from dilated_attention.pattern import RULES

BACKENDS = ("sdpa", "eager")
BY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
FIVE = ((4, 8, 16, 32, 64), (1, 2, 4, 6, 12))
TWO = DilatedPattern.longnet([8, 32], [1, 2])


# --- heads ------------------------------------------------------------------------------------------------------


@BY_BACKEND
def test_heads_do_not_mix(backend: str) -> None:
    q, k, v = testing.make_qkv(1, 32, 4, 4)
    out = dilated_attention(q, k, v, TWO, backend=backend)
    k[:, :, 2], v[:, :, 2] = 9.0, -9.0
    changed = dilated_attention(q, k, v, TWO, backend=backend)
    assert torch.equal(changed[:, :, [0, 1, 3]], out[:, :, [0, 1, 3]])
    assert not torch.allclose(changed[:, :, 2], out[:, :, 2])


# --- the future -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@BY_BACKEND
def test_no_causal_leak_at_any_position(rule: str, backend: str) -> None:
    """Wrapped indices, or a division by sums over all rows, show the future to some row."""
    x = testing.make_qkv(1, 23, 4, 4, dtype=torch.float64)[0].requires_grad_()
    out = dilated_attention(x, x, x, DilatedPattern(rule, (6, 20), (1, 3)), is_causal=True, backend=backend)
    for row in range(23):
        (grad,) = torch.autograd.grad(out[:, row].sum(), x, retain_graph=True)
        assert (grad[:, row + 1 :] == 0).all(), f"row {row} sees a later token"


@pytest.mark.parametrize("rule", RULES)
def test_the_first_row_sees_itself_alone_when_causal(rule: str) -> None:
    q, k, v = testing.make_qkv(2, 23, 4, 4, dtype=torch.float64)
    out = dilated_attention(q, k, v, DilatedPattern(rule, (6, 20), (1, 1)), is_causal=True)
    assert testing.error(out[:, 0], v[:, 0]) < 1e-12


def test_the_last_segment_does_not_wrap_around() -> None:
    """Indices past the end, taken modulo N, would show the first tokens to the last segment."""
    q, k, v = testing.make_qkv(1, 21, 4, 4)
    pattern = DilatedPattern.longnet([8, 16], [1, 3])
    out = dilated_attention(q, k, v, pattern)
    k[:, :16], v[:, :16] = 5.0, -5.0
    assert torch.equal(dilated_attention(q, k, v, pattern)[:, 16:], out[:, 16:])


# --- weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["longnet", "head_groups"])
@pytest.mark.parametrize("is_causal", [False, True])
@BY_BACKEND
def test_the_weights_of_a_row_sum_to_one(rule: str, is_causal: bool, backend: str) -> None:
    """Not to the number of branches, nor to 4 or 6."""
    q, k, v = testing.make_qkv(1, 70, 12, 4, dtype=torch.float64)
    options = {"is_causal": is_causal, "backend": backend, "return_lse": True}
    out, lse = dilated_attention(q, k, torch.ones_like(v), DilatedPattern(rule, *FIVE), **options)
    assert testing.error(out, (lse > -math.inf).to(out.dtype)[..., None].expand_as(out)) < 1e-12
    assert (out[lse == -math.inf] == 0).all()


def test_out_is_not_divided_by_its_own_sum() -> None:
    """Values that sum to zero, or to less, are an ordinary result."""
    q, k, v = testing.make_qkv(1, 32, 4, 4, dtype=torch.float64)
    out, small, centred = (dilated_attention(q, k, x, TWO) for x in (v, 1e-8 * v, v - v.mean(-1, keepdim=True)))
    assert testing.error(small * 1e8, out) < 1e-12
    assert testing.error(centred.sum(-1), 0 * out[..., 0]) < 1e-12


@pytest.mark.parametrize(("rule", "zeros"), [("longnet", 0), ("head_groups", 0), ("torchscale", 3)])
def test_tokens_that_are_not_there_are_not_attended(rule: str, zeros: int) -> None:
    """A tail padded with zeros would count zero keys; only torchscale's rule asks for them, once."""
    q, k, v = testing.make_qkv(1, 5, 2, 4, dtype=torch.float64)
    out, lse = dilated_attention(q, k, v, DilatedPattern(rule, (4,), (1,)), return_lse=True)
    weight = ((q[:, 4] * k[:, 4]).sum(-1) / 2).exp()
    assert testing.error(out[:, 4], v[:, 4] * (weight / (weight + zeros))[..., None]) < 1e-12
    assert testing.error(lse[:, 4], (weight + zeros).log()) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_an_lse_of_exactly_zero_is_not_a_missing_branch(rule: str) -> None:
    """One key of score 0 has lse 0 and weight 1; taken for missing, it would vanish from the mix."""
    q = torch.zeros(1, 2, 2, 4, dtype=torch.float64)
    _, k, v = testing.make_qkv(1, 2, 2, 4, dtype=torch.float64)
    pattern = DilatedPattern(rule, (1, 2), (1, 1))
    out, lse = dilated_attention(q, k, v, pattern, return_lse=True)
    if rule == "head_groups":
        assert (lse[:, :, 0] == 0).all()
        assert testing.error(out[:, :, 0], v[:, :, 0]) < 1e-12
        return
    expected = torch.stack([2 * v[:, 0] + v[:, 1], v[:, 0] + 2 * v[:, 1]], 1) / 3  # its own key counts twice
    assert testing.error(out, expected) < 1e-12
    assert testing.error(lse, torch.full_like(lse, math.log(3.0))) < 1e-12


# --- options that were taken and ignored ------------------------------------------------------------------------


def test_dropout_is_honoured_and_only_when_asked() -> None:
    """There is no training mode in a function: without dropout_p nothing is dropped and no random number drawn."""
    qkv = testing.make_qkv(1, 32, 4, 8)
    before = torch.get_rng_state()
    one, two = (dilated_attention(*qkv, TWO) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.allclose(dilated_attention(*qkv, TWO, dropout_p=0.5), one, atol=1e-2)
    assert not torch.equal(torch.get_rng_state(), before)


# --- gradients and training -------------------------------------------------------------------------------------


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
