"""KVCache: a cache for causal decoding that keeps only the K and V rows that later tokens can see.

Of a branch (w, r) only the open segment matters, and of that every r-th token: w / r rows per key/value head, however
long the sequence is. The next token of each sample is computed by itself, on the device and in fixed buffers, so that a
CUDA graph can hold the step. Several tokens see one another and what is kept: the same blocks as in a ring, where rows
come from an earlier rank. Row i of a head is the i-th token of its offset in the open segment.

Legend: q (B, n, H, D); k, v (B, n, Hk, D); lse (B, n, H); at (B,) the position of the first of the n tokens in its own
sequence; count (B,) how many of the n tokens are real, the first ones; a cache (2, B, b, rows, h, D), k and v of b
branches.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.choose import Backend, choose
from dilated_attention.backends.problem import Inputs
from dilated_attention.backends.tensors import finished, no_autocast, readable
from dilated_attention.blocks import Block, Placed, View, head_runs
from dilated_attention.branches import Dilated
from dilated_attention.call import DEFAULT_SCALE, ON_DEVICE, Call, accumulate_dtype
from dilated_attention.functional import attend
from dilated_attention.merge import merge_
from dilated_attention.pattern import DilatedPattern, rows_at_offset
from dilated_attention.resolve import Options, computed_dtype

Pair = tuple[Tensor, Tensor]  # k and v, or out and lse


@contextlib.contextmanager
def any_mode() -> Iterator[None]:
    """Whatever mode a chunk is taken in, nothing held is an inference tensor: the next may come in another mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Slot(NamedTuple):
    """Where the next token of each sample belongs on a cache."""

    sample: Tensor  # (B, 1), to index with
    row: Tensor  # (B, b)
    absent: Tensor  # (B, b, h, 1), which heads do not take part with it


class BranchCache:
    """The rows of branches that have equally many rows and the same heads: they are attended in one call."""

    def __init__(self, branches: list[Dilated], rows: int, like: Tensor) -> None:
        """``like``: has the samples, head dim, dtype and device of the rows."""
        tensor, heads = functools.partial(torch.tensor, device=like.device), branches[0].members
        self.branches, self.heads = branches, slice(heads[0], heads[-1] + 1)
        self.lengths = tensor([branch.length for branch in branches])
        self.rates = tensor([branch.rate for branch in branches])
        self.offsets = tensor([[branch.offset_of(head) for head in heads] for branch in branches])
        self.numbers = torch.arange(len(branches), device=like.device)
        self.kv = like.new_zeros(2, like.shape[0], len(branches), rows, len(heads), like.shape[-1])
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
        """(out, lse) of what one query per sample sees in each branch, itself among it, (B, b, query heads, ...)."""
        samples, branches = slot.row.shape
        # Each branch is one more sample, and its query is at the token's row. Where a head does not take part, that row
        # may be an old one, and what came of it is put away, NaN included.
        queries = q.unsqueeze(1).expand(-1, branches, -1, -1, -1).flatten(0, 1)
        keys, values = (x.flatten(0, 1) for x in self.kv)
        inputs = Inputs(queries, keys, values, positions=slot.row.flatten())
        out, lse = attend(inputs, Options(self.dense, True, scale, enable_gqa=True, backend=backend), warns=False)
        shape = samples, branches, slot.absent.shape[2], -1
        lse = lse.view(shape).masked_fill(slot.absent, -torch.inf)
        return out.view(shape).masked_fill(slot.absent, 0.0).view(samples, branches, *q.shape[2:]), lse.flatten(2)


