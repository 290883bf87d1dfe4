"""Not causal: tokens wait, copied, until their segments are complete.

Legend: q, out (B, n, H, D); k, v (B, n, Hk, D); lse (B, n, H); the tokens whose output is not yet known begin at
``base`` and end where the stream now does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dilated_attention import autograd
from dilated_attention.backends import run
from dilated_attention.backends.problem import Inputs
from dilated_attention.call import Call
from dilated_attention.merge import merge_
from dilated_attention.streaming.stream import Stream


class BufferedStream(Stream):
    """The work of a stream that is not causal.

    Branches are computed together, a longest segment at a time, unless some segment is not part of a longest one: then
    one by one, and what they give is merged.
    """

    def __init__(self, call: Call, deliver: Callable[[Tensor], None], num_tokens: int | None) -> None:
        super().__init__(call, deliver, num_tokens)
        self.straddles = self.period != self.longest
        # branch, segment length, first head, and the one after the last; None: all branches
        self.parts: list[tuple[int | None, int, int, int]] = [(None, self.longest, 0, call.kv_heads)]
        if self.straddles:
            self.parts = [(index, x.length, x.members[0], x.members[-1] + 1) for index, x in enumerate(self.branches)]
        self.done = [0] * len(self.parts)  # where the first segment of each begins that is not yet computed
        self.base = self.first = 0  # the first token that waits, and its row in the buffers
        # rows that go a few at a time need room to spare, lest the others be moved often
        self.room = self.most + self.most // 4 if self.straddles else self.most

    def held_bytes(self) -> int:
        call = self.call
        per_token = call.head_dim * call.dtype.itemsize * (call.heads + 2 * call.kv_heads)
        if self.straddles:
            per_token += call.heads * (call.head_dim + 1) * call.sum_dtype.itemsize
        return call.samples * per_token * self.room

    @functools.cached_property
    def buffers(self) -> list[Tensor]:
        """q, k, v, and where branches are merged out and lse, of the tokens that wait."""
        call, shape = self.call, (self.call.samples, 0)
        sizes = [(heads, call.head_dim) for heads in (call.heads, call.kv_heads, call.kv_heads)]
        inputs = [torch.empty(*shape, *size, dtype=call.dtype, device=call.device) for size in sizes]
        sums = (sizes[0], sizes[0][:1]) if self.straddles else ()
        return [*inputs, *(torch.empty(*shape, *size, dtype=call.sum_dtype, device=call.device) for size in sums)]

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

    def wait_for(self, *qkv: Tensor) -> None:
        """Copy tokens, as many as there is room for, and compute what is complete by them."""
        at, tokens = 0, qkv[0].shape[1]
        while at < tokens:
            held = self.position - self.base
            count = min(tokens - at, self.room - held)
            if self.first + held + count > self.buffers[0].shape[1]:
                self.make_room(held, count)
            row = self.first + held
            rows = [x[:, row : row + count] for x in self.buffers]
            for x, given in zip(rows, qkv, strict=False):
                x.copy_(given[:, at : at + count])
            for x, blank in zip(rows[3:], (0.0, -torch.inf), strict=False):
                x.fill_(blank)
            at, self.position = at + count, self.position + count
            self.compute()

    def make_room(self, held: int, count: int) -> None:
        """For so many more tokens after those that wait, which move to the front. Room is doubled up to the most."""
        room = min(2 * (held + count), self.room)
        moved = [x.new_empty((x.shape[0], room, *x.shape[2:])) for x in self.buffers]
        for rows, x in zip(moved, self.buffers, strict=True):
            rows[:, :held] = x[:, self.first : self.first + held]
        self.first, self.buffers = 0, moved

    def end(self) -> None:
        """The last segments are as long as they are."""
        self.compute(ends=True)

    def compute(self, ends: bool = False) -> None:
        """Compute the segments that are complete, and deliver the outputs that are."""
        group = self.call.q_per_kv
        for index, (branch, length, first, last) in enumerate(self.parts):
            start, stop = self.done[index], self.position if ends else self.position - self.position % length
            if start == stop:
                continue
            self.done[index] = stop
            heads, queries = slice(first, last), slice(first * group, last * group)
            rows = slice(self.first + start - self.base, self.first + stop - self.base)
            q, k, v = (x[:, rows, some] for x, some in zip(self.buffers, (queries, heads, heads), strict=False))
            out, lse = self.attend(q, k, v, branch, start if ends else 0)
            if branch is None:
                self.deliver(out)
            else:
                sums, sums_lse = (x[:, rows, queries] for x in self.buffers[3:])
                merge_(sums, sums_lse, out, lse)
        complete = min(self.done) - self.base
        if self.straddles and complete:
            self.deliver(self.buffers[3][:, self.first : self.first + complete].to(self.call.dtype, copy=True))
        self.base += complete
        self.first = 0 if self.base == self.position else self.first + complete

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, branch: int | None = None, before: int = 0
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of tokens that begin where their segments do; of one branch, as if its heads ran nothing else.

        ``before``: how many tokens came earlier, if these are the last of the stream and not all of their segments.
        """
        call, inputs = self.call, Inputs(q, k, v)
        if branch is not None:
            pattern = call.dilated if call.dilated.head_rule.splits_heads else call.dilated.alone(branch)
            first = self.branches[branch].members[0]
            call = call._replace(pattern=pattern, first_head=first, total_heads=call.kv_heads)
        call = call.of(q, k, None, 0)
        if before and call.adds_zeros:  # zero keys fill those up, as many as if all were one call
            total = before + q.shape[1]
            return run.forward(call._replace(in_parts=True, start=before, key_start=before, total=total), inputs)
        return autograd.attend(inputs, call)
