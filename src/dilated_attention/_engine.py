"""Forward and backward on one device: our kernels for the whole call, or a backend block by block.

Legend: q, out (B, N, H, D); k, v (B, N, Hk, D); lse (B, N, H); padding (B, N), True = ignore.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dilated_attention._settings import Settings
from dilated_attention._work import Work
from dilated_attention.backends import triton
from dilated_attention.backends.choose import choose


def forward(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, seed: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor]:
    request = settings.whole_request(q, padding is not None)
    choice = choose(settings.backend, request)
    if choice.module is triton and q.numel():
        return settings.fused(k, padding, seed).forward(q, k, v)
    with no_autocast(q.device):
        out, lse = Work.prepare(q, k, v, padding, seed, settings, choice=choice).forward()
    return finished_out(out, q), lse.contiguous()


def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    settings: Settings,
) -> tuple[Tensor, Tensor, Tensor]:
    choice = choose(settings.backend, settings.whole_request(q, padding is not None, backward=True))
    if choice.module is triton and q.numel():
        dout = torch.zeros_like(out) if dout is None else dout
        return settings.fused(k, padding, seed).backward(dout, dlse, q, k, v, out, lse)
    with no_autocast(q.device):
        work = Work.prepare(one_layout(q), k, v, padding, seed, settings, choice=choice)
        grads = work.backward(work.rows(dout, dlse, out, lse))
    return finished_grads(grads, q)


def finished_out(out: Tensor, q: Tensor) -> Tensor:
    return out[..., : q.shape[-1]].to(q.dtype).contiguous()


def finished_grads(grads: Sequence[Tensor], q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (grad[..., : q.shape[-1]].to(q.dtype).contiguous() for grad in grads)
    return dq, dk, dv


def one_layout(q: Tensor) -> Tensor:
    """q laid out as out and dout are, which cuDNN's backward wants: one copy here spares one a block."""
    return q.contiguous() if q.device.type == "cuda" else q


@contextlib.contextmanager
def no_autocast(device: torch.device) -> Iterator[None]:
    """Our products run in the dtype they are given; the caller's autocast was applied at the door."""
    if torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            yield
    else:
        yield
