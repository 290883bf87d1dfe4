"""What both kinds of stream share: the call that all chunks are parts of, rows that are held, and how many.

Legend: q, out (B, n, H, D); k, v (B, n, Hk, D); lse (B, n, H), of n tokens in a row.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dilated_attention import autograd
from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.problem import Inputs
from dilated_attention.backends.tensors import no_autocast
from dilated_attention.call import Call
from dilated_attention.pattern import Branch, DilatedPattern
from dilated_attention.units import bytes_text


class Parts:
    """A sequence that is computed part by part. Its call has the shapes of no tokens, alike for all parts."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.branches = call.pattern.branches_for(call.kv_heads)
        lengths = call.pattern.segment_lengths
        self.longest = max(lengths)
        self.period = math.lcm(*lengths)  # the segments of all branches begin together every so many tokens

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, branch: int | None = None, before: int = 0
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of tokens that begin where all their segments do. Of one branch, its heads alone are given.

        ``before``: how many tokens came earlier, if these are the last of the stream and not all of their segments.
        """
        if before and self.call.adds_zeros:  # zero keys fill those up, as many as if all were one call
            with no_autocast(q.device):
                out, lse = self.work(q, k, v, before, branch).forward()
            return out[..., : self.call.head_dim], lse
        return autograd.attend(Inputs(q, k, v), self.part(branch).of(q, k, None, 0))

    def work(self, q: Tensor, k: Tensor, v: Tensor, before: int, branch: int | None = None) -> Work:
        """The tokens with their own keys alone, wherever in their segments they begin; its results are for merging."""
        call = self.part(branch)._replace(in_parts=True).of(q, k, None, 0)
        call = call._replace(start=before, key_start=before, total=before + q.shape[1])
        return Work.of(call, Inputs(q, k, v), keys_follow=True)

    def part(self, branch: int | None) -> Call:
        """The call of one branch, as if its heads ran nothing else; None: of all."""
        if branch is None:
            return self.call
        pattern, one = self.call.pattern, self.branches[branch]
        if not pattern.head_rule.splits_heads:
            pattern = DilatedPattern(pattern.rule, (one.length,), (one.rate,))
        return self.call._replace(pattern=pattern, first_head=one.first, total_heads=self.call.kv_heads)


class Stream(Parts):
    """The work of a stream."""

    def __init__(
        self, call: Call, deliver: Callable[[Tensor], None], max_bytes: int | None = None, num_tokens: int | None = None
    ) -> None:
        """Raises if more than ``max_bytes`` would be held, before anything is."""
        super().__init__(call)
        self.deliver, self.position = deliver, 0
        self._check_memory(max_bytes, num_tokens)

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """The next tokens."""
        raise NotImplementedError

    def end(self) -> None:
        """There are no more tokens."""
        raise NotImplementedError

    def held_bytes(self, num_tokens: int | None) -> int:
        """The most that is held from one chunk to the next, if there are at most so many tokens."""
        raise NotImplementedError

    def _check_memory(self, max_bytes: int | None, num_tokens: int | None) -> None:
        """Raise if what is held does not fit."""
        limit = _half_of_memory(self.call.device) if max_bytes is None else max_bytes
        held = self.held_bytes(num_tokens)
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


@contextlib.contextmanager
def any_mode() -> Iterator[None]:
    """Whatever mode a chunk is taken in, nothing held is an inference tensor: the next may come in another mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def rows_of(branch: Branch, tokens: int) -> int:
    """The rows that a head has of the first tokens of a segment, at most."""
    return -(-min(tokens, branch.length) // branch.rate)


def _half_of_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # held by torch's allocator
        return (torch.cuda.mem_get_info(device)[0] + unused) // 2
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return None