class KVCache:
    """The rows of one attention layer, for samples that may be at different positions."""

    def __init__(self, pattern: DilatedPattern, like: Tensor, tokens: int | None = None) -> None:
        """``like``: k or v of any tokens. ``tokens``: room for sequences so long, and no longer; None: for any."""
        samples, _, self.kv_heads, head_dim = like.shape
        self.pattern, self.tokens = pattern, tokens
        self.branches = pattern.branches_for(self.kv_heads)
        self.period = math.lcm(*pattern.segment_lengths)  # all segments begin together every so many tokens
        with any_mode():
            self.like = like.new_empty(samples, 0, head_dim)

    @functools.cached_property
    def caches(self) -> list[BranchCache]:
        """All rows; there are none before the first is needed."""
        alike: dict[tuple[int, tuple[int, ...]], list[Dilated]] = {}
        for branch in self.branches:
            rows = rows_of(branch, branch.length if self.tokens is None else self.tokens)
            alike.setdefault((rows, branch.members), []).append(branch)
        with any_mode():
            return [BranchCache(branches, rows, self.like) for (rows, _), branches in alike.items()]

    def reserve(self, tokens: int) -> None:
        """Make room for sequences so long. Room is doubled, so that rows are seldom moved."""
        if self.tokens is None or tokens <= self.tokens:
            return
        room, old = max(tokens, 2 * self.tokens), {}
        if "caches" in vars(self):
            old = dict(self._rows())
            del self.caches
        self.tokens = None if room >= max(self.pattern.segment_lengths) else room
        with any_mode():
            for branch, pair in self._rows() if old else ():
                for x, before in zip(pair, old[branch], strict=True):
                    x[:, : before.shape[1]] = before

    def _rows(self, samples: slice = slice(None)) -> Iterator[tuple[Dilated, Pair]]:
        """Each branch with its k and v, (B, rows, h, D)."""
        for cache in self.caches:
            k, v = cache.kv[:, samples]
            for i, branch in enumerate(cache.branches):
                yield branch, (k[:, i], v[:, i])

    @property
    def nbytes(self) -> int:
        return sum(cache.kv.nbytes for cache in self.caches)

    def select(self, samples: Tensor) -> None:
        """Go on with these samples, each as often as it is named."""
        with any_mode():
            for cache in self.caches:
                cache.kv = cache.kv.index_select(1, samples)
            self.like = self.like[samples]

    def is_on_device(self, heads: int, backend: Backend) -> bool:
        """Whether the host has no part in a step, as a CUDA graph needs; some backends read positions there."""
        for cache in self.caches:
            k = cache.kv[0].flatten(0, 1)
            q = k.new_empty(len(k), 1, k.shape[2] * heads // self.kv_heads, k.shape[3])
            if not choose(Call(cache.dense, True, backend=backend).of(q, k, None, ON_DEVICE)).is_whole:
                return False
        return True

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, at: Tensor, count: Tensor | None = None, *, scale: float | None = None,
        backend: Backend = "auto", slots: list[Slot] | None = None,
    ) -> Pair:  # fmt: skip
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
                chunk = self.chunk(q[samples, :n], k[samples, :n], v[samples, :n], first, scale, backend, samples)
                outs, lses = zip(*chunk, strict=True)
                out[samples, :n], lse[samples, :n] = torch.cat(outs, 1), torch.cat(lses, 1)
        return out, lse

    def keep(self, k: Tensor, v: Tensor, at: Tensor, count: Tensor | None = None) -> None:
        """Keep what tokens after these can see of them."""
        with any_mode():
            for samples, first, n in self._alike(at, count, k.shape[1]):
                self.keep_chunk(k[samples, :n], v[samples, :n], first, samples)

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
        pairs = list(zip(firsts, [n] * len(firsts) if count is None else count.tolist(), strict=True))
        alike = [slice(None)] if len(set(pairs)) == 1 else [slice(i, i + 1) for i in range(len(pairs))]
        for samples, (first, number) in zip(alike, pairs, strict=False):
            if number:  # a chunk may be padding alone
                yield samples, first, number

    # --- several tokens, of samples at one position -------------------------------------------------------------

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, at: int, scale: float | None, backend: Backend,
        samples: slice = slice(None),
    ) -> Iterator[Pair]:  # fmt: skip
        """(out, lse) of the next tokens: to the end of the period that they continue, and those that begin one, where
        they lie."""
        first = min(q.shape[1], -at % self.period)
        if first:
            call = Call(self.pattern, True, DEFAULT_SCALE if scale is None else scale, backend=backend, in_parts=True)
            yield self._continued(call, q[:, :first], k[:, :first], v[:, :first], at, samples)
        if first < q.shape[1]:
            inputs, options = Inputs(q[:, first:], k[:, first:], v[:, first:]), Options(self.pattern, True, scale)
            yield attend(inputs, options._replace(enable_gqa=True, backend=backend), warns=False)

    def _continued(self, call: Call, q: Tensor, k: Tensor, v: Tensor, at: int, samples: slice) -> Pair:
        """(out, lse) of tokens in the midst of segments: what they see of one another, then what is kept."""
        before = at % self.period
        call = call.of(q, k, None, 0)._replace(start=before, key_start=before, total=before + q.shape[1])
        with no_autocast(q.device):
            work = Work.of(call, Inputs(q, k, v), choose(call), keys_follow=True)
            out, lse = work.forward()
            for branch, kept in self._rows(samples):
                seen = at % branch.length
                rows = (x[:, : rows_of(branch, seen)] for x in kept)
                sources = Inputs(work.q, *(readable(x, call, work.limits) for x in rows))
                blocks = [block for block in in_segment(branch, seen, q, call.q_per_kv) if block.keys.rows]
                for block, part in work.each(blocks, sources):
                    merge_(*(block.queries.of(x, call.q_per_kv) for x in (out, lse)), *part)
        return finished(out, call, q.dtype), lse

    def keep_chunk(self, k: Tensor, v: Tensor, at: int, samples: slice = slice(None)) -> None:
        """Keep what later tokens see of these: of each branch, those of the segment that is then open."""
        after = at + k.shape[1]
        for branch, kept in self._rows(samples) if after % self.period else ():
            seen = after % branch.length
            new = min(seen, k.shape[1])  # if that is all that was seen, the segment before is written over
            some = [x[:, x.shape[1] - new :] for x in (k, v)]
            for block in in_segment(branch, seen - new, some[0], 1):
                view, already, first = block.queries, block.keys.rows, block.keys.head
                heads = slice(first, first + view.heads * view.head_step, view.head_step)
                for rows, x in zip(kept, some, strict=True):
                    rows[:, already : already + view.rows, heads] = view.of(x)


