"""(out, lse) pairs: partial softmax results and how to put them together.

A pair stands for a softmax over some multiset of keys: ``out`` is the mean of their values, ``lse`` the log of their
weight. Merging is a commutative monoid with identity (0, -inf), so branches and ranks may come in any order.

Legend: out (..., D), lse (...), natural log.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge (part, part_lse) into (out, lse) in place; total at -inf. ``out`` and ``lse`` have one dtype.

    That dtype is not half: rounding ``out`` at every merge doubles the error of five branches.
    """
    # sigmoid(-inf - -inf) is NaN: where the part is empty its weight is selected, not computed
    weight = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -torch.inf, 0.0)
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


def add_zero_keys_(out: Tensor, lse: Tensor, log_count: Tensor | float) -> None:
    """Merge with exp(log_count) keys of score 0 and value 0, the state (0, log_count), in place."""
    if isinstance(log_count, float):
        log_count = lse.new_full((), log_count)  # filled on the device: a copy from the host would wait for it
    weight = torch.sigmoid(lse - log_count).masked_fill_(lse == -torch.inf, 0.0)
    out.mul_(weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, log_count))
