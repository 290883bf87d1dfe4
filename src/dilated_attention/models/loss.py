"""Cross-entropy of a large vocabulary, some tokens at a time: the logits of all tokens are never in memory at once.

A million tokens and 151,936 words would be 590 GiB of logits. The backward pass computes them again, part by part.

Legend: states (T, E); weight (V, E); labels (T,), IGNORED where a token has no label; losses (T,).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention.autograd import once
from dilated_attention.backends.losses import losses_
from dilated_attention.call import CuSeqlens, accumulate_dtype, checked_cu_seqlens
from dilated_attention.checks import check_int
from dilated_attention.resolve import computed_dtype, cu_seqlens_on_host

IGNORED = -100  # as in PyTorch
Gradients = tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]  # and what they were computed from
NOT_TWICE = "a loss in chunks cannot be differentiated twice: take F.cross_entropy of the model's logits for that"


def token_losses(states: Tensor, weight: Tensor, labels: Tensor, chunk: int = 8192) -> Tensor:
    """Computes the cross-entropy of each token, shaped like labels, in float32, or float64 for float64 states.

    Args:
        states: (..., E), the last hidden states.
        weight: (V, E), the output projection onto a vocabulary of V tokens.
        labels: (...) integers; -100 = ignored: the loss is 0.
        chunk: how many tokens have their logits in memory at a time.

    Examples:
        >>> models.token_losses(torch.zeros(1, 3, 8), torch.zeros(4, 8), torch.tensor([[1, 2, -100]]))
        tensor([[1.3863, 1.3863, 0.0000]])
    """
    return _apply(_Losses, states, weight, labels, chunk)  # type: ignore[no-any-return]


def summed_loss(states: Tensor, weight: Tensor, labels: Tensor, chunk: int = 8192) -> Tensor:
    """Computes the sum of `token_losses`, faster: gradients come from the same logits, which are computed once.

    Arguments are those of `token_losses`; the result has no dimensions.

    Examples:
        >>> models.summed_loss(torch.zeros(1, 3, 8), torch.zeros(4, 8), torch.tensor([[1, 2, -100]]))
        tensor(2.7726)
    """
    if not torch.is_grad_enabled():
        return token_losses(states, weight, labels, chunk).sum()
    return _apply(_Sum, states, weight, labels, chunk)  # type: ignore[no-any-return]


def _apply(function: Any, states: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Any:
    check_int("chunk", chunk)
    if labels.shape != states.shape[:-1]:
        raise ValueError(f"labels are {tuple(labels.shape)} and tokens {tuple(states.shape[:-1])}: they must agree")
    if labels.device.type == "cpu":  # on a GPU, to look at them would wait for it: there such a loss is NaN
        wrong = labels[((labels < 0) & (labels != IGNORED)) | (labels >= len(weight))]
        if len(wrong):
            raise ValueError(f"labels must be from 0 to {len(weight) - 1}, or {IGNORED}, got {int(wrong[0])}")
    dtype = computed_dtype(states)
    with torch.autocast(states.device.type, enabled=False):
        return function.apply(states.to(dtype).flatten(0, -2), weight.to(dtype), labels, chunk)


def shifted(tokens: Tensor, documents: CuSeqlens | None = None) -> Tensor:
    """Returns the label of each token (B, n): the next token, or -100 for the last one of a row or document.

    Shift labels before you shard a sequence: the label of a shard's last token is on the next rank. ``documents`` is
    the cu_seqlens of packed documents, for tokens (1, T): [0, ..., T] with one entry more than documents.

    Examples:
        >>> models.shifted(torch.tensor([[5, 6, 7, 8]]), torch.tensor([0, 3, 4]))
        tensor([[   6,    7, -100, -100]])
    """
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise ValueError(f"tokens or labels must be (B, n) whole numbers, got {tokens.dtype} {tuple(tokens.shape)}")
    labels = torch.full(tokens.shape, IGNORED, device=tokens.device)  # int64: bytes could not hold it
    labels[:, :-1] = tokens[:, 1:]
    if documents is not None:
        ends = cu_seqlens_on_host(documents)
        if not torch.compiler.is_compiling():
            checked_cu_seqlens(ends, tokens.shape[1])
        if tokens.shape[1]:  # that of an empty document may be -1: the last token, which has no label anyway
            labels[:, ends[1:].to(labels.device) - 1] = IGNORED
    return labels


class _Losses(torch.autograd.Function):
    """With few passes over the logits: they are far more bytes than anything else here."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
        # not a view in the end: FSDP2 warns of one
        losses = torch.empty(labels.shape, dtype=accumulate_dtype(states.dtype), device=states.device)
        flat, labels = losses.view(-1), labels.flatten()
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            flat[part] = losses_(states[part] @ weight.T, labels[part], IGNORED, writes=False)
        ctx.save_for_backward(states, weight, labels)
        ctx.chunk = chunk
        return losses

    @staticmethod
    @once(NOT_TWICE)
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        states, weight, labels = ctx.saved_tensors
        factor = torch.where(labels == IGNORED, 0.0, grad.flatten()).unsqueeze(1)
        _, dstates, dweight = _gradients(states, weight, labels, ctx.chunk, ctx.needs_input_grad[1], factor)
        return (dstates, dweight.to(weight.dtype), None, None), (states, weight)


class _Sum(torch.autograd.Function):
    """The forward pass computes the gradients of the sum, and the backward pass multiplies them."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
        losses, *grads = _gradients(states, weight, labels.flatten(), chunk, ctx.needs_input_grad[1])
        ctx.save_for_backward(*grads, states, weight)
        return losses.sum()

    @staticmethod
    @once(NOT_TWICE)
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        dstates, dweight, states, weight = ctx.saved_tensors
        return (dstates * grad, (dweight * grad).to(weight.dtype), None, None), (states, weight)


def _gradients(
    states: Tensor, weight: Tensor, labels: Tensor, chunk: int, trains: bool, factor: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, and the gradients of their sum: those of states, and of weight if it ``trains``.

    A row's factor is left out of its logits: it goes to the products, or to the row that is multiplied. Divided by the
    largest, since those of a mean would be too small for half precision.
    """
    losses = torch.empty(len(labels), dtype=accumulate_dtype(states.dtype), device=states.device)
    dstates, dweight = torch.empty_like(states), torch.zeros_like(weight, dtype=losses.dtype)
    largest = losses.new_ones(())
    if factor is not None and len(labels):  # a rank may have no tokens
        largest = factor.abs().amax().clamp(min=torch.finfo(factor.dtype).tiny)
    for start in range(0, len(labels), chunk):
        part = slice(start, start + chunk)
        dlogits, rows = states[part] @ weight.T, states[part]
        losses[part] = losses_(dlogits, labels[part], IGNORED, writes=True)
        dstates[part] = dlogits @ weight
        if factor is not None:
            dstates[part] *= factor[part]
            rows = (rows * (factor[part] / largest)).to(rows.dtype)
        if trains:
            dweight += dlogits.T @ rows
    return losses, dstates, dweight if factor is None else dweight.mul_(largest)
