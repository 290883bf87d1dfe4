"""KVCache: a cache for causal decoding that keeps only the K and V rows that later tokens can see.

What that is, each branch says: w / r rows of a dilated one, a ring of the last rows of a window, the first of a prefix.
The next token of each sample is computed by itself, on the device and in fixed buffers, so that a CUDA graph can hold
the step. Several tokens see one another and what is kept: the same blocks as in a ring, where rows come from an earlier
rank.

Legend: q (B, n, H, D); k, v (B, n, Hk, D); lse (B, n, H); at (B,) the position of the first of the n tokens in its own
sequence; count (B,) how many of the n tokens are real, the first ones; kept rows (2, B, h, S, D), k and v of h heads.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dilated_attention import autograd
from dilated_attention.backends import run
from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.choose import Backend, choose
from dilated_attention.backends.problem import Inputs, Pair
from dilated_attention.backends.tensors import finished, no_autocast, readable, seems_finite, without_infinity
from dilated_attention.blocks import View
from dilated_attention.branches import Dense
from dilated_attention.branches.base import FOREVER
from dilated_attention.call import DEFAULT_SCALE, Call, Settings, accumulate_dtype, settings
from dilated_attention.checks import Ints
from dilated_attention.pattern import Pattern
from dilated_attention.plan import away
from dilated_attention.resolve import computed_dtype
from dilated_attention.streaming.slots import Slot, SlotTable, tables_of

DENSE = Pattern([Dense()])  # of all rows that are not hidden


@contextlib.contextmanager
def any_mode() -> Iterator[None]:
    """Whatever mode a chunk is taken in, nothing held is an inference tensor: the next may come in another mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class KVCache:
    """The rows of one attention layer, for samples that may be at different positions."""

    def __init__(self, pattern: Pattern, like: Tensor, tokens: int | None = None) -> None:
        """``like``: k or v of any tokens. ``tokens``: room for sequences so long, and no longer; None: for any."""
        samples, _, self.kv_heads, head_dim = like.shape
        self.pattern = pattern
        branches = pattern.branches_for(self.kv_heads)
        self.kept = [[branch.kept(head) for head in branch.members] for branch in branches if branch.members]
        every = list(itertools.chain(*self.kept))
        # longer sequences keep no more rows than those of so many tokens; all segments begin together every so many
        self.full = max(min(rule.period, rule.offset + rule.most * rule.step) for rule in every)
        self.period = math.lcm(*(rule.period for rule in every)) if all(rule.anew for rule in every) else FOREVER
        if tokens is None and self.full == FOREVER:
            raise ValueError(f"a cache of {pattern} grows with the sequence: say for how many tokens")
        with any_mode():
            self.like = like.new_empty(samples, 0, head_dim)
        self.tokens = self.full if tokens is None else min(tokens, self.full)

    def rows_for(self, tokens: int) -> int:
        """How many rows all heads have of sequences so long."""
        return sum(len(some) * max(rule.rows(tokens) for rule in some) for some in self.kept)

    @functools.cached_property
    def tables(self) -> tuple[SlotTable, ...]:
        return tables_of(self.pattern, self.kv_heads, self.tokens, self.like.device)

    @functools.cached_property
    @any_mode()
    def rows(self) -> list[Tensor]:
        """Of each table; there are none before the first is needed."""
        samples, _, dim = self.like.shape
        return [self.like.new_zeros(2, samples, len(x.heads), len(x.number), dim) for x in self.tables]

    def reserve(self, tokens: int) -> None:
        """Make room for sequences so long. Room is doubled, so that rows are seldom moved."""
        if min(tokens, self.full) <= self.tokens:
            return
        tables, old = (vars(self).pop(name, None) for name in ("tables", "rows"))
        self.tokens = min(max(tokens, 2 * self.tokens), self.full)
        with any_mode():
            for new, table, x, before in zip(self.tables, tables, self.rows, old, strict=True) if old else ():
                for some, kept in zip(torch.split(x, new.sizes, 3), torch.split(before, table.sizes, 3), strict=True):
                    some[:, :, :, : kept.shape[3]] = kept

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.rows)

    @any_mode()
    def select(self, samples: Tensor) -> None:
        """Go on with these samples, each as often as it is named."""
        self.rows = [x.index_select(1, samples) for x in self.rows]
        self.like = self.like[samples]

    def is_on_device(self, heads: int, backend: Backend) -> bool:
        """Whether the host has no part in a step, as a CUDA graph needs."""
        q = self.like.new_empty(1, 1, heads // self.kv_heads, self.like.shape[2])
        return all(choose(_call(q, x[0, :1, 0].unsqueeze(2), DEFAULT_SCALE, backend)).is_whole for x in self.rows)

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
        scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
        q, k, v = (x.to(computed_dtype(x)) for x in (q, k, v))
        if q.shape[1] == 1:
            return self._next(q, k, v, self.slots(at, count) if slots is None else slots, scale, backend)
        call = Call(self.pattern, True, scale, backend=backend)
        with any_mode():
            out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=accumulate_dtype(q.dtype))
            for samples, first, n in self._alike(at, count, q.shape[1]):
                border = min(n, -first % self.period)
                for begin, end in (0, border), (border, n):
                    if begin < end:
                        part = samples, slice(begin, end)
                        out[part], lse[part] = self.chunk(call, q[part], k[part], v[part], first + begin, samples)
        return out, lse

    @any_mode()
    def keep(self, k: Tensor, v: Tensor, at: Tensor, count: Tensor | None = None) -> None:
        """Keep what tokens after these can see of them."""
        for samples, first, n in self._alike(at, count, k.shape[1]):
            self.keep_chunk(k[samples, :n], v[samples, :n], first, samples)

    def slots(self, at: Tensor, count: Tensor | None = None) -> list[Slot]:
        return [table.slot(at, count) for table in self.tables]

    def _next(self, q: Tensor, k: Tensor, v: Tensor, slots: list[Slot], scale: float, backend: Backend) -> Pair:
        """One token per sample, on the device: the host waits for nothing."""
        samples, _, heads, dim = q.shape
        query, new = q.reshape(samples, self.kv_heads, -1, dim), torch.stack((k, v)).to(self.like.dtype)[:, :, 0]
        pairs = []
        for table, rows, (place, absent, hidden) in zip(self.tables, self.rows, slots, strict=True):
            every, some = rows.flatten(1, 3), new[:, :, table.pick, None]
            some = some.expand(-1, -1, -1, len(table.sizes), -1).flatten(1, 3)
            every.index_copy_(1, place, some if absent is None else torch.where(absent, every[:, place], some))
            pairs.append(_seen(query[:, table.pick].flatten(0, 1), rows.flatten(1, 2), hidden, scale, backend))
        out, lse = pairs[0]
        if len(self.tables[0].heads) < self.kv_heads:
            out = torch.zeros_like(query)
            lse = out.new_full(out.shape[:3], -torch.inf, dtype=accumulate_dtype(q.dtype))
            for table, pair in zip(self.tables, pairs, strict=True):
                out[:, table.pick], lse[:, table.pick] = (x.view(samples, -1, *x.shape[1:]) for x in pair)
        return out.view(q.shape), lse.view(samples, 1, heads)

    def _alike(self, at: Tensor, count: Tensor | None, n: int) -> Iterator[tuple[slice, int, int]]:
        """Samples that are computed together, with the position and number of their tokens."""
        firsts: list[int] = at.tolist()
        pairs = list(zip(firsts, [n] * len(firsts) if count is None else count.tolist(), strict=True))
        alike = [slice(None)] if len(set(pairs)) == 1 else [slice(i, i + 1) for i in range(len(pairs))]
        for samples, (first, number) in zip(alike, pairs, strict=False):
            if number:  # a chunk may be padding alone
                yield samples, first, number

    # --- several tokens, of samples at one position -------------------------------------------------------------

    def chunk(self, call: Call, q: Tensor, k: Tensor, v: Tensor, at: int, samples: slice = slice(None)) -> Pair:
        """(out, lse) of the tokens from ``at`` on, which continue a period up to its end at most, or begin one.

        Whole periods are one call, where they lie. k and v may go on after q.
        """
        stop, ends = at + q.shape[1], q.shape[1] == k.shape[1] and not (at and call.adds_zeros)
        if at % self.period == 0 and (ends or stop % self.period == 0):
            inputs = Inputs(q, k[:, : q.shape[1]], v[:, : q.shape[1]])
            return autograd.attend(inputs, call.of(*inputs[:2], None, 0))
        before = at % self.period
        if call.adds_zeros and at > before:  # a sequence is longer than its segments, and zero keys fill these up
            before += self.period
        call = call.of(q, k, None, 0)
        call = call._replace(start=before, key_start=before, total=before + k.shape[1], in_parts=True)
        with no_autocast(q.device):
            work = Work.of(call, Inputs(q, k, v), choose(call), keys_follow=True)
            out, lse = work.forward()
            for part in away(call, 0, before):
                kept = self._rows(part.rows, part.blocks[0].branch, samples)
                work.merge_away(part, (readable(x, call, work.limits) for x in kept), out, lse)
        return finished(out, call, q.dtype), lse

    def _rows(self, view: View, branch: int, samples: slice) -> Tensor:
        """The kept rows of a view of all earlier tokens, (2, b, L, h, D)."""
        parts, order = [], list[int]()
        for table, x in zip(self.tables, self.rows, strict=True):
            mine = [i for i, head in enumerate(view.numbers) if head in table.heads]
            if mine:
                place, slot = table.slots_of(view, branch, mine)
                some = x[:, samples][:, view.sample : view.sample + view.samples, place, slot]
                some = some if some.dim() == 6 else some.unsqueeze(3)
                parts.append(some.permute(0, 1, 3, 4, 2, 5).flatten(1, 2))
                order += mine
        return parts[0] if len(parts) == 1 else torch.cat(parts, 3)[:, :, :, torch.tensor(order).argsort()]

    def keep_chunk(self, k: Tensor, v: Tensor, at: int, samples: slice = slice(None)) -> None:
        """Keep what later tokens see of these."""
        after = at + k.shape[1]
        if after % self.period == 0:
            return
        for table, rows in zip(self.tables, self.rows, strict=True):
            place, slot, token = table.written(at, after)
            for x, given in zip(rows[:, samples], (k, v), strict=True):
                x[:, place, slot] = given[:, token, table.head[place]].to(x.dtype)