def in_segment(branch: Dilated, before: int, x: Tensor, q_per_kv: int) -> Iterator[Block]:
    """The rows of x in a segment, after its first ``before`` tokens, as queries, with the rows before them as keys."""
    stop = min(before + x.shape[1], branch.length)
    placed: list[Placed] = []
    counts = {}
    for head in branch.members:
        offset = branch.offset_of(head)
        earlier, upto = (rows_at_offset(token, branch.rate, offset) for token in (before, stop))
        if upto > earlier:
            placed.append((head, offset + branch.rate * earlier - before))
            counts[head] = earlier, upto - earlier
    for run in head_runs(placed, counts.__getitem__, q_per_kv):
        (head, at), (head_step, step), (earlier, rows) = run.first, run.steps, counts[run.first[0]]
        heads, samples = (run.heads, head_step), x.shape[0]
        queries = View(0, samples, at, 1, stop - before, rows, branch.rate, head, *heads, step)
        keys = View(0, samples, 0, 1, earlier, earlier, 1, head - branch.members[0], *heads, 0)
        starts = tuple(before + at + i * step for i in range(run.heads))
        yield Block(0, branch.rate, branch.rate, queries, keys, None, None, starts, starts, 0)


def rows_of(branch: Dilated, tokens: int) -> int:
    """The rows that a head has of the first tokens of a segment, at most."""
    return -(-min(tokens, branch.length) // branch.rate)
