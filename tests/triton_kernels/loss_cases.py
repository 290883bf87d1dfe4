"""The kernel of the losses, against cross-entropy in float64. Run by test_triton in a process of its own: in Triton's
interpreter on a CPU, and on a GPU if there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dilated_attention.backends.triton.losses import losses_
from dilated_attention.models.loss import IGNORED
from tests.cases import INTERPRETED
from tests.on_gpu import DEVICE

HALVES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]  # the interpreter knows no bfloat16
ROWS, CERTAIN, HARD = 12, 2, 3


def given(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits and labels, with a token that is all but certain, one that is most unlikely, and one that is ignored."""
    torch.manual_seed(size)
    logits, labels = 3 * torch.randn(ROWS, size, dtype=torch.float64), torch.randint(size, (ROWS,))
    labels[0], labels[1], labels[4] = 0, size - 1, IGNORED
    logits[CERTAIN, labels[CERTAIN]] = 15.0 + size**0.1
    logits[HARD, labels[HARD]] = -200.0
    return logits.to(DEVICE, dtype), labels.to(DEVICE)


@pytest.mark.parametrize("size", [1, 5, 4096, 4097, 10000])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_losses_and_gradients(size: int, dtype: torch.dtype) -> None:
    logits, labels = given(size, dtype)
    exact, before = logits.double().requires_grad_(), logits.clone()
    expected = F.cross_entropy(exact, labels, reduction="none", ignore_index=IGNORED)
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    losses = losses_(logits, labels, IGNORED, writes=False)
    assert torch.equal(logits, before)
    assert torch.equal(losses_(logits, labels, IGNORED, writes=True), losses)
    assert losses.dtype is torch.float32
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=2e-6, atol=2e-6)
    limits = {"rtol": max(2e-6, torch.finfo(dtype).eps), "atol": 5e-7}  # of a sum of thousands, in float32
    torch.testing.assert_close(logits.double(), gradient, **limits)
    assert not logits[4].any()


def test_what_is_wrong_with_a_row_is_told_and_stays_in_it() -> None:
    """Labels that are no tokens, NaN, and infinity."""
    logits, labels = torch.zeros(5, 5000, device=DEVICE), torch.tensor([5000, -1, 3, 1, 2], device=DEVICE)
    logits[3, 4999], logits[4, 7] = torch.nan, torch.inf
    losses = losses_(logits, labels, IGNORED, writes=True)
    assert losses.isnan().tolist() == [True, True, False, True, True]
    assert logits[:2].isnan().all()
    assert not logits[2].isnan().any()


def test_no_rows() -> None:
    logits, labels = torch.zeros(0, 7, device=DEVICE), torch.zeros(0, dtype=torch.long, device=DEVICE)
    assert losses_(logits, labels, IGNORED, writes=True).shape == (0,)
