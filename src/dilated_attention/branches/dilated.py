"""Dilated: a branch of LongNet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from dilated_attention.branches.base import FOREVER, Branch, CacheRule, Rect, inside, segments

MOST_PARTS = 8  # segments of a nested branch inside of another's, that are told apart as rectangles


@dataclass(frozen=True, repr=False)
class Dilated(Branch):
    """Shows, in each segment of ``length`` tokens, every ``rate``-th token to one another.

    Args:
        length: of a segment, in tokens; the last one may be shorter.
        rate: every rate-th token of a segment takes part, as a query and as a key.
        offset: the first of them; "head" is the head's number modulo the rate.
        heads: the key/value heads that have the branch; None: all.

    Examples:
        >>> da.Pattern([da.Dilated(4, rate=2, offset=0)]).keys(query=6, head=0, num_tokens=8, num_heads=1)
        (4, 6)
    """

    kind: ClassVar[str] = "dilated"
    needs_masks: ClassVar[bool] = False

    length: int
    rate: int = 1
    offset: int | Literal["head"] = "head"
    neighbours: int = field(default=1, repr=False)  # with "head": so many heads in a row have the same offset

    def __post_init__(self) -> None:
        super().__post_init__()
        self.checked("length")
        self.checked("rate")
        self.checked("neighbours")
        if self.offset != "head":
            object.__setattr__(self, "offset", self.checked("offset", 0) % self.rate)

    def offset_of(self, head: int) -> int:
        return head // self.neighbours % self.rate if self.offset == "head" else self.offset

    def sees(self, head: int | Tensor, query: Tensor, key: Tensor) -> Tensor:
        offset = self.offset_of(head)  # type: ignore[arg-type]  # of several heads, as a tensor too
        takes_part = (query % self.length % self.rate == offset) & (key % self.length % self.rate == offset)
        return takes_part & (query // self.length == key // self.length)

    def rects(self, head: int, queries: range, n: int, is_causal: bool) -> Iterator[Rect]:
        offset = self.offset_of(head)
        for segment, some, *times in segments(queries, self.length, n):
            keys = range(segment.start + offset, segment.stop, self.rate)
            rows = inside(keys, some.start, some.stop)
            yield Rect(rows, keys, -FOREVER, 0 if is_causal else FOREVER, *times).between()

    def repeats(self) -> tuple[int, int]:
        return 0, self.length

    def reach(self, queries: range) -> range:
        return range(queries.start // self.length * self.length, -(-queries.stop // self.length) * self.length)

    def kept(self, head: int) -> CacheRule:
        return CacheRule(self.offset_of(head), self.rate, self.length, anew=True, among=True, ahead=self.length)

    def without(self, rect: Rect, head: int) -> list[Rect] | None:
        width = self.length
        if rect.period % width:
            return None
        mine, theirs = (range(x[0] // width, x[-1] // width + 1) for x in (rect.queries, rect.keys))  # segments
        if mine.stop <= theirs.start or theirs.stop <= mine.start:
            return [rect]  # no segment has queries and keys
        residues = self._residue(rect.queries, mine), self._residue(rect.keys, theirs)
        if not {None, self.offset_of(head)}.issuperset(residues):
            return [rect]
        if None in residues or len(mine) * len(theirs) > MOST_PARTS**2:
            return None
        return [
            rect._replace(
                queries=inside(rect.queries, segment * width, (segment + 1) * width),
                keys=inside(rect.keys, first * width, stop * width),
            ).between()
            for segment in mine
            for first, stop in ((theirs.start, segment), (segment + 1, theirs.stop))
        ]

    def _residue(self, rows: range, parts: range) -> int | None:
        """That of all rows, counted from the start of their segment, modulo the rate; None if they differ."""
        differ = (len(rows) > 1 and rows.step % self.rate) or (len(parts) > 1 and self.length % self.rate)
        return None if differ else rows.start % self.length % self.rate
