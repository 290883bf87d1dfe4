"""Blocks, and Dense: listed blocks of tokens, and all of them."""

from __future__ import annotations

import bisect
import functools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dilated_attention.branches.base import FOREVER, Branch, CacheRule, Rect, grouped, in_order, inside, moved
from dilated_attention.checks import check_int

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, repr=False)
class Blocks(Branch):
    """Shows the tokens of listed blocks to the tokens of others.

    Args:
        size: of a block, in tokens; the last one may be shorter.
        pairs: (query block, key block), which see each other; blocks beyond the sequence are left out.
        heads: the key/value heads that have the branch; None: all.

    Examples:
        >>> da.Pattern([da.Blocks(4, [(1, 0)])]).keys(query=5, head=0, num_tokens=8, num_heads=1)
        (0, 1, 2, 3)
    """

    kind: ClassVar[str] = "blocks"

    size: int
    pairs: Iterable[tuple[int, int]]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("size", self.size)
        listed = sorted({(int(query), int(key)) for query, key in self.pairs})
        if not listed or min(map(min, listed)) < 0:
            raise ValueError(f"pairs must be pairs of block numbers, from 0 on, got {listed[:3]}")
        object.__setattr__(self, "pairs", tuple(listed))

    @classmethod
    def random(cls, size: int, per_row: int, seed: int, *, num_tokens: int, is_causal: bool = False) -> Blocks:
        """Each query block sees its own block and ``per_row`` others, drawn at random; when causal, earlier ones."""
        return cls.bigbird(
            size, num_tokens=num_tokens, window=1, first=0, per_row=per_row, seed=seed, is_causal=is_causal
        )

    @classmethod
    def bigbird(
        cls, size: int, *, num_tokens: int, window: int = 3, first: int = 1, per_row: int = 3, seed: int = 0,
        is_causal: bool = False,
    ) -> Blocks:  # fmt: skip
        """BigBird's blocks: ``window`` around each block, the ``first`` blocks for all, and ``per_row`` at random."""
        count, side, draw, pairs = -(-num_tokens // size), window // 2, random.Random(seed), list[tuple[int, int]]()
        for row in range(count):
            around = range(max(0, row - side), min(count, row + side + 1))
            mine = {*around, *range(count if row < first else min(first, count))}
            others = [key for key in range(row if is_causal else count) if key not in mine]
            mine.update(draw.sample(others, min(per_row, len(others))))
            pairs += [(row, key) for key in mine if key <= row or not is_causal]
        return cls(size, pairs)

    def sees(self, head: int | Tensor, query: Tensor, key: Tensor) -> Tensor:
        listed = _listed(tuple(self.pairs), query.device)
        last = len(listed) - 1
        return listed[(query // self.size).clamp(max=last), (key // self.size).clamp(max=last)]

    @functools.cached_property
    def by_distance(self) -> list[tuple[int, list[int]]]:
        """How far keys are from queries, in blocks, and the blocks of these queries; both rise."""
        rows = grouped(self.pairs, lambda pair: pair[1] - pair[0])
        return [(distance, [row for row, _ in rows[distance]]) for distance in sorted(rows)]

    def rects(self, head: int, queries: range, n: int, is_causal: bool) -> Iterator[Rect]:
        """Blocks that are equally far from their keys are one rectangle, repeated."""
        return self._rects(queries, n, -FOREVER, 0 if is_causal else FOREVER)

    def near(self, rect: Rect, head: int, n: int) -> Iterator[Rect]:
        return self._rects(rect.span, n, rect.least, rect.most)

    def _rects(self, queries: range, n: int, low: int, high: int) -> Iterator[Rect]:
        size, lanes = self.size, self.by_distance
        near, far = (bisect.bisect(lanes, (limit // size + more,)) for limit, more in ((low, 0), (high, 2)))
        for distance, rows in lanes[near:far]:
            end = min(queries.stop, n - max(distance, 0) * size)
            borders = queries.start // size, -(-queries.start // size), end // size, -(-queries.stop // size)
            first, every, missing, none = (bisect.bisect_left(rows, row) for row in borders)
            singles = rows[first:every] + rows[max(every, missing) : none]
            for some in (*(range(row, row + 1) for row in singles), *in_order(rows[every:missing])):
                block = range(some.start * size, (some.start + 1) * size)
                keys = inside(moved(block, distance * size), 0, n)
                period = some.step * size if len(some) > 1 else 0
                rect = Rect(inside(block, queries.start, queries.stop), keys, repeats=len(some), period=period)
                yield rect.between(low, high)

    def kept(self, head: int) -> CacheRule:
        """All up to the last block that a later one sees."""
        last = max((key for query, key in self.pairs if key <= query), default=-1)
        ahead = max(0, *(key - query + 1 for query, key in self.pairs))
        return CacheRule(most=(last + 1) * self.size, asks=True, ahead=ahead * self.size)


@dataclass(frozen=True, repr=False)
class Dense(Branch):
    """Shows every token to every query.

    Args:
        heads: the key/value heads that have the branch; None: all.

    Examples:
        >>> da.Pattern([da.Dense()]).keys(query=2, head=0, num_tokens=8, num_heads=1, is_causal=True)
        (0, 1, 2)
    """

    kind: ClassVar[str] = "dense"
    needs_masks: ClassVar[bool] = False
    cuts: ClassVar[bool] = True

    def sees(self, head: int | Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= 0) & (key >= 0)

    def rects(self, head: int, queries: range, n: int, is_causal: bool) -> Iterator[Rect]:
        yield Rect(queries, range(n)).between(high=0 if is_causal else FOREVER)

    def kept(self, head: int) -> CacheRule:
        return CacheRule()

    def without(self, rect: Rect, head: int) -> list[Rect] | None:
        return []


@functools.lru_cache(maxsize=64)
def _listed(pairs: Pairs, device: torch.device) -> Tensor:
    """Which blocks see which; of those beyond the listed ones, for which the last row stands, none sees another."""
    with torch.inference_mode(False):
        count = max(map(max, pairs)) + 2
        listed = torch.zeros(count, count, dtype=torch.bool)
        listed[tuple(torch.tensor(pairs).T)] = True
        return listed.to(device)
