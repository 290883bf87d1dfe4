"""Faults found in what people use today, on one device, and tests that notice them without an oracle.

More of them are noticed by the table of cases, test_poison, test_edges and test_mixing.
"""

from __future__ import annotations

import pytest
import torch

from dilated_attention import DilatedPattern, dilated_attention, testing
from dilated_attention.pattern import RULES

BY_RULE = pytest.mark.parametrize("rule", RULES)


@BY_RULE
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_no_causal_leak_at_any_position(rule: str, backend: str) -> None:
    """Wrapped indices, or a division by sums over all rows, show the future to some row."""
    x = testing.make_qkv(1, 23, 4, 4, dtype=torch.float64)[0].requires_grad_()
    out = dilated_attention(x, x, x, DilatedPattern(rule, (6, 20), (1, 3)), is_causal=True, backend=backend)
    for row in range(23):
        (grad,) = torch.autograd.grad(out[:, row].sum(), x, retain_graph=True)
        assert not grad[:, row + 1 :].any(), f"row {row} sees a later token"


@pytest.mark.parametrize(("rule", "zeros"), [("longnet", 0), ("head_groups", 0), ("torchscale", 3)])
def test_weights_sum_to_one_without_tokens_that_are_not_there(rule: str, zeros: int) -> None:
    """A tail padded with zeros would count zero keys; only torchscale's rule asks for them, once."""
    q, k, v = testing.make_qkv(1, 5, 2, 4, dtype=torch.float64)
    out, lse = dilated_attention(q, k, v, DilatedPattern(rule, (4,), (1,)), return_lse=True)
    weight = ((q[:, 4] * k[:, 4]).sum(-1) / 2).exp()
    assert testing.error(out[:, 4], v[:, 4] * (weight / (weight + zeros))[..., None]) < 1e-12
    assert testing.error(lse[:, 4], (weight + zeros).log()) < 1e-12


def test_dropout_only_when_asked() -> None:
    """There is no training mode in a function: without dropout_p no random number is drawn."""
    qkv, pattern = testing.make_qkv(1, 32, 4, 8), DilatedPattern.longnet([8, 32], [1, 2])
    before = torch.get_rng_state()
    plain = dilated_attention(*qkv, pattern)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.allclose(dilated_attention(*qkv, pattern, dropout_p=0.5), plain, atol=1e-2)
    assert not torch.equal(torch.get_rng_state(), before)


@BY_RULE
def test_a_second_training_step_works(rule: str) -> None:
    torch.manual_seed(0)
    project, target, losses = torch.nn.Linear(16, 3 * 16), torch.randn(2, 33, 4, 4), []
    optimiser, x = torch.optim.SGD(project.parameters(), lr=0.5), torch.randn(2, 33, 16)
    for tokens in (33, 20, 33, 33, 33):
        q, k, v = project(x[:, :tokens]).view(2, tokens, 12, 4).chunk(3, 2)
        out = dilated_attention(q, k, v, DilatedPattern(rule, (8, 32), (1, 3)), dropout_p=0.1)
        loss = (out - target[:, :tokens]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[4] < losses[2] < losses[0]
