"""Blocks, and Dense: listed blocks of tokens, and all of them."""

from __future__ import annotations

import bisect
import functools
import operator
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dilated_attention.branches.base import FOREVER, Branch, CacheRule, Rect, grouped, in_order, inside, moved
from dilated_attention.checks import MAX_NUMBER, check_int

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
        self.checked("size")
        try:
            listed = sorted({(operator.index(query), operator.index(key)) for query, key in self.pairs})
        except (TypeError, ValueError):
            listed = []
        if not listed or min(map(min, listed)) < 0 or max(map(max, listed)) > MAX_NUMBER:
            raise ValueError(f"pairs must be pairs of block numbers, from 0 to 2**48, got {str(self.pairs)[:60]}")
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
        check_int("size", size)
        check_int("num_tokens", num_tokens)
        for name, number in (("window", window), ("first", first), ("per_row", per_row)):
            check_int(name, number, least=0)
        count, side, draw, pairs = -(-num_tokens // size), window // 2, random.Random(seed), list[tuple[int, int]]()
        for row in range(count):
            around = range(max(0, row - side), min(count, row + side + 1))
            mine = {*around, *range(count if row < first else min(first, count))}
            others = [key for key in range(row if is_causal else count) if key not in mine]
            mine.update(draw.sample(others, min(per_row, len(others))))
            pairs += [(row, key) for key in mine if key <= row or not is_causal]
        return cls(size, pairs)

    def sees(self, head: int | Tensor, query: Tensor, key: Tensor) -> Tensor:
        borders, listed = _listed(tuple(self.pairs), query.device)
        return listed[_stretches((query // self.size, key // self.size), borders)]

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
        most, ahead = (min(blocks * self.size, FOREVER) for blocks in (last + 1, ahead))
        return CacheRule(most=most, asks=True, ahead=ahead)


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
def _listed(pairs: Pairs, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
    """Which blocks see which, by stretches of blocks: where those of queries and of keys begin, and which are listed.
    Far blocks take no memory."""
    with torch.inference_mode(False):
        sides = torch.tensor(pairs).T.contiguous()
        borders = tuple(torch.unique(torch.cat((side, side + 1))) for side in sides)
        listed = torch.zeros([len(x) + 1 for x in borders], dtype=torch.bool)
        listed[_stretches(sides, borders)] = True
        return tuple(x.to(device) for x in borders), listed.to(device)


def _stretches(sides: Iterable[Tensor], borders: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.bucketize(side, border, right=True) for side, border in zip(sides, borders, strict=True))
