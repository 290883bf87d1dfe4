"""KVCache: a cache for causal decoding that keeps only the K and V rows that later tokens can see.

Of a branch (w, r) only the open segment matters, and of that every r-th token: w / r rows per key/value head, however
long the sequence is. The next token of each sample is computed by itself, on the device and in fixed buffers, so that a
CUDA graph can hold the step. More tokens at once are a chunk of a causal stream.

Legend: q (B, n, H, D); k, v (B, n, Hk, D); lse (B, n, H); at (B,) the position of the first of the n tokens in its own
sequence; count (B,) how many of the n tokens are real, the first ones; a cache (2, B, b, rows, h, D), k and v of b
branches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dilated_attention.backends.choose import Backend, choose
from dilated_attention.call import DEFAULT_SCALE, ON_DEVICE, Call, accumulate_dtype
from dilated_attention.functional import dilated_attention
from dilated_attention.pattern import Branch, DilatedPattern
from dilated_attention.resolve import computed_dtype
from dilated_attention.streaming.causal import CausalParts, Pair
from dilated_attention.streaming.stream import Stream, any_mode, rows_of


class Slot(NamedTuple):
    """Where the next token of each sample belongs on a cache."""

    sample: Tensor  # (B, 1), to index with
    row: Tensor  # (B, b)
    absent: Tensor  # (B, b, h, 1), which heads do not take part with it


class BranchCache:
    """The rows of branches that have equally many rows and the same heads: they are attended in one call."""

    def __init__(self, branches: dict[int, Branch], rows: int, like: Tensor) -> None:
        """``like``: has the samples, head dim, dtype and device of the rows."""
        some = list(branches.values())
        self.branches, self.rows = branches, rows
        self.heads = slice(some[0].first, some[0].last)
        self.lengths = torch.tensor([one.length for one in some], device=like.device)
        self.rates = torch.tensor([one.rate for one in some], device=like.device)
        self.offsets = torch.tensor([[one.offset(h) for h in one.heads] for one in some], device=like.device)
        self.numbers = torch.arange(len(some), device=like.device)
        self.kv = like.new_zeros(2, like.shape[0], len(some), rows, len(some[0].heads), like.shape[-1])
        self.dense = DilatedPattern.longnet([rows], [1])

    def slot(self, at: Tensor, count: Tensor | None) -> Slot:
        token = at.unsqueeze(1) % self.lengths
        absent = (token % self.rates).unsqueeze(2) != self.offsets
        if count is not None:
            absent = absent | (count == 0)[:, None, None]
        sample = torch.arange(len(at), device=at.device).unsqueeze(1)
        return Slot(sample, token // self.rates, absent.unsqueeze(3))

    def put(self, k: Tensor, v: Tensor, slot: Slot) -> None:
        """Keep one token per sample; heads that do not take part keep the row that they have."""
        index = slice(None), slot.sample, self.numbers, slot.row
        given = torch.stack((k, v)).to(self.kv.dtype)[:, :, :, self.heads]
        self.kv[index] = torch.where(slot.absent, self.kv[index], given)

    def seen(self, q: Tensor, slot: Slot, scale: float | None, backend: Backend) -> Pair:
        """(out, lse) of what one query per sample sees in each branch, itself among it, (B, b, h * G, ...)."""
        samples, branches = slot.row.shape
        # Each branch is one more sample, and its query is at the token's row. Where a head does not take part, that row
        # may be an old one, and what came of it is put away, NaN included.
        queries = q.unsqueeze(1).expand(-1, branches, -1, -1, -1).flatten(0, 1)
        keys, values = (x.flatten(0, 1) for x in self.kv)
        out, lse = dilated_attention(
            queries, keys, values, self.dense, is_causal=True, scale=scale, enable_gqa=True, backend=backend,
            query_offset=slot.row.flatten(), return_lse=True,
        )  # fmt: skip
        shape = samples, branches, slot.absent.shape[2], -1
        lse = lse.view(shape).masked_fill(slot.absent, -torch.inf)
        return out.view(shape).masked_fill(slot.absent, 0.0).view(samples, branches, *q.shape[2:]), lse.flatten(2)


class KVCache:
    """The rows of one attention layer, for samples that may be at different positions."""

    def __init__(self, pattern: DilatedPattern, like: Tensor, tokens: int | None = None) -> None:
        """``like``: k or v of any tokens. ``tokens``: room for sequences so long, and no longer; None: for any."""
        samples, _, kv_heads, head_dim = like.shape
        self.pattern, self.kv_heads = pattern, kv_heads
        self.branches = pattern.branches_for(kv_heads)
        with any_mode():
            self.like = like.new_empty(samples, 0, head_dim)
            self.caches = self._branch_caches(tokens)
        self.tokens = tokens

    def _branch_caches(self, tokens: int | None) -> list[BranchCache]:
        alike: dict[tuple[int, range], dict[int, Branch]] = {}
        for index, branch in enumerate(self.branches):
            rows = rows_of(branch, branch.length if tokens is None else tokens)
            if branch.heads and rows:
                alike.setdefault((rows, branch.heads), {})[index] = branch
        return [BranchCache(branches, rows, self.like) for (rows, _), branches in alike.items()]

    def reserve(self, tokens: int) -> None:
        """Make room for sequences so long. Room is doubled, so that rows are seldom moved."""
        if self.tokens is None or tokens <= self.tokens:
            return
        room = max(tokens, 2 * self.tokens)
        self.tokens = None if room >= max(self.pattern.segment_lengths) else room
        with any_mode():
            old, self.caches = dict(self._rows()), self._branch_caches(self.tokens)
            for index, pair in self._rows():
                for x, before in zip(pair, old.get(index, ()), strict=False):
                    x[:, : before.shape[1]] = before

    def _rows(self) -> Iterator[tuple[int, Pair]]:
        """Each branch with its rows, (B, rows, h, D)."""
        for cache in self.caches:
            k, v = cache.kv
            for i, index in enumerate(cache.branches):
                yield index, (k[:, i], v[:, i])

    @property
    def nbytes(self) -> int:
        return sum(cache.kv.nbytes for cache in self.caches)

    def select(self, samples: Tensor) -> None:
        """Go on with these samples, each as often as it is named."""
        with any_mode():
            self.like = self.like[samples]
            for cache in self.caches:
                cache.kv = cache.kv.index_select(1, samples)

    def is_on_device(self, heads: int, backend: Backend) -> bool:
        """Whether the host has no part in a step, as a CUDA graph needs; some backends read positions there."""
        for cache in self.caches:
            k = cache.kv[0].flatten(0, 1)
            q = k.new_empty(len(k), 1, k.shape[2] * heads // self.kv_heads, k.shape[3])
            if not choose(Call(cache.dense, True, backend=backend).of(q, k, None, ON_DEVICE)).is_whole:
                return False
        return True

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        at: Tensor,
        count: Tensor | None = None,
        *,
        scale: float | None = None,
        backend: Backend = "auto",
        slots: list[Slot] | None = None,
    ) -> Pair:
        """(out, lse) of the next tokens, which see what is kept and one another.

        Rows that are not real, by ``count``, get 0 and -inf. Several tokens are not kept yet: call `keep`. One token
        per sample is kept at once, in a row that no other visible token has. ``slots`` is what `slots` gave for
        ``at`` and ``count``, which are then not read; it may come from another layer with this pattern.
        """
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise ValueError("kept rows have no gradients: decode under torch.no_grad()")
        q, k, v = (x.to(computed_dtype(x)) for x in (q, k, v))
        if q.shape[1] == 1:
            return self._next(q, k, v, self.slots(at, count) if slots is None else slots, scale, backend)
        with any_mode():
            out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=accumulate_dtype(q.dtype))
            for samples, first, n in self._alike(at, count, q.shape[1]):
                parts = [x[samples, :n] for x in (q, k, v)]
                chunk = self.continued(self._call(parts[0], parts[1], scale, backend), first, samples)
                outs, lses = zip(*chunk.seen(*parts), strict=True)
                out[samples, :n], lse[samples, :n] = torch.cat(outs, 1), torch.cat(lses, 1)
        return out, lse

    def keep(self, k: Tensor, v: Tensor, at: Tensor, count: Tensor | None = None) -> None:
        """Keep what tokens after these can see of them."""
        with any_mode():
            if k.shape[1] == 1:
                for cache, slot in zip(self.caches, self.slots(at, count), strict=True):
                    cache.put(k, v, slot)
                return
            for samples, first, n in self._alike(at, count, k.shape[1]):
                none = k[samples, :0]
                self.continued(self._call(none, none, None, "auto"), first, samples).keep(
                    k[samples, :n], v[samples, :n]
                )

    def slots(self, at: Tensor, count: Tensor | None = None) -> list[Slot]:
        """Where the next token of each sample belongs, on each cache."""
        return [cache.slot(at, count) for cache in self.caches]

    def _next(self, q: Tensor, k: Tensor, v: Tensor, slots: list[Slot], scale: float | None, backend: Backend) -> Pair:
        """One token per sample, on the device: the host waits for nothing."""
        heads, parts = q.shape[2], []
        group = heads // self.kv_heads
        for cache, slot in zip(self.caches, slots, strict=True):
            first, last = cache.heads.start * group, cache.heads.stop * group
            with any_mode():
                cache.put(k, v, slot)
            out, lse = cache.seen(q[:, :, first:last], slot, scale, backend)
            if last - first < heads:
                sides = first, heads - last
                out, lse = F.pad(out, (0, 0, *sides)), F.pad(lse, sides, value=-torch.inf)
            parts.append((out, lse))
        outs, lses = parts[0] if len(parts) == 1 else (torch.cat(x, 1) for x in zip(*parts, strict=True))
        most = lses.amax(1, keepdim=True).clamp(min=torch.finfo(lses.dtype).min)  # some head may see nothing at all
        weights = (lses - most).exp()
        total = weights.sum(1, keepdim=True)
        weights /= total.clamp(min=1)
        return (weights.unsqueeze(3) * outs).sum(1, keepdim=True).to(q.dtype), most + total.log()

    def _alike(self, at: Tensor, count: Tensor | None, n: int) -> Iterator[tuple[slice, int, int]]:
        """Samples that are computed together, with the position and number of their tokens."""
        firsts: list[int] = at.tolist()
        counts: list[int] = [n] * len(firsts) if count is None else count.tolist()
        pairs = list(zip(firsts, counts, strict=True))
        if len(set(pairs)) == 1:
            if pairs[0][1]:  # a chunk may be padding alone
                yield slice(None), *pairs[0]
            return
        for sample, (first, number) in enumerate(pairs):
            if number:
                yield slice(sample, sample + 1), first, number

    def continued(self, call: Call, at: int, samples: slice = slice(None)) -> CausalParts:
        """Tokens after the first ``at``; what is kept of them is kept here. ``call``: of no tokens."""
        rows, none = dict(self._rows()), self.like.unsqueeze(1)
        kept = [rows.get(index, (none, none)) for index in range(len(self.branches))]
        return CausalParts(call, [(k[samples], v[samples]) for k, v in kept], at)

    def _call(self, q: Tensor, k: Tensor, scale: float | None, backend: Backend) -> Call:
        call = Call(self.pattern, True, DEFAULT_SCALE if scale is None else scale, backend=backend)
        return call.of(q[:, :0], k[:, :0], None, 0)


class CausalStream(Stream):
    """The work of a causal stream: every chunk is computed at once."""

    def held_bytes(self, num_tokens: int | None) -> int:
        call, tokens = self.call, self.longest if num_tokens is None else min(num_tokens, self.longest)
        rows = sum(len(branch.heads) * rows_of(branch, tokens) for branch in self.branches)
        return 2 * rows * call.samples * call.head_dim * call.dtype.itemsize

    @functools.cached_property
    def cache(self) -> KVCache:
        call = self.call
        like = torch.empty(call.samples, 0, call.kv_heads, call.head_dim, dtype=call.dtype, device=call.device)
        return KVCache(call.pattern, like, tokens=0)

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        for out, _ in self.cache.continued(self.call, self.position).seen(q, k, v):
            self.deliver(out)
        after = self.position + q.shape[1]
        self.cache.reserve(max(min(after % branch.length, after) for branch in self.branches))
        self.cache.continued(self.call, self.position).keep(k, v)
        self.position = after

    def end(self) -> None:
        """Nothing waits."""
