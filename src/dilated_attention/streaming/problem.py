"""What a stream computes, once its first chunk has told the shapes: the branches, their memory, and calls on tokens.

Legend: q, out (B, n, H, D); k, v (B, n, Hk, D); lse (B, n, H), of n tokens in a row.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.blockwise import Work, no_autocast
from dilated_attention.backends.choose import Backend
from dilated_attention.backends.problem import Inputs
from dilated_attention.call import Call, accumulate_dtype
from dilated_attention.functional import dilated_attention
from dilated_attention.pattern import DilatedPattern


class Kind(NamedTuple):
    """What all chunks of a stream share."""

    samples: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, query: Tensor, key: Tensor) -> Kind:
        samples, _, heads, head_dim = query.shape
        return cls(samples, heads, key.shape[2], head_dim, query.dtype, query.device)

    def __str__(self) -> str:
        heads = f"{self.heads} query and {self.kv_heads} key/value heads of {self.head_dim}"
        return f"batch {self.samples}, {heads}, {self.dtype} on {self.device}"


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch as a problem of its own: in ``pattern``, its heads run nothing else."""

    pattern: DilatedPattern
    index: int
    width: int
    rate: int
    placed: tuple[tuple[int, int], ...]  # (key/value head, offset)

    @classmethod
    def of(cls, pattern: DilatedPattern, index: int, kv_heads: int) -> Branch:
        width, rate = pattern.branches[index]
        heads = pattern.heads(index, kv_heads)
        placed = tuple((head, pattern.offset(index, head, kv_heads)) for head in heads)
        alone = pattern if pattern.dealing.is_divided else DilatedPattern(pattern.rule, (width,), (rate,))
        return cls(alone, index, width, rate, placed)

    @property
    def heads(self) -> range:
        return range(self.placed[0][0], self.placed[-1][0] + 1)

    def rows(self, tokens: int) -> int:
        """The rows that a head has of the first tokens of a segment, at most."""
        return -(-min(tokens, self.width) // self.rate)


@dataclass(frozen=True, slots=True)
class Problem:
    """What is computed, for chunks of one kind."""

    pattern: DilatedPattern
    is_causal: bool
    scale: float
    backend: Backend
    kind: Kind
    branches: tuple[Branch, ...]

    @classmethod
    def of(cls, pattern: DilatedPattern, is_causal: bool, scale: float | None, backend: Backend, kind: Kind) -> Problem:
        scale = 1 / math.sqrt(kind.head_dim) if scale is None else scale
        branches = tuple(Branch.of(pattern, index, kind.kv_heads) for index in range(len(pattern.branches)))
        return cls(pattern, is_causal, scale, backend, kind, branches)

    @property
    def longest(self) -> int:
        return max(self.pattern.segment_lengths)

    @property
    def period(self) -> int:
        return math.lcm(*self.pattern.segment_lengths)

    @property
    def straddles(self) -> bool:
        """Whether some segment is not part of a longest one, so that its branch is computed by itself."""
        return self.period != self.longest

    @property
    def group(self) -> int:
        return self.kind.heads // self.kind.kv_heads

    def most_tokens(self, num_tokens: int | None = None) -> int:
        """That wait, not causal: rows that go a few at a time need room to spare, lest the others be moved often."""
        tokens = self.longest if num_tokens is None else min(num_tokens, self.longest)
        return tokens + tokens // 4 if self.straddles else tokens

    def held_bytes(self, num_tokens: int | None) -> int:
        """The most that is held from one chunk to the next, if there are at most so many tokens."""
        kind, tokens = self.kind, self.longest if num_tokens is None else min(num_tokens, self.longest)
        row = kind.samples * kind.head_dim * kind.dtype.itemsize
        if self.is_causal:
            return sum(2 * row * len(branch.heads) * branch.rows(tokens) for branch in self.branches)
        per_token = row * (kind.heads + 2 * kind.kv_heads)
        if self.straddles:
            per_token += kind.samples * kind.heads * (kind.head_dim + 1) * accumulate_dtype(kind.dtype).itemsize
        return per_token * self.most_tokens(num_tokens)

    def check_memory(self, max_bytes: int | None, num_tokens: int | None) -> None:
        """Raise if what is held does not fit."""
        limit = _half_of_memory(self.kind.device) if max_bytes is None else max_bytes
        held = self.held_bytes(num_tokens)
        if limit is None or held <= limit:
            return
        what, causal = "the longest segment", "is_causal=True, "
        if self.is_causal:
            what, causal = "the keys and values that later tokens see", ""
        raise ValueError(
            f"{what} would take {held:,} bytes, and max_bytes is {limit:,}: use shorter segments, {causal}fewer "
            "samples at a time or a larger max_bytes; if the stream is shorter than its segments, give num_tokens"
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, branch: Branch | None = None, before: int = 0
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of tokens that begin where all their segments do. Of one branch, its heads alone are given.

        ``before``: how many tokens came earlier, if these are the last of the stream and not all of their segments.
        """
        if before and self.pattern.dealing.adds_zeros:  # zero keys fill those up, as many as if all were one call
            with no_autocast(q.device):
                out, lse = self.work(q, k, v, before, branch).forward()
            return out[..., : self.kind.head_dim], lse
        pattern = self.pattern if branch is None else branch.pattern
        return dilated_attention(
            q, k, v, pattern,
            is_causal=self.is_causal, scale=self.scale, enable_gqa=True, backend=self.backend, return_lse=True,
            heads=None if branch is None else (branch.heads.start, self.kind.kv_heads),
        )  # fmt: skip

    def work(self, q: Tensor, k: Tensor, v: Tensor, before: int, branch: Branch | None = None) -> Work:
        """The tokens with their own keys alone, wherever in their segments they begin; its results are for merging."""
        pattern, first = (self.pattern, 0) if branch is None else (branch.pattern, branch.heads.start)
        call = Call(
            pattern, self.is_causal, self.scale, 0.0, self.backend, first_head=first, total_heads=self.kind.kv_heads,
            in_parts=True,
        ).of(q, k, None, 0)  # fmt: skip
        call = call._replace(start=before, key_start=before, total=before + q.shape[1])
        return Work.of(call, Inputs(q, k, v), visited=True)


def _half_of_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # held by torch's allocator
        return (torch.cuda.mem_get_info(device)[0] + unused) // 2
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return None
