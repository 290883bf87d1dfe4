"""Strided: far tokens, seen sparsely by every query."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dilated_attention.branches.base import FOREVER, Branch, CacheRule, Rect, segments


@dataclass(frozen=True, repr=False)
class Strided(Branch):
    """Shows every ``rate``-th token to every query: keys alone are dilated.

    Args:
        rate: how far from one key to the next.
        offset: the first key, modulo the rate.
        length: None: the keys are those of the whole sequence; else of the query's own segment of this many tokens,
            in which rate and offset count from its start.
        heads: the key/value heads that have the branch; None: all.

    Examples:
        >>> da.Pattern([da.Strided(3, offset=1)]).keys(query=0, head=0, num_tokens=8, num_heads=1)
        (1, 4, 7)
    """

    kind: ClassVar[str] = "strided"

    rate: int
    offset: int = 0
    length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "offset", self.checked("offset", 0) % self.checked("rate"))
        if self.length is not None:
            self.checked("length")

    def sees(self, head: int | Tensor, query: Tensor, key: Tensor) -> Tensor:
        if self.length is None:  # a remainder takes long on a CPU
            return (key % self.rate == self.offset) & (query >= 0)
        return (key % self.length % self.rate == self.offset) & (query // self.length == key // self.length)

    def rects(self, head: int, queries: range, n: int, is_causal: bool) -> Iterator[Rect]:
        width = self.length or max(1, n)
        for segment, some, *times in segments(queries, width, n):
            keys = range(segment.start + self.offset, segment.stop, self.rate)
            yield Rect(some, keys, -FOREVER, 0 if is_causal else FOREVER, *times).between()

    def without(self, rect: Rect, head: int) -> list[Rect] | None:
        steps = rect.period, rect.keys.step if len(rect.keys) > 1 else 0
        if self.length is not None or any(step % self.rate for step in steps):
            return None
        return [] if rect.keys.start % self.rate == self.offset else [rect]

    def kept(self, head: int) -> CacheRule:
        period = self.length or FOREVER
        return CacheRule(self.offset, self.rate, period, anew=self.length is not None, ahead=period)
