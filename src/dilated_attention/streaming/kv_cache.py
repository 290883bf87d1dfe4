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
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dilated_attention import blocks
from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.choose import Backend, choose
from dilated_attention.backends.problem import Inputs
from dilated_attention.backends.tensors import finished, no_autocast, readable, seems_finite, without_infinity
from dilated_attention.blocks import View
from dilated_attention.branches.base import FOREVER
from dilated_attention.call import DEFAULT_SCALE, Call, accumulate_dtype
from dilated_attention.functional import attend
from dilated_attention.merge import merge_
from dilated_attention.pattern import DilatedPattern, Pattern
from dilated_attention.resolve import Options, computed_dtype
from dilated_attention.streaming.slots import Slot, period_of, tables_of, tokens_until_full

Pair = tuple[Tensor, Tensor]  # out and lse
DENSE = DilatedPattern.longnet([2**48], [1])  # of all rows that are not hidden


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
        self.pattern, self.full = pattern, tokens_until_full(pattern, self.kv_heads)
        if tokens is None and self.full == FOREVER:
            raise ValueError(f"a cache of {pattern} grows with the sequence: say for how many tokens")
        self.tokens = self.full if tokens is None else min(tokens, self.full)
        self.period = period_of(pattern, self.kv_heads)
        self.tables = tables_of(pattern, self.kv_heads, self.tokens, like.device)
        with any_mode():
            self.like = like.new_empty(samples, 0, head_dim)

    @functools.cached_property
    def rows(self) -> list[Tensor]:
        """Of each table; there are none before the first is needed."""
        samples, _, dim = self.like.shape
        with any_mode():
            return [self.like.new_zeros(2, samples, len(x.heads), x.borders[-1], dim) for x in self.tables]

    def reserve(self, tokens: int) -> None:
        """Make room for sequences so long. Room is doubled, so that rows are seldom moved."""
        if min(tokens, self.full) <= self.tokens:
            return
        tables, old = self.tables, vars(self).pop("rows", None)
        self.tokens = min(max(tokens, 2 * self.tokens), self.full)
        self.tables = tables_of(self.pattern, self.kv_heads, self.tokens, self.like.device)
        with any_mode():
            for new, table, x, before in zip(self.tables, tables, self.rows, old, strict=True) if old else ():
                for at, begin, end in zip(new.borders, table.borders, table.borders[1:], strict=False):
                    x[:, :, :, at : at + end - begin] = before[:, :, :, begin:end]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.rows)

    def select(self, samples: Tensor) -> None:
        """Go on with these samples, each as often as it is named."""
        with any_mode():
            self.rows = [x.index_select(1, samples) for x in self.rows]
            self.like = self.like[samples]

    def is_on_device(self, heads: int, backend: Backend) -> bool:
        """Whether the host has no part in a step, as a CUDA graph needs."""
        q = self.like.new_empty(1, 1, heads // self.kv_heads, self.like.shape[2])
        return all(_takes_rows(q, x[0, :1, 0].unsqueeze(2), backend) for x in self.rows)

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
        """Where the next token of each sample belongs, and what it sees, by each table."""
        return [table.slot(at, count) for table in self.tables]

    def _next(self, q: Tensor, k: Tensor, v: Tensor, slots: list[Slot], scale: float | None, backend: Backend) -> Pair:
        """One token per sample, on the device: the host waits for nothing."""
        samples, _, heads, dim = q.shape
        query, new = q.view(samples, self.kv_heads, -1, dim), torch.stack((k, v)).to(self.like.dtype)[:, :, 0]
        parts = []
        for table, rows, (index, absent, hidden) in zip(self.tables, self.rows, slots, strict=True):
            with any_mode():
                place = slice(None), *index
                rows[place] = torch.where(absent, rows[place], new[:, :, table.pick, None])
            parts.append((table, *_seen(query[:, table.pick], rows, hidden, scale, backend)))
        if len(parts) == 1 and len(self.tables[0].heads) == self.kv_heads:
            _, out, lse = parts[0]
        else:
            out = torch.zeros_like(query)
            lse = out.new_full(out.shape[:3], -torch.inf, dtype=accumulate_dtype(q.dtype))
            for table, part, part_lse in parts:
                out[:, table.pick], lse[:, table.pick] = part, part_lse
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
            for rows, some in blocks.away(call, 0, before):
                kept = self._rows(rows, some[0].branch, samples)
                sources = Inputs(work.q, *(readable(x, call, work.limits) for x in kept))
                for block, part in work.each(some, sources):
                    merge_(*(block.queries.of(x, call.q_per_kv) for x in (out, lse)), *part)
        return finished(out, call, q.dtype), lse

    def _rows(self, view: View, branch: int, samples: slice) -> Tensor:
        """The kept rows of a view of all earlier tokens, (2, b, L, h, D)."""
        parts, order = [], list[int]()
        for table, x in zip(self.tables, self.rows, strict=True):
            mine = [i for i in range(view.heads) if view.head + i * view.head_step in table.heads]
            if mine:
                place, slot = table.slots_of(view, branch, mine)
                some = x[:, samples][:, view.sample : view.sample + view.samples, place, slot]
                parts.append(some.permute(0, 1, 3, 4, 2, 5).flatten(1, 2))
                order += mine
        return parts[0] if len(parts) == 1 else torch.cat(parts, 3)[:, :, :, torch.tensor(order).argsort()]

    def keep_chunk(self, k: Tensor, v: Tensor, at: int, samples: slice = slice(None)) -> None:
        """Keep what later tokens see of these."""
        after = at + k.shape[1]
        if after % self.period == 0:
            return
        for table, rows in zip(self.tables, self.rows, strict=True):
            for x, given in zip(rows[:, samples], (k[:, :, table.pick], v[:, :, table.pick]), strict=True):
                for heads, slots, tokens in table.written(at, after):
                    x[:, heads, slots] = given[:, tokens, heads].transpose(1, 2)


def _takes_rows(query: Tensor, rows: Tensor, backend: Backend) -> bool:
    """Whether our kernel takes queries (b, 1, g, D) with rows (b, S, 1, D); an error if a named backend does not."""
    return choose(Call(DENSE, backend=backend).of(query, rows, rows, rows.shape[1] - 1)).is_whole


def _seen(q: Tensor, kv: Tensor, hidden: Tensor, scale: float | None, backend: Backend) -> Pair:
    """(out, lse) of one query of each sample, (B, h, g, D), over kept rows but those that are hidden from it."""
    query, hidden = q.reshape(-1, 1, *q.shape[2:]), hidden.expand(*q.shape[:2], -1)
    keys, values = (x.flatten(0, 1).unsqueeze(2) for x in kv)  # each head is a sample, with a mask of its own
    if backend in ("triton", "sdpa") or (q.is_cuda and _takes_rows(query, keys, backend)):
        inputs = Inputs(query, keys, values, hidden.flatten(0, 1))
        out, lse = attend(inputs, Options(DENSE, scale=scale, enable_gqa=True, backend=backend), warns=False)
        return out.view(q.shape), lse.view(q.shape[:3])
    exact = accumulate_dtype(q.dtype)
    with no_autocast(q.device):
        keys, values = (x.to(q.dtype).to(exact) for x in kv)  # as autocast rounds them
        scores = without_infinity(q).to(exact) @ keys.mT
        scores.mul_(1 / math.sqrt(q.shape[3]) if scale is None else scale)
        scores.masked_fill_(hidden.unsqueeze(2), -torch.inf)
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse.unsqueeze(3).clamp(min=torch.finfo(exact).min)).exp_()
        out = weights @ values
        if not seems_finite(out):  # 0 * NaN of a row that is hidden
            out = weights @ values.masked_fill(hidden.unsqueeze(3), 0.0)
    return out.to(q.dtype), lse
