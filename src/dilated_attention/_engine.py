"""Forward and backward on one device: our kernels for the whole call, or a backend block by block.

Legend: q, out (B, N, H, D); k, v (B, N, Hk, D); lse (B, N, H); padding (B, N), True = ignore.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dilated_attention import _fused
from dilated_attention._settings import Settings, sample_ends
from dilated_attention._work import Work
from dilated_attention.backends import triton
from dilated_attention.backends.choose import choose


def forward(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, seed: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor]:
    ready = _fused.find(settings, padding, seed, q, k, v)
    if ready is None:
        request = settings.whole_request(q, padding is not None)
        choice = choose(settings.backend, request)
        if choice.module is not triton or not q.numel():
            with no_autocast(q.device):
                out, lse = Work.prepare(q, k, v, padding, seed, settings, choice=choice).forward()
            return finished(out, lse, q)
        q, k, v = map(_fused.readable, (q, k, v))
        ready = _fused.prepare(request, settings, padding, seed, q, k, v)
    ends = None
    if padding is not None:
        padding, ends = padding.contiguous(), sample_ends(padding) if settings.pattern.rule == "torchscale" else None
    return ready.forward(q, k, v, padding, ends, seed)


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
    dout = torch.zeros_like(out) if dout is None else dout
    given = (v, dout) if dlse is None else (v, dout, dlse)
    ready = _fused.find(settings, padding, seed, q, k, *given)
    if ready is None:
        request = settings.whole_request(q, padding is not None, backward=True)
        choice = choose(settings.backend, request)
        if choice.module is not triton or not q.numel():
            with no_autocast(q.device):
                q, dout, dlse, out, lse, bad = without_bad_rows(q, dout, dlse, out, lse)
                work = Work.prepare(one_layout(q), k, v, padding, seed, settings, choice=choice)
                grads = work.backward(work.rows(dout, dlse, out, lse))
            return finished_grads(grads, q, bad)
        q, k, v, dout = map(_fused.readable, (q, k, v, dout))
        dlse = None if dlse is None else dlse.resolve_neg()
        given = (v, dout) if dlse is None else (v, dout, dlse)
        ready = _fused.prepare(request, settings, padding, seed, q, k, *given)
    padding = None if padding is None else padding.contiguous()
    return ready.backward(dout, dlse, q, k, v, padding, seed, out.contiguous(), lse.contiguous())


def finished(out: Tensor, lse: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse as they are returned: no views, which autograd would not let anyone change in place."""
    return finished_out(out, q), lse.contiguous().detach()


def finished_out(out: Tensor, q: Tensor) -> Tensor:
    return out[..., : q.shape[-1]].to(q.dtype).contiguous().detach()


def finished_grads(grads: Sequence[Tensor], q: Tensor, bad: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (grad[..., : q.shape[-1]].to(q.dtype).contiguous() for grad in grads)
    return dq if bad is None else dq.masked_fill(bad.unsqueeze(-1), torch.nan), dk, dv


def without_bad_rows(
    q: Tensor, dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None]:
    """The same with rows that are NaN by their own query made rows without keys: they send nothing to dk and dv.

    The last, (B, N, H): which rows these are, whose dq is NaN; None: there are none. Only a CPU looks for them: on
    other devices the host would wait for the answer.
    """
    if q.device.type != "cpu" or not (bad := lse.isnan()).any():
        return q, dout, dlse, out, lse, None
    bad &= ~q.isfinite().all(-1)
    q, out = (x.masked_fill(bad.unsqueeze(-1), 0.0) for x in (q, out))
    dout = None if dout is None else dout.masked_fill(bad.unsqueeze(-1), 0.0)
    dlse = None if dlse is None else dlse.masked_fill(bad, 0.0)
    return q, dout, dlse, out, lse.masked_fill(bad, torch.inf), bad


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
