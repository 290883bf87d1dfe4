"""What the tensors of a call need before kernels read them, and its results after.

Legend: q, out (B, n, H, D); k, v (B, N, Hk, D); lse (B, n, H).
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dilated_attention.backends.problem import Inputs, Limits, Outputs
from dilated_attention.call import Call


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Our products run in the dtype they are given; the caller's autocast was applied at the door."""
    is_on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else contextlib.nullcontext()


def readable(x: Tensor, call: Call, limits: Limits, padding: Tensor | None = None) -> Tensor:
    """x as the kernels can read it: the dtype computed in and a unit last stride; on CUDA also 16-byte aligned rows
    and no stride of 0, from which cuDNN's backward gives wrong gradients."""
    x = x.to(call.dtype)  # keys that few queries see are rounded as autocast rounds them in a whole call
    if padding is not None:  # 0 * NaN in a masked slot would be NaN
        x = x.masked_fill(padding.unsqueeze(-1), 0.0)
    x = x.to(call.computed)
    if x.shape[-1] % limits.pad:
        x = F.pad(x, (0, -x.shape[-1] % limits.pad))
    readable = x.stride(-1) == 1
    if x.device.type == "cuda":
        steps = [stride for stride, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1]
        readable &= x.data_ptr() % 16 == 0 and all(step and step * x.itemsize % 16 == 0 for step in steps)
    return x if readable else x.clone(memory_format=torch.contiguous_format)


def within(x: Tensor, most: int | None) -> Tensor:
    """x, copied where a kernel could not count from its first element to its last."""
    return x if most is None or span(x) < most else x.contiguous()


def span(x: Tensor) -> int:
    """Bytes from the first to the last element."""
    return x.itemsize * sum([(size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)])


def without_infinity(q: Tensor) -> Tensor:
    """q with NaN in rows that have an infinity, whose scores may all be -inf: kernels disagree on what that gives."""
    return q if seems_finite(q) else q.masked_fill(q.isinf().any(-1, keepdim=True), torch.nan)


def seems_finite(q: Tensor) -> bool:
    """False where a number may be NaN or infinite, which a sum tells far sooner than a look at each.

    Only a CPU looks: on other devices the host would wait for the answer.
    """
    return q.device.type != "cpu" or math.isfinite(q.sum().item())


def without_silent_rows(call: Call, inputs: Inputs, results: Outputs) -> tuple[Inputs, Outputs, Tensor | None]:
    """The same, where rows that send nothing back, not even NaN, have the lse of rows without keys, +inf: those that
    see no key, and those of a NaN or infinite query.

    The last, (B, n, H): where dq is NaN, as out and lse are; None: nowhere.
    """
    q, (out, lse, dout, dlse), bad, silent = inputs.q, results, None, None
    if call.has_padding or call.pattern.needs_masks:  # else a row in a block has a key, itself
        silent = lse == -torch.inf
    if not seems_finite(q):
        bad = ~q.isfinite().all(-1)
        silent = bad if silent is None else silent | bad
        q, out = (x.masked_fill(bad.unsqueeze(-1), 0.0) for x in (q, out))
        bad = bad & lse.isnan()
    if silent is not None:
        lse, dout = lse.masked_fill(silent, torch.inf), dout.masked_fill(silent.unsqueeze(-1), 0.0)
        dlse = None if dlse is None else dlse.masked_fill(silent, 0.0)
    return inputs._replace(q=q), Outputs(out, lse, dout, dlse), bad


def finished(x: Tensor, call: Call, dtype: torch.dtype) -> Tensor:
    """A result without the columns that were padded. Not a view, so that the caller may change it in place."""
    return x[..., : call.head_dim].to(dtype).contiguous().detach()
