"""Who looks at the tensors of a call, and which derivatives there are not: what one device and many ranks share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Gradients = TypeVar("Gradients", bound=tuple[Any, ...])
Backward = Callable[..., tuple[tuple[Any, ...], tuple[Tensor, ...]]]  # gradients, and what they depend on

NOT_TWICE = (
    "dilated_attention cannot be differentiated twice: its backward has no derivative. "
    "Drop create_graph=True, or use dilated_attention.reference.attention() for short sequences"
)
NOT_COMPILED = (
    "dilated_attention does not go through torch.func inside of torch.compile: leave one of the two out. torch.func "
    "works without torch.compile, and backward() works in compiled code"
)
NO_FORWARD_MODE = (
    "dilated_attention has no forward-mode derivative: use backward(), or for short sequences "
    "dilated_attention.reference.attention()"
)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether nobody looks on: no compiler, no dispatch mode, no transform, no subclass, no device without data."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active():
        return False
    for x in tensors:  # noqa: SIM110 - a short call notices what a generator costs
        if x is not None and (type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta):
            return False
    return True


def is_mapped(*gradients: Tensor | None) -> bool:
    """Whether a backward pass is asked for many gradients at once: by torch.func, or with is_grads_batched=True."""
    return torch._C._are_functorch_transforms_active() or any(is_batched(x) for x in gradients)


def is_batched(x: Tensor | None) -> bool:
    return x is not None and torch._C._functorch.is_legacy_batchedtensor(x)


def refuse_second_derivative(grads: Gradients, *others: Tensor | None, why: str = NOT_TWICE) -> Gradients:
    """Gradients made with create_graph=True: whoever differentiates them, by what they came from, gets an error."""
    return _Refusing.apply(why, len(grads), *grads, *others)  # type: ignore[no-untyped-call, no-any-return]


def once(why: str) -> Callable[[Backward], Callable[..., tuple[Any, ...]]]:
    """For a backward that has no derivative: whoever differentiates its result gets an error that says ``why``.

    Such a backward returns the gradients, and the inputs of its forward that they depend on. torch's
    `once_differentiable` looks at incoming gradients alone. That of a sum is a constant: a second derivative would be
    left out without an error.
    """

    def decorated(backward: Backward) -> Callable[..., tuple[Any, ...]]:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
            with torch.no_grad():
                found, inputs = backward(ctx, *grads)
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return found
            return refuse_second_derivative(found, *grads, *inputs, why=why)

        return run

    return decorated


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, why: str, count: int, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.why = why
        return tuple(None if x is None else x.view_as(x) for x in inputs[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(ctx.why)