def _call(q: Tensor, k: Tensor, scale: float, backend: Backend) -> Call:
    """Of one query of each sample, (b, 1, g, D), over kept rows, (b, S, 1, D), of which some are hidden."""
    return _made(q.shape, k.shape, q.dtype, q.device, scale, backend, settings(q.dtype, q.device))


@functools.lru_cache(maxsize=256)
def _made(
    q: Ints, k: Ints, dtype: torch.dtype, device: torch.device, scale: float, backend: Backend, now: Settings
) -> Call:
    """Made once for the layers and steps that are alike: of a short step, it would take a large part."""
    return Call(DENSE, scale=scale, backend=backend).with_shapes(q, k, dtype, device, True, k[1] - 1)


def _seen(q: Tensor, kv: Tensor, hidden: Tensor, scale: float, backend: Backend) -> Pair:
    """(out, lse) of one query of each head, (m, g, D), over kept rows, (2, m, S, D), but those hidden from it, (m, S).

    Each head of each sample is a sample here, with a mask of its own.
    """
    if q.device.type != "cpu" or backend not in ("auto", "eager"):
        query, (keys, values) = q.unsqueeze(1), kv.unsqueeze(3)
        call = _call(query, keys, scale, backend)
        if backend == "sdpa" or choose(call).is_whole:
            out, lse = run.forward(call, Inputs(query, keys, values, hidden))
            return out.view(q.shape), lse.view(q.shape[:2])
    exact = accumulate_dtype(q.dtype)
    with no_autocast(q.device):
        keys, values = (x.to(q.dtype).to(exact) for x in kv)  # as autocast rounds them
        scores = torch.bmm(without_infinity(q).to(exact), keys.mT).mul_(scale)
        scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse.unsqueeze(2).clamp(min=torch.finfo(exact).min)).exp_()
        out = torch.bmm(weights, values)
        if not seems_finite(out):  # 0 * NaN of a row that is hidden
            out = torch.bmm(weights, values.masked_fill(hidden.unsqueeze(2), 0.0))
    return out.to(q.dtype), lse
