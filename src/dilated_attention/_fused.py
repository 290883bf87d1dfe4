"""A whole call on one device by our own kernels: one launch forward and two backward, where the pattern allows it.

Branches that share no table take one launch each; later ones take in what earlier ones found, in float32.

Legend: q, out (B, N, H, D); k, v (B, N, Hk, D); lse (B, N, H); padding (B, N), True = ignore; stats (B, H, N, 2).
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention._courses import form_of, launches
from dilated_attention._settings import Settings
from dilated_attention._shards import Heads
from dilated_attention.backends import triton
from dilated_attention.backends.problem import FEW_ROWS, Request
from dilated_attention.backends.triton.configs import Config, config
from dilated_attention.backends.triton.tiling import Courses
from dilated_attention.pattern import DilatedPattern

if TYPE_CHECKING:
    from dilated_attention.backends.triton.launch import Call, Launch, Layout

MOST_BYTES = 128 << 20  # of tables that are kept on a device for calls of the same layouts


class Kind(NamedTuple):
    """All of a call but its tensors."""

    pattern: DilatedPattern
    heads: Heads
    is_causal: bool
    scale: float
    dropout_p: float
    device: torch.device
    masked: bool
    drops: bool
    precision: str

    @classmethod
    def of(cls, settings: Settings, q: Tensor, k: Tensor, padding: Tensor | None, seed: Tensor | None) -> Kind:
        last = (q.device, padding is not None, seed is not None, _precision(q))
        return cls(settings.pattern, settings.heads(k), settings.is_causal, settings.scale, settings.dropout_p, *last)

    def steps(self) -> tuple[Courses, ...]:
        return launches(self.pattern, self.heads, self.is_causal, self.drops)

    def fills(self) -> bool | None:
        """Whether the first launch writes the rows without keys as well; False: a fill goes before it; None: none."""
        first = self.steps()[0]
        if all(course.rates[0] == 1 for course in first):
            return None
        return all(len(course.rates) == 1 for course in first)

    def config(self, kernel: str, q: Layout, courses: Courses) -> Config:
        form = "nested" if len(courses[0].widths) > 1 else form_of(self.pattern, self.is_causal, alone=True)
        short = math.prod(q.shape[:3]) < FEW_ROWS
        return config(kernel, self.device, q.dtype, q.shape[-1], self.is_causal, form, short)

    def call(self) -> Call:
        from dilated_attention.backends.triton.launch import Call

        zeros = self.pattern.rule == "torchscale" and not self.is_causal
        return Call(
            self.device, self.scale, self.is_causal, self.dropout_p, self.masked, self.drops, zeros, self.heads.first,
            self.precision,
        )  # fmt: skip


class Ready(NamedTuple):
    """The launches of one direction of a call, in their order. An optional tensor that is not there is None."""

    launches: tuple[Launch, ...]
    dtype: torch.dtype  # that they write
    blank: bool  # whether what they write must be blank before

    def nbytes(self) -> int:
        return sum(launch.nbytes for launch in self.launches)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, ends: Tensor | None, seed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out = _empty_like(q, self.dtype)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        if self.blank:
            out.zero_()
            lse.fill_(-torch.inf)
        padding, ends, seed = _stand_in(q, padding), _stand_in(q, ends), _stand_in(q, seed)
        for launch in self.launches:
            launch(q, k, v, out, lse, padding, ends, seed)
        return out if self.dtype is q.dtype else out.to(q.dtype), lse

    def backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None,
        seed: Tensor | None, out: Tensor, lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dq, dk, dv = _empty_like(q, q.dtype), _empty_like(k, k.dtype), _empty_like(v, v.dtype)
        stats = torch.empty(_stats_shape(q.shape), dtype=torch.float32, device=q.device)
        if self.blank:
            for grad in (dq, dk, dv):
                grad.zero_()
        padding, dlse, seed = _stand_in(q, padding), _stand_in(q, dlse), _stand_in(q, seed)
        for for_dq, for_dkdv in zip(self.launches[::2], self.launches[1::2], strict=True):
            for_dq(q, k, v, out, lse, dout, dlse, dq, stats, padding, seed)
            for_dkdv(q, k, v, dout, stats, dk, dv, padding, seed)
        return dq, dk, dv


_ready: dict[tuple[Any, ...], Ready] = {}
_held: Counter[torch.device] = Counter()  # bytes
_dropped: dict[torch.device, list[Ready]] = {}  # since the device was last waited for: another thread may use them yet
_making = threading.Lock()


def find(
    settings: Settings, padding: Tensor | None, seed: Tensor | None, q: Tensor, k: Tensor, *others: Tensor
) -> Ready | None:
    """What was prepared for such a call, which `choose` gives to our kernels; None: that is still to be found out.

    ``others``: v and, for the backward pass, dout and dlse if it is there.
    """
    return _ready.get(_key(settings, padding, seed, q, k, *others))


def prepare(
    request: Request, settings: Settings, padding: Tensor | None, seed: Tensor | None, q: Tensor, k: Tensor,
    *others: Tensor,
) -> Ready:  # fmt: skip
    """What `find` finds from now on, for tensors that are `readable`."""
    from dilated_attention.backends.triton.launch import Layout

    key, kind = _key(settings, padding, seed, q, k, *others), Kind.of(settings, q, k, padding, seed)
    if settings.backend == "auto" and not triton.is_preferred(request):
        key += (request,)  # ours only because no other can run it now: not for `find`
    make = _forward if len(others) == 1 else _backward
    return _kept(key, lambda: make(kind, *map(Layout.of, (q, k, *others))))


def _key(
    settings: Settings, padding: Tensor | None, seed: Tensor | None, q: Tensor, k: Tensor, *others: Tensor
) -> tuple[Any, ...]:
    """All that `choose`, where our kernels are its first choice, and `Kind` look at; from it follows the rest."""
    flags = (padding is None, seed is None, torch.are_deterministic_algorithms_enabled(), _precision(q))
    negative = [x.is_neg() for x in (q, k, *others)]  # never prepared
    strides = [x.stride() for x in others]
    return q.device, settings, *flags, q.dtype, q.shape, k.shape, q.stride(), k.stride(), *strides, *negative


def _kept(key: tuple[Any, ...], make: Callable[[], Ready]) -> Ready:
    """What ``make`` prepares, made once; the key begins with the device."""
    found = _ready.get(key)
    if found is None:
        with _making:  # two threads that made the same would each launch their own, and one of them would be dropped
            found = _ready.get(key)
            if found is None:
                found, device = make(), key[0]
                _held[device] += found.nbytes()
                if _held[device] > MOST_BYTES:
                    _forget(device, _held[device] - MOST_BYTES // 2)
                _ready[key] = found
    return found


def _forget(device: torch.device, nbytes: float = math.inf) -> None:
    """Drop the oldest that is kept for a device; what it took is free the next time, when the device was waited for."""
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return
        torch.cuda.synchronize(device)
    _dropped[device] = []
    for key in [key for key in list(_ready) if key[0] == device]:
        if nbytes <= 0:
            break
        ready = _ready.pop(key)
        _dropped[device].append(ready)
        _held[device] -= ready.nbytes()
        nbytes -= ready.nbytes()


def _forward(kind: Kind, q: Layout, k: Layout, v: Layout) -> Ready:
    from dilated_attention.backends.triton import launch

    steps, fills = kind.steps(), kind.fills()
    dtype = torch.float32 if len(steps) > 1 else q.dtype
    out = launch.Layout.contiguous(q.shape, dtype)
    lse = launch.Layout.contiguous(q.shape[:3], torch.float32)
    made = []
    for index, courses in enumerate(steps):
        again, filling = index > 0, bool(fills) and index == 0
        tile = kind.config("forward", q, courses)
        made.append(launch.forward(q, k, v, out, lse, courses, kind.call(), tile, again, filling))
    return Ready(tuple(made), dtype, fills is False)


def _backward(kind: Kind, q: Layout, k: Layout, v: Layout, dout: Layout, dlse: Layout | None = None) -> Ready:
    """Two launches a step: for dq, and for dk and dv."""
    from dilated_attention.backends.triton import launch

    fills = kind.fills()
    out, dq, dk, dv = (launch.Layout.contiguous(x.shape, x.dtype) for x in (q, q, k, v))
    lse = launch.Layout.contiguous(q.shape[:3], torch.float32)
    stats = launch.Layout.contiguous(_stats_shape(q.shape), torch.float32)
    made = []
    for index, courses in enumerate(kind.steps()):
        how = (index > 0, bool(fills) and index == 0)
        tile = kind.config("dq", q, courses)
        made.append(launch.backward_dq(q, k, v, out, lse, dout, dlse, dq, stats, courses, kind.call(), tile, *how))
        tile = kind.config("dkdv", q, courses)
        made.append(launch.backward_dkdv(q, k, v, dout, stats, dk, dv, courses, kind.call(), tile, *how))
    return Ready(tuple(made), q.dtype, fills is False)


def _stats_shape(q: tuple[int, ...]) -> tuple[int, ...]:
    return q[0], q[2], q[1], 2


def _empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)  # in half the time of new_empty


def _stand_in(q: Tensor, x: Tensor | None) -> Tensor:
    return q if x is None else x


def _precision(q: Tensor) -> str:
    exact = q.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
    return "ieee" if exact else "tf32"


def readable(x: Tensor) -> Tensor:
    """x with a unit last stride and no sign to be turned, which the kernels take for granted."""
    return x if x.stride(-1) == 1 and not x.is_neg() else x.contiguous().resolve_neg()
