"""What a stream holds from one chunk to the next: tokens that wait, and rows that later ones see.

Legend: q, out (B, n, H, D); k, v (B, n, Hk, D).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from dilated_attention.branches.base import FOREVER
from dilated_attention.call import Call
from dilated_attention.streaming.kv_cache import KVCache
from dilated_attention.units import bytes_text


class Stream:
    """The work of a stream. Tokens wait, copied, until all that they see has come; of a causal one, none does.

    Those up to ``done`` have their outputs; those up to ``position`` have come.
    """

    def __init__(self, call: Call, deliver: Callable[[Tensor], None], num_tokens: int | None) -> None:
        """``call``: has the shapes of no tokens, alike for all chunks."""
        self.call, self.deliver, self.num_tokens = call, deliver, num_tokens
        like = torch.empty(call.samples, 0, call.kv_heads, call.head_dim, dtype=call.dtype, device=call.device)
        self.cache = KVCache(call.pattern, like, tokens=1)
        self.ahead = 0 if call.is_causal else max(some[0].ahead for some in self.cache.kept)
        if self.ahead >= FOREVER:
            raise NotImplementedError(f"a stream that is not causal would wait for all tokens, with {call.pattern}")
        self.position = self.done = 0
        self.waiting: list[list[Tensor]] = [[], [], []]  # q, k and v

    @property
    def in_parts(self) -> bool:
        """Whether some tokens are not computed in whole periods."""
        return self.call.is_causal or self.call.adds_zeros or self.ahead != self.cache.period

    def held_bytes(self) -> int:
        """At the most; of rows that have no limit, those of the tokens so far."""
        call, most = self.call, FOREVER if self.num_tokens is None else self.num_tokens
        tokens = min(self.cache.full, most)
        tokens = self.position if tokens == FOREVER else tokens
        rows = self.cache.rows_for(tokens) if self.ahead != self.cache.period else 0
        rows = 2 * rows + min(self.ahead, most) * (call.heads + 2 * call.kv_heads)
        return rows * call.samples * call.head_dim * call.dtype.itemsize

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

    def take(self, *qkv: Tensor) -> None:
        """The next tokens: to the end of the period, and those after it, of which whole periods are not copied."""
        first = min(qkv[0].shape[1], -self.position % self.cache.period)
        for part in slice(0, first), slice(first, None):
            some = [x[:, part] for x in qkv]
            for waiting, x in zip(self.waiting, some, strict=True):
                waiting.append(x)
            self.position += some[0].shape[1]
            known = min(some[0].known(self.position) for some in self.cache.kept)
            self.compute(self.position if self.call.is_causal else known)

    def end(self) -> None:
        """There are no more tokens: the last ones see no others."""
        self.compute(self.position)

    def compute(self, known: int) -> None:
        """Deliver the outputs of the tokens up to this one, and hold what is left."""
        at, count = self.done, known - self.done
        if count > 0:
            if self.cache.full == FOREVER:
                self.check_held()
            for waiting in self.waiting:
                if len(waiting) > 1:
                    waiting[:] = [torch.cat(waiting, 1)]
            q, k, v = (waiting.pop() for waiting in self.waiting)
            self.deliver(self.cache.chunk(self.call, q[:, :count], k, v, at)[0])
            self.cache.reserve(known)
            self.cache.keep_chunk(k[:, :count], v[:, :count], at)
            self.done, self.waiting = known, [[x[:, count:]] for x in (q, k, v)]
        for waiting in self.waiting:  # a chunk may be overwritten
            waiting[-1:] = [x.clone() for x in waiting[-1:] if x.shape[1]]


def _half_of_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # held by torch's allocator
        return (torch.cuda.mem_get_info(device)[0] + unused) // 2
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return None
