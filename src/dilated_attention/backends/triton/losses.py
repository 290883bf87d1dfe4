"""The losses of some tokens and the gradients of their logits in one launch: a program has one token.

PyTorch's own operations read and write the logits about ten times; this reads them twice and writes them once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, float32, int64

BLOCK = 4096  # logits that a program has at a time


@triton.jit
def loss_kernel(Logits, Labels, Losses, size, IGNORED: constexpr, WRITES: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(int64)
    logits, label, columns = Logits + row * size, tl.load(Labels + row), tl.arange(0, BLOCK)
    is_token, counts = (label >= 0) & (label < size), label != IGNORED
    # read before the sums, for which all threads wait: later another thread may have written there
    own = tl.load(logits + label, mask=is_token, other=float("nan")).to(float32)
    top, mass = float("-inf"), 0.0
    for first in range(0, size, BLOCK):
        x = tl.load(logits + first + columns, mask=first + columns < size, other=float("-inf")).to(float32)
        new = tl.maximum(top, tl.max(x, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        mass = mass * tl.exp(top - safe) + tl.sum(tl.exp(x - safe), 0)
        top = new
    log_mass = tl.log(mass)
    tl.store(Losses + row, tl.where(counts, top - own + log_mass, 0.0))  # top + log_mass would lose digits
    if WRITES:
        for first in range(0, size, BLOCK):
            at, here = logits + first + columns, first + columns < size
            x = tl.load(at, mask=here, other=float("-inf")).to(float32)
            grad = tl.exp(x - top - log_mass) - tl.where(first + columns == label, 1.0, 0.0)
            grad = tl.where(is_token, grad, tl.where(counts, float("nan"), 0.0))
            tl.store(at, grad.to(Logits.dtype.element_ty), mask=here)


def losses_(logits: Tensor, labels: Tensor, ignored: int, writes: bool) -> Tensor:
    """The loss of each row of logits (n, V), in float32. If ``writes``, its gradient takes the place of the logits."""
    found = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        with torch.cuda.device_of(logits):
            loss_kernel[(len(logits),)](
                logits, labels, found, logits.shape[1], IGNORED=ignored, WRITES=writes, BLOCK=BLOCK, num_warps=8
            )
    return found
