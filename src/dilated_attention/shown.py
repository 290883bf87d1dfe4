"""Which branches each head has, and what they show, counted. Pure integers; nothing here touches a device.

Legend: N tokens; H query heads; Hk key/value heads, which rules count; the H // Hk query heads of each see the same.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Literal

import torch

from dilated_attention.branches import Branch, Dilated
from dilated_attention.branches.base import grouped
from dilated_attention.branches.overlap import Remainder, count_left, cut
from dilated_attention.checks import MAX_NUMBER, Ints, check_int

Counts = Literal["once", "sum"]


class Shown:
    """What `Pattern` says of its branches."""

    __slots__ = ("counts", "listed")

    listed: tuple[Branch, ...]
    counts: Counts

    def branches_for(self, num_heads: int) -> tuple[Branch, ...]:
        """The branches with their heads, of this many. Internal."""
        return resolved(self, num_heads)

    def _resolved(self, num_heads: int) -> Iterator[Branch]:
        every = tuple(range(num_heads))
        for branch in self.listed:
            if branch.heads is None:
                branch = copy.copy(branch)  # not checked again: a list of blocks may be long
                object.__setattr__(branch, "heads", every)
            yield branch

    def order(self, drops: bool) -> list[int]:
        """In which branches are computed: those that are summed the densest first. Where a key counts once, it is the
        first branch's: as listed if dropout ``drops``, else as pairs are cut best. Internal."""
        if self.counts == "once":
            return sorted(range(len(self.listed)), key=lambda index: not (drops or self.listed[index].cuts))
        rates = [branch.rate if isinstance(branch, Dilated) else MAX_NUMBER for branch in self.branches_for(1)]
        return sorted(range(len(rates)), key=rates.__getitem__)

    def check_heads(self, num_heads: int, num_kv_heads: int | None = None) -> int:
        """Raise if these head counts do not fit the pattern; return the number of query heads per key/value head."""
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(
                f"{num_heads} query heads cannot be shared evenly by {kv_heads} key/value heads: "
                "make the first a positive multiple of the second"
            )
        self._check_kv_heads(kv_heads)
        return num_heads // kv_heads

    def _check_kv_heads(self, kv_heads: int) -> None:
        for branch in self.listed:
            if branch.members and branch.members[-1] >= kv_heads:
                raise ValueError(f"{branch} is for key/value head {branch.members[-1]}, and there are {kv_heads}")

    def parts(
        self, branch: int, head: int, queries: range, n: int, kv_heads: int, is_causal: bool, drops: bool = False
    ) -> Iterator[Remainder]:
        """The pairs of a branch that count, of a key/value head and some queries of a sequence. What earlier branches
        show is cut away where that leaves rectangles; else they come with the rectangle, to be left out. Internal."""
        branches, order = self.branches_for(kv_heads), self.order(drops) if self.counts == "once" else [branch]
        earlier = [branches[index] for index in order[: order.index(branch)] if head in branches[index].members]
        for rect in branches[branch].rects(head, queries, n, is_causal):
            yield from cut(rect, earlier, head)

    def keys(
        self, query: int, head: int, *, num_tokens: int, num_heads: int, num_kv_heads: int | None = None,
        is_causal: bool = False,
    ) -> Ints:  # fmt: skip
        """The tokens that ``query`` sees in (query) head ``head``, sorted. One that counts m times appears m times;
        zero keys of torchscale are not tokens: :meth:`DilatedPattern.zero_keys` counts them."""
        tokens = sorted(itertools.chain(*self._row(query, head, num_tokens, num_heads, num_kv_heads, is_causal)))
        return tuple(dict.fromkeys(tokens) if self.counts == "once" else tokens)

    def _row(
        self, query: int, head: int, num_tokens: int, num_heads: int, num_kv_heads: int | None, is_causal: bool
    ) -> list[list[int]]:
        """The tokens that each branch shows to a query."""
        for name, x in (("query", query), ("head", head), ("num_tokens", num_tokens), ("num_heads", num_heads)):
            check_int(name, x, least=-MAX_NUMBER)
        group = self.check_heads(num_heads, num_kv_heads)
        if not 0 <= query < num_tokens or not 0 <= head < num_heads:
            raise ValueError(
                f"there is no row (query {query}, head {head}) among {num_tokens} tokens and {num_heads} heads: count "
                "from 0"
            )
        row: list[list[int]] = []
        for branch in self.branches_for(num_heads // group):
            shown = branch.rects(head // group, range(query, query + 1), num_tokens, is_causal)
            rects = [rect for rect in shown if head // group in branch.members and not rect.is_empty]
            row.append([token for rect in rects for token in rect.keys])
        return row

    def pairs(
        self, num_tokens: int, num_heads: int, *, num_kv_heads: int | None = None, is_causal: bool = False
    ) -> int:
        """How many (query, key) pairs one sample has, over all heads. Zero keys are not counted, repeated keys are."""
        num_tokens, num_heads = check_int("num_tokens", num_tokens, least=0), check_int("num_heads", num_heads)
        group = self.check_heads(num_heads, num_kv_heads)
        kv_heads = num_heads // group
        given = range(num_tokens), num_tokens, kv_heads, is_causal
        return group * sum(counted(self, index, *given) for index in range(len(self.branches_for(kv_heads))))

    def looks(self, head: int, kv_heads: int) -> Ints:
        """Heads that agree in this see the same: the offset in each branch, -1 where they do not have it."""
        return _looks(self.branches_for(kv_heads), head)

    def flops(
        self, num_tokens: int, num_heads: int, head_dim: int, *, num_kv_heads: int | None = None,
        is_causal: bool = False, backward: bool = False,
    ) -> int:  # fmt: skip
        """Operations of one sample: 4 * head_dim per pair; with ``backward`` 14, for both passes together.

        Examples:
            >>> da.DilatedPattern.longnet([4], [1]).flops(num_tokens=8, num_heads=2, head_dim=64)  # 64 pairs
            16384
        """
        pairs = self.pairs(num_tokens, num_heads, num_kv_heads=num_kv_heads, is_causal=is_causal)
        return pairs * check_int("head_dim", head_dim) * (14 if backward else 4)

    def saved_bytes(
        self, num_tokens: int, num_heads: int, head_dim: int, *, num_kv_heads: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> int:  # fmt: skip
        """The bytes that one sample keeps for the backward pass: q, k, v, out and lse, whatever the branches.

        Examples:
            >>> da.DilatedPattern.longnet([4], [1]).saved_bytes(num_tokens=8, num_heads=2, head_dim=64)
            8256
        """
        kv_heads = check_int("num_heads", num_heads) // self.check_heads(num_heads, num_kv_heads)
        lse_bytes = 8 if dtype is torch.float64 else 4
        row_bytes = check_int("head_dim", head_dim) * dtype.itemsize
        per_token = (2 * num_heads + 2 * kv_heads) * row_bytes + num_heads * lse_bytes
        return check_int("num_tokens", num_tokens, least=0) * per_token

    def coverage(
        self, num_tokens: int, num_heads: int, *, num_kv_heads: int | None = None, is_causal: bool = False
    ) -> torch.Tensor:
        """(N, H) bool: True where some branch shows the row a key; the others get output 0 and lse -inf.

        Examples:
            >>> da.DilatedPattern.head_groups([4], [2]).coverage(num_tokens=4, num_heads=1).flatten().tolist()
            [True, False, True, False]
        """
        group = self.check_heads(num_heads, num_kv_heads)
        kv_heads, queries = num_heads // group, range(check_int("num_tokens", num_tokens, least=0))
        looks = [self.looks(head, kv_heads) for head in range(kv_heads)]
        covered = {x: self.covered(looks.index(x), queries, num_tokens, kv_heads, is_causal) for x in set(looks)}
        return torch.stack([covered[x] for x in looks], 1).repeat_interleave(group, dim=1)

    def covered(self, head: int, queries: range, n: int, kv_heads: int, is_causal: bool) -> torch.Tensor:
        """Which of the queries, a sequence's first ones, see a key in a key/value head. Internal."""
        covered = torch.zeros(len(queries), dtype=torch.bool)
        for branch in self.branches_for(kv_heads):
            for rect in branch.rects(head, queries, n, is_causal) if head in branch.members else ():
                if not rect.is_empty:
                    rows = rect.queries
                    covered.as_strided((rect.repeats, len(rows)), (rect.period, rows.step), rows.start).fill_(True)
        return covered


@functools.lru_cache(maxsize=256)
def resolved(pattern: Shown, num_heads: int) -> tuple[Branch, ...]:
    return tuple(pattern._resolved(num_heads))


def _looks(branches: Iterable[Branch], head: int) -> Ints:
    return tuple(x.offset_of(head) if head in x.members else -1 for x in branches)


@functools.lru_cache(maxsize=1 << 12)
def counted(pattern: Shown, index: int, queries: range, n: int, kv_heads: int, is_causal: bool) -> int:
    """How many pairs of a branch count, over all key/value heads."""
    branches, total, steps = pattern.branches_for(kv_heads), 0, itertools.count()
    order = [index]
    if pattern.counts == "once":  # those that differ from head to head last: the others are counted for all heads
        order = sorted(pattern.order(False), key=lambda i: len({*map(branches[i].offset_of, branches[i].members)}) > 1)
    known = [branches[i] for i in order[: order.index(index) + 1]]
    for heads in grouped(branches[index].members, lambda head: _looks(known, head)).values():
        others = [other for other in known[:-1] if heads[0] in other.members]
        rects = branches[index].rects(heads[0], queries, n, is_causal)
        total += len(heads) * sum(count_left(rect, others, heads[0], n, steps) for rect in rects)
    return total


def moved_to(branch: Branch, others: Iterable[Branch], queries: range, n: int) -> tuple[int, int]:
    """How many tokens earlier queries have the same parts, 0 if none do, and in a sequence of how many tokens."""
    reach = branch.reach(queries)
    if reach is None or reach.stop > n:
        return 0, n
    firsts, periods = zip(*(each.repeats() for each in (branch, *others)), strict=True)
    period = math.lcm(*periods)
    shift = max(0, reach.start - max(firsts)) // period * period if period else 0
    return shift, reach.stop - shift
