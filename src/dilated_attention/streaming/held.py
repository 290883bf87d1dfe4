"""The two kinds of stream, and what each holds from one chunk to the next: what later tokens see, or tokens that wait.

Legend: q, out (B, n, H, D); k, v (B, n, Hk, D); lse (B, n, H).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from dilated_attention import autograd
from dilated_attention.backends import run
from dilated_attention.backends.choose import Backend
from dilated_attention.backends.problem import Inputs
from dilated_attention.branches.base import FOREVER
from dilated_attention.call import Call
from dilated_attention.merge import merge_
from dilated_attention.streaming.kv_cache import KVCache
from dilated_attention.streaming.slots import rows_kept
from dilated_attention.units import bytes_text


class Stream:
    """The work of a stream. Its call has the shapes of no tokens, alike for all chunks."""

    def __init__(self, call: Call, deliver: Callable[[Tensor], None], num_tokens: int | None) -> None:
        self.call, self.deliver, self.num_tokens, self.position = call, deliver, num_tokens, 0

    def held_bytes(self) -> int:
        """The most that is held from one chunk to the next."""
        raise NotImplementedError

    def end(self) -> None:
        """There are no more tokens."""

    def check_memory(self, max_bytes: int | None) -> None:
        """Raise if what is held from one chunk to the next does not fit. Nothing is held yet."""
        self.limit = _half_of_memory(self.call.device) if max_bytes is None else max_bytes
        self.check_held()

    def check_held(self) -> None:
        held, limit = self.held_bytes(), self.limit
        if limit is None or held <= limit:
            return
        what, causal = "the longest segment", "is_causal=True, "
        if self.call.is_causal:
            what, causal = "the keys and values that later tokens see", ""
        raise ValueError(
            f"{what} would take {held:,} bytes ({bytes_text(held)}), and max_bytes is {limit:,}: use shorter segments, "
            f"{causal}fewer samples at a time or a larger max_bytes; if the stream is shorter than its segments, give "
            "num_tokens"
        )


def _half_of_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # held by torch's allocator
        return (torch.cuda.mem_get_info(device)[0] + unused) // 2
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return None


class CausalStream(Stream):
    """Every chunk is computed at once."""

    def __init__(self, call: Call, deliver: Callable[[Tensor], None], num_tokens: int | None) -> None:
        super().__init__(call, deliver, num_tokens)
        like = torch.empty(call.samples, 0, call.kv_heads, call.head_dim, dtype=call.dtype, device=call.device)
        self.cache = KVCache(call.pattern, like, tokens=1)

    def held_bytes(self) -> int:
        """At the most; if that is without limit, what the tokens so far need."""
        call, full = self.call, self.cache.full
        tokens = min(full, full if self.num_tokens is None else self.num_tokens)
        rows = rows_kept(call.pattern, call.kv_heads, self.position if tokens == FOREVER else tokens)
        return 2 * rows * call.samples * call.head_dim * call.dtype.itemsize

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        before, self.position = self.position, self.position + q.shape[1]
        if self.cache.full == FOREVER:
            self.check_held()
        for out, _ in self.cache.chunk(q, k, v, before, self.call.scale, cast(Backend, self.call.backend)):
            self.deliver(out)
        self.cache.reserve(self.position)
        self.cache.keep_chunk(k, v, before)


class BufferedStream(Stream):
    """Tokens wait, copied, until their segments are complete.

    Those whose output is not yet known begin at ``base`` and end where the stream now does. Branches are computed
    together, a longest segment at a time, unless some segment is not part of a longest one: then one by one, and what
    they give is merged.
    """

    def __init__(self, call: Call, deliver: Callable[[Tensor], None], num_tokens: int | None) -> None:
        super().__init__(call, deliver, num_tokens)
        lengths = call.dilated.segment_lengths
        self.branches = call.dilated.branches_for(call.kv_heads)
        self.period = math.lcm(*lengths)  # the segments of all branches begin together every so many tokens
        self.longest = max(lengths)
        self.most = self.longest if num_tokens is None else min(num_tokens, self.longest)  # tokens of a segment
        self.straddles = self.period != self.longest
        # branch, segment length, first head, and the one after the last; None: all branches
        self.parts: list[tuple[int | None, int, int, int]] = [(None, self.longest, 0, call.kv_heads)]
        if self.straddles:
            self.parts = [(index, x.length, x.members[0], x.members[-1] + 1) for index, x in enumerate(self.branches)]
        self.done = [0] * len(self.parts)  # where the first segment of each begins that is not yet computed
        self.base = self.first = 0  # the first token that waits, and its row in the buffers
        # rows that go a few at a time need room to spare, lest the others be moved often
        self.room = self.most + self.most // 4 if self.straddles else self.most
        # q, k, v, and where branches are merged out and lse, of the tokens that wait
        heads = (call.heads, call.head_dim), (call.kv_heads, call.head_dim), (call.kv_heads, call.head_dim)
        sums = ((call.heads, call.head_dim), (call.heads,)) if self.straddles else ()
        like = torch.empty(0, dtype=call.dtype, device=call.device)
        self.buffers = [like.new_empty(call.samples, 0, *size) for size in heads]
        self.buffers += [like.new_empty(call.samples, 0, *size, dtype=call.sum_dtype) for size in sums]

    def held_bytes(self) -> int:
        call = self.call
        per_token = call.head_dim * call.dtype.itemsize * (call.heads + 2 * call.kv_heads)
        if self.straddles:
            per_token += call.heads * (call.head_dim + 1) * call.sum_dtype.itemsize
        return call.samples * per_token * self.room

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
