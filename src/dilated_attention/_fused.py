"""A whole call on one device by our own kernels: one launch forward and two backward, where the pattern allows it.

A pattern whose branches are not nested takes one launch for each of them; later ones take in what earlier ones found,
in float32.

Legend: q, out (B, N, H, D); k, v (B, N, Hk, D); lse (B, N, H); padding (B, N), True = ignore; stats (B, H, N, 2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dilated_attention._courses import launches
from dilated_attention._shards import Heads
from dilated_attention.backends.triton.configs import Config, config, is_short
from dilated_attention.backends.triton.tiling import Courses
from dilated_attention.pattern import DilatedPattern

if TYPE_CHECKING:
    from dilated_attention.backends.triton import launch


class Fused(NamedTuple):
    """A call that `choose` has given to our kernels."""

    pattern: DilatedPattern
    heads: Heads
    is_causal: bool
    scale: float
    dropout_p: float
    padding: Tensor | None
    ends: Tensor | None
    seed: Tensor | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        from dilated_attention.backends.triton import launch

        q, k, v = (_readable(x) for x in (q, k, v))
        steps = self.steps()
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        out = q.new_empty(q.shape, dtype=torch.float32 if len(steps) > 1 else q.dtype)
        fills = self.fills(steps[0])
        if fills is False:
            out.zero_()
            lse.fill_(-torch.inf)
        call = self.call(q)
        for index, courses in enumerate(steps):
            tile = self.config("forward", q, courses)
            launch.forward(q, k, v, out, lse, courses, call, tile, again=index > 0, fills=bool(fills) and index == 0)
        return out.to(q.dtype), lse

    def backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from dilated_attention.backends.triton import launch

        q, k, v, out, dout = (_readable(x) for x in (q, k, v, out, dout))
        steps = self.steps()
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        fills = self.fills(steps[0])
        if fills is False:
            for grad in (dq, dk, dv):
                grad.zero_()
        stats = q.new_empty((q.shape[0], q.shape[2], q.shape[1], 2), dtype=torch.float32)
        call = self.call(q)
        for index, courses in enumerate(steps):
            again, filling = index > 0, bool(fills) and index == 0
            tile = self.config("dq", q, courses)
            launch.backward_dq(q, k, v, out, lse, dout, dlse, dq, stats, courses, call, tile, again, filling)
            tile = self.config("dkdv", q, courses)
            launch.backward_dkdv(q, k, v, dout, stats, dk, dv, courses, call, tile, again, filling)
        return dq, dk, dv

    def steps(self) -> tuple[Courses, ...]:
        return launches(self.pattern, self.heads, self.seed is not None)

    def fills(self, courses: Courses) -> bool | None:
        """Whether the first launch writes the rows without keys as well; False: a fill goes before it; None: none."""
        if all(course.rates[0] == 1 for course in courses):
            return None
        return all(len(course.rates) == 1 for course in courses)

    def config(self, kernel: str, q: Tensor, courses: Courses) -> Config:
        nested = len(courses[0].widths) > 1
        return config(kernel, q.device, q.dtype, q.shape[-1], self.is_causal, nested, is_short(q))

    def call(self, q: Tensor) -> launch.Call:
        from dilated_attention.backends.triton import launch

        exact = q.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
        return launch.Call(
            self.scale,
            self.is_causal,
            self.padding,
            self.ends,
            self.seed,
            self.dropout_p,
            self.pattern.rule == "torchscale" and not self.is_causal,
            self.heads.first,
            "ieee" if exact else "tf32",
        )


def _readable(x: Tensor) -> Tensor:
    """x with a unit last stride, which the kernels take for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()
