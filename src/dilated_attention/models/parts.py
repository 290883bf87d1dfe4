"""A step that sees each token alone, taken for some tokens at a time: what is wide inside it is never whole.

Legend: inputs and results (B, n, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from dilated_attention.autograd import once
from dilated_attention.call import accumulate_dtype

AT_ONCE = 1 << 16  # tokens
NOT_TWICE = "a long row with checkpointing cannot be differentiated twice: set model.checkpointing = False"
Tensors = tuple[Tensor, ...]
Step = Callable[..., Tensors]


def is_long(x: Tensor) -> bool:
    return x.shape[1] > AT_ONCE


def in_parts(step: Step, inputs: Tensors, weights: Iterable[Tensor], again: bool = False) -> Tensors:
    """step(*inputs), in parts if they are long. Where a gradient is wanted, that is done only if ``again``: then the
    backward pass computes each part again. ``weights``: all those of the step; others are left alone."""
    if not is_long(inputs[0]):
        return step(*inputs)
    trained = [weight for weight in weights if weight.requires_grad]
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in (*inputs, *trained)):
        return _cut(step, inputs)
    if not again:
        return step(*inputs)
    kept = _Kept.apply(len(inputs), *inputs, *trained)  # type: ignore[no-untyped-call]
    return _Again.apply(kept, step, len(inputs), *inputs, *trained)  # type: ignore[no-untyped-call, no-any-return]


def _parts(inputs: Tensors) -> Iterator[tuple[slice, Tensors]]:
    for first in range(0, inputs[0].shape[1], AT_ONCE):
        rows = slice(first, first + AT_ONCE)
        yield rows, tuple(x[:, rows] for x in inputs)


def _cut(step: Step, inputs: Tensors) -> Tensors:
    """Parts are written where they belong: joined in the end, they would be in memory twice."""
    results: list[Tensor] = []
    for rows, part in _parts(inputs):
        found = step(*part)
        results = results or [x.new_empty(len(x), inputs[0].shape[1], *x.shape[2:]) for x in found]
        for x, whole in zip(found, results, strict=True):
            whole[:, rows] = x
    return tuple(results)


class _Kept(torch.autograd.Function):
    """Keeps the inputs of `_Again`, and does it first: a checkpoint around both stops here when it computes them anew,
    since nothing after this is kept. It would otherwise compute all parts for nothing."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[:count])
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


class _Again(torch.autograd.Function):
    """The parts, each of which is computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, step: Step, count: int, *tensors: Tensor) -> Tensors:
        ctx.step, ctx.weights, ctx.kind = step, tensors[count:], kept.device.type
        ctx.autocast = {"dtype": torch.get_autocast_dtype(ctx.kind), "enabled": torch.is_autocast_enabled(ctx.kind)}
        return _cut(step, tensors[:count])

    @staticmethod
    @once(NOT_TWICE)
    def backward(ctx: Any, *grads: Tensor) -> tuple[tuple[Tensor | None, ...], Tensors]:
        inputs, weights = ctx.next_functions[0][0].saved_tensors, ctx.weights  # `_Kept` has the inputs
        wanted = ctx.needs_input_grad[3 : 3 + len(inputs)]
        dinputs = [torch.empty_like(x) if wants else None for x, wants in zip(inputs, wanted, strict=True)]
        dweights = [torch.zeros_like(weight, dtype=accumulate_dtype(weight.dtype)) for weight in weights]
        for rows, part in _parts(inputs):
            part = tuple(x.detach().requires_grad_(wants) for x, wants in zip(part, wanted, strict=True))
            with torch.enable_grad(), torch.autocast(ctx.kind, **ctx.autocast):
                found = ctx.step(*part)
            leaves = [*(x for x in part if x.requires_grad), *weights]
            given = [grad[:, rows] for grad in grads]
            new = iter(torch.autograd.grad(found, leaves, given, materialize_grads=True))  # a weight may be unused
            for dx in dinputs:
                if dx is not None:
                    dx[:, rows] = next(new)
            for total in dweights:
                total += next(new)
        rounded = (total.to(weight.dtype) for total, weight in zip(dweights, weights, strict=True))
        return (grads[0].new_empty(0), None, None, *dinputs, *rounded), (*inputs, *weights)
