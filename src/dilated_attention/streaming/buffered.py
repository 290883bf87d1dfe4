"""Not causal: tokens wait, copied, until their segments are complete.

Legend: q, out (B, n, H, D); k, v (B, n, Hk, D); lse (B, n, H); the window holds the tokens whose output is not yet
known, which begin at ``base`` and end where the stream now does.
"""

from __future__ import annotations

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

    def resize(self, count: int) -> None:
        """So many rows from now on; new ones are still to be written."""
        if self.first + count > self.store.shape[1]:
            held = self.last - self.first
            room = max(count, min(2 * count, self.most))
            store = self.store.new_empty((self.store.shape[0], room, *self.store.shape[2:]))
            store[:, :held] = self.all
            self.store, self.first = store, 0
        self.last = self.first + count

    def add(self, count: int) -> Tensor:
        """Room for so many more rows."""
        self.resize(self.last - self.first + count)
        return self.store[:, self.last - count : self.last]

    def shrink(self) -> None:
        """Let go of room that a long chunk took for a while."""
        if self.store.shape[1] > self.most:
            self.store, self.first, self.last = self.all.clone(), 0, self.last - self.first

    def drop(self, count: int) -> None:
        self.first += count
        if self.first == self.last:
            self.first = self.last = 0


class BufferedStream(Stream):
    """The work of a stream that is not causal."""

    def __init__(self, call: Call, deliver: Callable[[Tensor], None], *limits: int | None) -> None:
        super().__init__(call, deliver, *limits)
        self.base = 0
        self.done = [0] * len(self.branches)  # where each branch's first segment begins that is not yet computed
        most, row, key_row = self.most_tokens(), (call.heads, call.head_dim), (call.kv_heads, call.head_dim)
        self.inputs = [HeldRows(call, sizes, call.dtype, most) for sizes in (row, key_row, key_row)]
        self.out, self.lse = (HeldRows(call, sizes, call.exact, most) for sizes in (row, row[:1]))

    @property
    def straddles(self) -> bool:
        """Whether some segment is not part of a longest one, so that its branch is computed by itself."""
        return self.period != self.longest

    @property
    def held(self) -> list[HeldRows]:
        return [*self.inputs, self.out, self.lse] if self.straddles else self.inputs

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
        """A period of straddling segments may be far longer than the longest: no more than that is copied at a time."""
        step = self.longest if self.straddles else max(1, q.shape[1])
        for at in range(0, q.shape[1], step):
            self.wait(*(x[:, at : at + step] for x in (q, k, v)))
        for rows in self.held:
            rows.shrink()

    def wait(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Take a copy, and compute what is complete by it."""
        tokens = q.shape[1]
        for rows, x in zip(self.inputs, (q, k, v), strict=True):
            rows.add(tokens).copy_(x)
        self.position += tokens
        if self.straddles:
            self.out.add(tokens).zero_()
            self.lse.add(tokens).fill_(-torch.inf)
            for index, branch in enumerate(self.branches):
                self.compute_branch(index, self.position - self.position % branch.length)
            self.give(min(self.done))
        elif self.position % self.period == 0:
            self.compute()

    def end(self) -> None:
        """There are no more tokens: the last segments are as long as they are."""
        if self.straddles:
            for index in range(len(self.done)):
                self.compute_branch(index, self.position, self.done[index])
            self.give(self.position)
        elif self.position > self.base:
            self.compute(self.base)

    def compute(self, before: int = 0) -> None:
        """All that waits, in one call."""
        q, k, v = (rows.all for rows in self.inputs)
        out, _ = self.attend(q, k, v, before=before)
        self.deliver(out.to(self.call.dtype).contiguous())
        self.drop(self.position)

    def compute_branch(self, index: int, stop: int, before: int = 0) -> None:
        """One branch's segments up to a token, merged with what other branches gave."""
        start, self.done[index] = self.done[index], stop
        if start == stop:
            return
        branch, group, tokens = self.branches[index], self.call.q_per_kv, slice(start - self.base, stop - self.base)
        keys, queries = slice(branch.first, branch.last), slice(branch.first * group, branch.last * group)
        q, k, v = (rows.all[:, tokens, some] for rows, some in zip(self.inputs, (queries, keys, keys), strict=True))
        part, part_lse = self.attend(q, k, v, index, before)
        merge_(self.out.all[:, tokens, queries], self.lse.all[:, tokens, queries], part, part_lse)

    def give(self, stop: int) -> None:
        """The outputs up to a token are complete."""
        if stop > self.base:
            self.deliver(self.out.all[:, : stop - self.base].to(self.call.dtype, copy=True))
            self.drop(stop)

    def drop(self, stop: int) -> None:
        for rows in self.held:
            rows.drop(stop - self.base)
        self.base = stop
