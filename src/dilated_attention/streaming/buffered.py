"""Not causal: tokens wait, copied, until their segments are complete.

Legend: q, out (B, n, H, D); k, v (B, n, Hk, D); lse (B, n, H); the window holds the tokens whose output is not yet
known, which begin at ``base`` and end where the stream now does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dilated_attention.call import Call
from dilated_attention.merge import merge_
from dilated_attention.streaming.stream import Stream


class HeldRows:
    """Rows of one tensor, (B, n, ...), in one piece: more come at the end, the first ones go."""

    def __init__(self, call: Call, sizes: Sequence[int], dtype: torch.dtype, most: int) -> None:
        """``sizes``: those after n. ``most``: beyond so many rows no room is made in advance."""
        self.store = torch.empty((call.samples, 0, *sizes), dtype=dtype, device=call.device)
        self.first = self.last = 0
        self.most = most

    @property
    def all(self) -> Tensor:
        return self.store[:, self.first : self.last]

    def add(self, count: int) -> Tensor:
        """Room for so many more rows, which are still to be written."""
        held = self.last - self.first
        if self.last + count > self.store.shape[1]:
            room = max(held + count, min(2 * (held + count), self.most))
            store = self.store.new_empty((self.store.shape[0], room, *self.store.shape[2:]))
            store[:, :held] = self.all
            self.store, self.first, self.last = store, 0, held
        self.last += count
        return self.store[:, self.last - count : self.last]

    def drop(self, count: int) -> None:
        self.first += count
        if self.first == self.last:
            self.first = self.last = 0

    def shrink(self) -> None:
        """Let go of room that a long chunk took for a while."""
        if self.store.shape[1] > self.most:
            self.store, self.first, self.last = self.all.clone(), 0, self.last - self.first


class BufferedStream(Stream):
    """The work of a stream that is not causal.

    Branches are computed together, a longest segment at a time, unless some segment is not part of a longest one: then
    one by one, and what they give is merged.
    """

    def __init__(self, call: Call, deliver: Callable[[Tensor], None], *limits: int | None) -> None:
        self.straddles = math.lcm(*call.pattern.segment_lengths) != max(call.pattern.segment_lengths)
        super().__init__(call, deliver, *limits)
        self.base = 0
        self.parts = [*range(len(self.branches))] if self.straddles else [None]  # None: all branches
        self.done = [0] * len(self.parts)  # where the first segment of each begins that is not yet computed
        most, row, key_row = self.most_tokens(), (call.heads, call.head_dim), (call.kv_heads, call.head_dim)
        self.inputs = [HeldRows(call, sizes, call.dtype, most) for sizes in (row, key_row, key_row)]
        sums = (row, row[:1]) if self.straddles else ()
        self.sums = [HeldRows(call, sizes, call.exact, most) for sizes in sums]  # out and lse

    def most_tokens(self, num_tokens: int | None = None) -> int:
        """That wait: rows that go a few at a time need room to spare, lest the others be moved often."""
        tokens = self.longest if num_tokens is None else min(num_tokens, self.longest)
        return tokens + tokens // 4 if self.straddles else tokens

    def held_bytes(self, num_tokens: int | None) -> int:
        call = self.call
        per_token = call.head_dim * call.dtype.itemsize * (call.heads + 2 * call.kv_heads)
        if self.straddles:
            per_token += call.heads * (call.head_dim + 1) * call.exact.itemsize
        return call.samples * per_token * self.most_tokens(num_tokens)

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """The next tokens: to the end of the period, whole periods where they lie, and the rest."""
        tokens = q.shape[1]
        first = min(tokens, -self.position % self.period)
        last = tokens - (tokens - first) % self.period
        self.wait_for(q[:, :first], k[:, :first], v[:, :first])
        if last > first:
            out, _ = self.attend(q[:, first:last], k[:, first:last], v[:, first:last])
            self.deliver(out)
            self.base = self.position = self.position + last - first
            self.done = [self.position] * len(self.done)
        self.wait_for(q[:, last:], k[:, last:], v[:, last:])

    def wait_for(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Copy tokens, and compute what is complete by them.

        A period of straddling segments may be far longer than the longest: no more than that is copied at a time.
        """
        step = self.longest if self.straddles else max(1, q.shape[1])
        for at in range(0, q.shape[1], step):
            for rows, x in zip(self.inputs, (q, k, v), strict=True):
                part = x[:, at : at + step]
                rows.add(part.shape[1]).copy_(part)
            self.position += part.shape[1]
            for rows, blank in zip(self.sums, (0.0, -torch.inf), strict=False):
                rows.add(part.shape[1]).fill_(blank)
            self.compute()
        for rows in (*self.inputs, *self.sums):
            rows.shrink()

    def end(self) -> None:
        """There are no more tokens: the last segments are as long as they are."""
        self.compute(ends=True)

    def compute(self, ends: bool = False) -> None:
        """Compute the segments that are complete, and deliver the outputs that are."""
        for index, branch in enumerate(self.parts):
            length = self.longest if branch is None else self.branches[branch].length
            start, stop = self.done[index], self.position if ends else self.position - self.position % length
            if start == stop:
                continue
            self.done[index] = stop
            heads = slice(0, self.call.kv_heads)
            if branch is not None:
                heads = slice(self.branches[branch].first, self.branches[branch].last)
            queries = slice(heads.start * self.call.q_per_kv, heads.stop * self.call.q_per_kv)
            tokens = slice(start - self.base, stop - self.base)
            q, k, v = (x.all[:, tokens, some] for x, some in zip(self.inputs, (queries, heads, heads), strict=True))
            out, lse = self.attend(q, k, v, branch, start if ends else 0)
            if branch is None:
                self.deliver(out.to(self.call.dtype).contiguous())
            else:
                sums, sums_lse = (x.all[:, tokens, queries] for x in self.sums)
                merge_(sums, sums_lse, out, lse)
        complete = min(self.done)
        if self.sums and complete > self.base:
            self.deliver(self.sums[0].all[:, : complete - self.base].to(self.call.dtype, copy=True))
        for rows in (*self.inputs, *self.sums):
            rows.drop(complete - self.base)
        self.base = complete
