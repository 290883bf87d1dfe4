"""A call, forward and backward: by a backend that takes it whole, or block by block, on one device or over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.choose import choose
from dilated_attention.backends.problem import Gradients, Inputs, Outputs, Pair
from dilated_attention.backends.tensors import finished, no_autocast, without_silent_rows
from dilated_attention.call import Call


def forward(call: Call, inputs: Inputs, over: Any = Work) -> Pair:
    """(out, lse). ``over``: what computes the blocks: over ranks, a `ring.parallel.ParallelCall`."""
    choice = choose(call)
    if choice.is_whole:
        return choice.module.forward_call(call, inputs)  # type: ignore[no-any-return]
    with no_autocast(call.device):
        out, lse = over.forward(over.of(call, inputs, choice))
    return finished(out, call, call.dtype), lse.contiguous().detach()


def backward(
    call: Call, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None,
    over: Any = Work,
) -> Gradients:  # fmt: skip
    """The gradients of q, k and v from those of out and lse; None: nothing depends on it."""
    if not call.pattern.is_exact:
        return _detached(call, inputs, lse, dout, dlse)
    results = Outputs(out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
    choice = choose(call, backward=True)
    if choice.is_whole:
        return choice.module.backward_call(call, inputs, results)  # type: ignore[no-any-return]
    with no_autocast(call.device):
        inputs, results, bad = without_silent_rows(call, inputs, results)
        if call.device.type == "cuda":  # q laid out as out and dout are: one copy here spares cuDNN one per block
            inputs = inputs._replace(q=inputs.q.contiguous())
        work = over.of(call, inputs, choice, backward=True)
        grads = over.backward(work, work.results(results))
    dq, dk, dv = (finished(grad, call, x.dtype) for grad, x in zip(grads, inputs[:3], strict=True))
    return dq if bad is None else dq.masked_fill(bad.unsqueeze(-1), torch.nan), dk, dv


def _detached(call: Call, inputs: Inputs, lse: Tensor, dout: Tensor | None, dlse: Tensor | None) -> Gradients:
    """As if the weights that mix branches were constants: each branch's gradients, with its own out for the merged one.

    A row's sum of dout times out is what its weights' gradients are measured from. With the merged out, they include
    those of the mixing. lse stays the merged one: it gives a pair its share of the whole.
    """
    total: list[Tensor] = []
    for branch in range(len(call.dilated.segment_lengths)):
        alone = call._replace(pattern=call.dilated.alone(branch), backend=choose(call, backward=True).name)
        grads = [x.to(call.sum_dtype) for x in backward(alone, inputs, forward(alone, inputs)[0], lse, dout, dlse)]
        total = [x.add_(y) for x, y in zip(total, grads, strict=True)] if total else grads
    dq, dk, dv = (x.to(call.dtype) for x in total)
    return dq, dk, dv
