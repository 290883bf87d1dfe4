"""(out, lse) pairs: partial softmax results and how to put them together.

A pair stands for a softmax over some multiset of keys: ``out`` is the mean of their values, ``lse`` the log of their
weight. Merging is a commutative monoid with identity (0, -inf), so branches and ranks may come in any order.

Legend: out (..., D), lse (...), natural log.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def merge_(
    out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, log_zeros: Tensor | float | None = None, *,
    first: bool = False,
) -> None:  # fmt: skip
    """Merges a softmax result over some keys, (part, part_lse), into that over other keys, (out, lse), in place.

    Shapes are (..., D) for out and part, (...) for lse and part_lse, which are natural logarithms. lse = -inf means no
    keys, and may be on both sides. out and lse have the same dtype. Use float32 or float64: in half precision every
    merge rounds, which for five branches doubles the error. With ``log_zeros`` exp(log_zeros) keys of score 0 and value
    0 are added to the part first, in place. ``first``: what is in (out, lse) does not count.

    Examples:
        >>> out, lse = torch.zeros(3, 8), torch.full((3,), -torch.inf)
        >>> merge.merge_(out, lse, torch.ones(3, 8), torch.zeros(3))
        >>> lse
        tensor([0., 0., 0.])
    """
    if log_zeros is not None:
        add_zero_keys_(part, part_lse, log_zeros)
    if first:
        out.copy_(part)
        lse.copy_(part_lse)
        return
    # sigmoid(-inf - -inf) is NaN: where the part is empty its weight is selected, not computed
    weight = _alike(torch.sigmoid, part_lse - lse).masked_fill_(part_lse == -torch.inf, 0.0)
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(_alike(torch.logaddexp, lse, part_lse))


def put_(target: Tensor, part: Tensor, add: bool) -> None:
    """target = part or target += part."""
    _ = target.add_(part) if add else target.copy_(part)


def add_zero_keys_(out: Tensor, lse: Tensor, log_count: Tensor | float) -> None:
    """Merge with exp(log_count) keys of score 0 and value 0, the state (0, log_count), in place."""
    if isinstance(log_count, float):
        log_count = lse.new_full((), log_count)  # filled on the device: a copy from the host would wait for it
    log_count = log_count.expand_as(lse)
    weight = _alike(torch.sigmoid, lse - log_count).masked_fill_(lse == -torch.inf, 0.0)
    out.mul_(weight.unsqueeze(-1))
    lse.copy_(_alike(torch.logaddexp, lse, log_count))


def _alike(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """function, elementwise, with the same bits for a number wherever in a tensor it stands.

    On a CPU the last few numbers of a tensor do not fill a vector, and the scalar code for them rounds differently: the
    result would depend on how a sequence is cut. So float32 is rounded from float64, and float64 fills whole vectors.
    """
    first = tensors[0]
    if first.device.type != "cpu":
        return function(*tensors)
    if first.dtype is not torch.float64:
        return function(*map(Tensor.double, tensors)).to(first.dtype)
    count = first.numel()
    return function(*(F.pad(x.reshape(-1), (0, -count % 64)) for x in tensors))[:count].view(first.shape)
