"""One call as its blocks: one loop over a plan each way, whatever the rule, the backend or the masks.

The backward needs nothing of the forward but the merged out and lse: fed with those, the ordinary flash backward of
each block gives its exact share of the gradients.

Legend: q, out (B, N, H, D); k, v (B, N, Hk, D); lse (B, N, H); padding (B, N), True = ignore; group = H // Hk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dilated_attention._plan import Block, Plan, folds, plan
from dilated_attention._settings import Settings, sample_ends
from dilated_attention._shards import Channel, Shards
from dilated_attention.backends import sdpa, slices, triton
from dilated_attention.backends.choose import Choice, choose
from dilated_attention.backends.problem import Masking, Request, accumulate_dtype
from dilated_attention.backends.slices import ALL, Limit, Part, of_heads
from dilated_attention.dropout import Dropout, row_words
from dilated_attention.merge import add_zero_keys_, merge_


class Rows(NamedTuple):
    """What the backward pass knows of the query rows, in one layout: blocks may fold samples."""

    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Work:
    """One call with its tensors made usable for the chosen backend, and its plan."""

    q: Tensor
    k: Tensor
    v: Tensor
    padding: Tensor | None
    seed: Tensor | None
    settings: Settings
    choice: Choice
    request: Request
    plan: Plan
    shards: Shards
    rank: int
    ends: Tensor | None  # (B,) where each sample ends: after its last token that is not padding
    limit: Limit | None

    @staticmethod
    def prepare(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding: Tensor | None,
        seed: Tensor | None,
        settings: Settings,
        *,
        shards: Shards | None = None,
        rank: int = 0,
        ends: Tensor | None = None,
        visited: bool = False,
        elsewhere: tuple[Channel, ...] = (),
        limit: Limit | None = None,
        choice: Choice | None = None,
    ) -> Work:
        """By default one rank holds all, and the rest is for several; ``visited`` and ``elsewhere`` as in `plan`."""
        request = settings.request(q, padding is not None)
        choice = choose(settings.backend, request) if choice is None else choice
        if padding is not None:  # one cleaned copy: 0 * NaN in a masked slot would be NaN
            padding = padding.contiguous()
            k, v = (x.masked_fill(padding[:, :, None, None], 0.0) for x in (k, v))
        q, k, v = (_usable(x, choice, request) for x in (q, k, v))
        samples, tokens, heads, _ = q.shape
        shards = Shards.of((tokens,)) if shards is None else shards
        group, fold = heads // k.shape[2], folds(q, k, v)
        here, cut = settings.heads(k), sdpa.cut(request) if choice.module is sdpa and shards.ranks == 1 else None
        work = plan(settings.pattern, samples, shards, rank, here, group, fold, visited, elsewhere, cut)
        if padding is not None and ends is None:
            ends = sample_ends(padding)
        return Work(q, k, v, padding, seed, settings, choice, request, work, shards, rank, ends, limit)

    @property
    def group(self) -> int:
        return self.q.shape[2] // self.k.shape[2]

    def usable(self, x: Tensor) -> Tensor:
        return _usable(x, self.choice, self.request)

    def rows(self, dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor) -> Rows:
        dout = torch.zeros_like(out) if dout is None else dout
        dout, out, lse = self.usable(dout).contiguous(), self.usable(out).contiguous(), lse.contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        if self.padding is not None:  # else a row in a block has a key, itself
            empty = lse == -torch.inf
            lse, dout = lse.masked_fill(empty, torch.inf), dout.masked_fill(empty.unsqueeze(-1), 0.0)
            dlse = None if dlse is None else dlse.masked_fill(empty, 0.0)  # such a row sends nothing, not even NaN
        return Rows(dout, dlse, out, lse)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> Iterator[Part]:
        """(out, lse) of one dense problem, all heads at once unless memory has a limit."""
        if self.limit is not None:
            return slices.forward(self.choice, self.limit, q, k, v, masking)
        return iter([Part(ALL, ALL, self.choice.module.forward(self.choice.kernels, q, k, v, masking))])

    def attend_backward(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> Iterator[Part]:
        """(dq, dk, dv) of one dense problem, likewise."""
        given = (rows.dout, q, k, v, rows.out, rows.lse, rows.dlse, masking)
        if self.limit is not None:
            return slices.backward(self.choice, self.limit, *given)
        return iter([Part(ALL, ALL, self.choice.module.backward(self.choice.kernels, *given))])

    def forward(self) -> tuple[Tensor, Tensor]:
        out = lse = None
        around = _around(self.q)
        for block in self.plan.blocks:
            q, k, v = block.view(self.q, self.group), block.view(self.k), block.view(self.v)
            log_zeros = self.log_zero_keys(block)
            for heads, rows, (part, part_lse) in self.attend(q, k, v, self.masking(block)):
                here_zeros = of_heads(log_zeros, rows) if isinstance(log_zeros, Tensor) else log_zeros
                if here_zeros is not None and around is None:
                    add_zero_keys_(part, part_lse, here_zeros)
                if out is None or lse is None:
                    if heads == ALL and block.covers(self.k) and (around is None or here_zeros is None):
                        out = part.reshape(self.q.shape).to(self.out_dtype).contiguous()
                        lse = part_lse.reshape(self.q.shape[:3]).contiguous()
                        continue
                    out, lse = self.empty_result()
                here, here_lse = (of_heads(block.view(x, self.group), rows) for x in (out, lse))
                if around is not None:
                    given = (here, here_lse, part, part_lse, here_zeros)
                    _ = around.write_(*given, self.gaps(block)) if block.first else around.merge_(*given)
                elif block.first:
                    here.copy_(part)
                    here_lse.copy_(part_lse)
                else:
                    merge_(here, here_lse, part, part_lse)
        return self.empty_result() if out is None or lse is None else (out, lse)

    def backward(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        grads: list[Tensor] = []
        around = _around(self.q)
        for block in self.plan.blocks:
            q, k, v = block.view(self.q, self.group), block.view(self.k), block.view(self.v)
            for part in self.attend_backward(self.of_rows(block, rows), q, k, v, self.masking(block)):
                if not grads:
                    if part.heads == ALL and block.covers(self.k):
                        grads = [x.reshape(y.shape) for x, y in zip(part.results, self.inputs, strict=True)]
                        grads = [x.to(self.q.dtype).contiguous() for x in grads]
                        continue
                    grads = self.empty_grads()
                which = ((self.group, part.rows), (1, part.heads), (1, part.heads))
                views = [
                    of_heads(block.view(grad, group), heads) for grad, (group, heads) in zip(grads, which, strict=True)
                ]
                if around is not None:
                    around.put_(views, part.results, add=not block.first, gaps=self.gaps(block))
                    continue
                for view, x in zip(views, part.results, strict=True):
                    _ = view.copy_(x) if block.first else view.add_(x)
        dq, dk, dv = grads or self.empty_grads()
        return dq, dk, dv

    def of_rows(self, block: Block, rows: Rows) -> Rows:
        """The block's part of the rows."""
        dout, out, lse = (block.view(x, self.group) for x in (rows.dout, rows.out, rows.lse))
        return Rows(dout, None if rows.dlse is None else block.view(rows.dlse, self.group), out, lse)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def out_dtype(self) -> torch.dtype:
        """Merging in half precision rounds at every merge: one or two of them keep within the bound, more do not."""
        few = len(self.settings.pattern.segment_lengths) <= 3 and self.shards.ranks == 1 and _around(self.q) is not None
        return accumulate_dtype(self.q.dtype) if self.plan.merges and not few else self.q.dtype

    def empty_result(self) -> tuple[Tensor, Tensor]:
        out = self.q.new_empty(self.q.shape, dtype=self.out_dtype)
        lse = self.q.new_empty(self.q.shape[:3], dtype=accumulate_dtype(self.q.dtype))
        for x, blank in ((out, 0.0), (lse, -torch.inf)):
            self.fill_bare_(x, self.group, blank)
        return out, lse

    def empty_grads(self) -> list[Tensor]:
        """In the dtype computed in: unlike out, gradients keep within their bound when branches are summed so."""
        grads = [x.new_empty(x.shape) for x in self.inputs]
        for grad, group in zip(grads, (self.group, 1, 1), strict=True):
            self.fill_bare_(grad, group, 0.0)
        return grads

    @property
    def fills(self) -> bool:
        """Whether the kernels that write blocks write the gaps between their rows as well."""
        return self.plan.fillable and self.limit is None and _around(self.q) is not None

    def gaps(self, block: Block) -> tuple[int, int, int, int] | None:
        return block.gaps() if self.fills else None

    def fill_bare_(self, x: Tensor, group: int, blank: float) -> None:
        """Fill what nobody writes."""
        first, end = self.plan.bare
        if first == end or (self.fills and self.plan.blocks):
            return
        # some heads of a CUDA tensor take longer than all
        (x if x.device.type == "cuda" else x[:, :, first * group : end * group]).fill_(blank)

    def masking(self, block: Block) -> Masking:
        padding = dropout = None
        if self.padding is not None:
            padding = block.view(self.padding_of_heads)
        if self.seed is not None:
            dropout = self.dropout(block, self.seed)
        return Masking(self.settings.scale, self.settings.is_causal, padding, dropout)

    @property
    def padding_of_heads(self) -> Tensor:
        """(B, N, Hk), the same for each head."""
        assert self.padding is not None
        return self.padding.unsqueeze(2).expand(-1, -1, self.k.shape[2])

    @functools.cached_property
    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sample, token and head of each row, (B, N, H) each, counted over all ranks.

        (B, N) is one stride, so that blocks can fold it.
        """
        samples, tokens, heads, _ = self.q.shape
        row = torch.arange(samples * tokens, device=self.q.device).view(samples, tokens, 1)
        token = row % tokens + self.shards.starts[self.rank]
        head = torch.arange(heads, device=self.q.device) + self.settings.first_head * self.group
        sample, token, head = (x.expand(samples, tokens, heads) for x in (row // tokens, token, head))
        return sample, token, head

    def dropout(self, block: Block, seed: Tensor) -> Dropout:
        """The words and positions of the block's rows, all by global index."""
        return self.dropout_of_keys(block, seed, block.view(self.index[1][:, :, : self.k.shape[2]]))

    def dropout_of_keys(self, block: Block, seed: Tensor, key: Tensor) -> Dropout:
        """The same with keys at other positions, (b, L, hk)."""
        sample, token, head = (block.view(x, self.group) for x in self.index)
        words = row_words(seed, block.branch, sample, head, token)
        return Dropout(self.settings.dropout_p, *words, key.repeat_interleave(self.group, dim=2))

    def log_zero_keys(self, block: Block) -> Tensor | float | None:
        """Log of how many appended zero keys each row attends to; with padding, a sample ends at its last token."""
        pattern, rate, device = self.settings.pattern, block.dilation, self.q.device
        if pattern.rule != "torchscale" or self.settings.is_causal:
            return None
        if self.ends is None:
            return math.log(block.zeros) if block.zeros else None
        ends = self.ends[block.sample : block.sample + block.samples, None]
        starts = block.segment_start + block.segment_length * torch.arange(block.segments, device=device)
        starts = starts + self.shards.starts[self.rank]
        longest = pattern.segment_lengths[block.branch]
        real = (ends - starts).clamp(0, longest).flatten()[:, None]  # (b, 1)
        width = ends.clamp(max=longest).expand(-1, block.segments).flatten()[:, None]
        offset = block.offset + block.offset_step * torch.arange(block.heads, device=device)
        offset = (offset + block.start - block.segment_start) % rate  # as counted from the segment's start
        zeros = (width + rate - 1) // rate - ((real - offset + rate - 1) // rate).clamp(min=0)
        zeros = torch.where(real > 0, zeros, 0).repeat_interleave(self.group, dim=1)
        return zeros.unsqueeze(1).to(accumulate_dtype(self.q.dtype)).log()


def _around(x: Tensor) -> ModuleType | None:
    """What surrounds the library's kernels in one launch each, on devices that have Triton."""
    if x.device.type != "cuda" or not triton.INSTALLED or x.dtype is torch.float64:
        return None
    from dilated_attention.backends.triton import fuse

    return fuse


def _usable(x: Tensor, choice: Choice, request: Request) -> Tensor:
    """x as the kernels can read it: the dtype computed in and a unit last stride; on CUDA also 16-byte aligned rows
    and no stride of 0, from which cuDNN's backward gives wrong gradients."""
    x = x.to(request.dtype)
    if choice.module is sdpa and x.shape[-1] % sdpa.pad_multiple(request):
        x = F.pad(x, (0, -x.shape[-1] % sdpa.pad_multiple(request)))
    readable = x.stride(-1) == 1
    if x.device.type == "cuda":
        steps = [stride for stride, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1]
        readable &= x.data_ptr() % 16 == 0 and all(step and step * x.itemsize % 16 == 0 for step in steps)
    return x if readable else x.clone(memory_format=torch.contiguous_format)
