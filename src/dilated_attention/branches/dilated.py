"""Dilated: a branch of LongNet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from dilated_attention.branches.base import Branch, Kept, Rect, Rows, rows_at, segments
from dilated_attention.checks import check_int

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

    length: int
    rate: int = 1
    offset: int | Literal["head"] = "head"
    neighbours: int = field(default=1, repr=False)  # with "head": so many heads in a row have the same offset

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("length", self.length)
        check_int("rate", self.rate)
        if self.offset != "head":
            object.__setattr__(self, "offset", check_int("offset", self.offset, least=0) % self.rate)

    def offset_of(self, head: int) -> int:
        return head // self.neighbours % self.rate if self.offset == "head" else self.offset

    def sees(self, head: int | Tensor, query: Tensor, key: Tensor) -> Tensor:
        offset = self.offset_of(head)  # type: ignore[arg-type]  # of several heads, as a tensor too
        takes_part = (query % self.length % self.rate == offset) & (key % self.length % self.rate == offset)
        return takes_part & (query // self.length == key // self.length)

    def rects(self, head: int, queries: range, n: int, is_causal: bool) -> Iterator[Rect]:
        offset = self.offset_of(head)
        for segment, some, repeats in segments(queries, self.length, n):
            rows, keys = (
                rows_at(segment.start + offset, self.rate, max(x.start, segment.start + offset), x.stop)
                for x in (some, segment)
            )
            rect = Rect(rows, keys, repeats=repeats, period=self.length if repeats > 1 else 0)
            yield rect.between(high=0 if is_causal else None)

    def repeats(self) -> tuple[int, int]:
        return 0, self.length

    def reach(self, queries: range) -> range:
        return range(queries.start // self.length * self.length, -(-queries.stop // self.length) * self.length)

    def kept(self, head: int) -> Kept:
        return Kept(self.offset_of(head), self.rate, self.length, anew=True, among=True, ahead=self.length)

    def without(self, rect: Rect, head: int, n: int) -> list[Rect] | None:
        width, rate, offset = self.length, self.rate, self.offset_of(head)
        spans = [range(x.start, x.last + 1) for x in (rect.queries, rect.keys)]
        if rect.period % width:
            return None
        parts = [range(x.start // width, x[-1] // width + 1) for x in spans]
        if parts[0].stop <= parts[1].start or parts[1].stop <= parts[0].start:
            return [rect]  # no segment has queries and keys
        residues = [_residue(x, width, rate, len(part) > 1) for x, part in zip(rect[:2], parts, strict=True)]
        if any(residue is not None and residue != offset for residue in residues):
            return [rect]
        if None in residues or len(parts[0]) * len(parts[1]) > MOST_PARTS**2:
            return None
        found = []
        for mine in parts[0]:
            for keys in (range(parts[1].start, mine), range(mine + 1, parts[1].stop)):
                cut = rect._replace(
                    queries=rect.queries.inside(mine * width, (mine + 1) * width),
                    keys=rect.keys.inside(keys.start * width, keys.stop * width),
                )
                found.append(cut if cut.is_empty else cut.between())
        return [x for x in found if not x.is_empty]


def _residue(rows: Rows, width: int, rate: int, crosses: bool) -> int | None:
    """That of all rows, counted from the start of their segment, modulo the rate; None if they differ."""
    differ = (rows.length > 1 and rows.step % rate) or (crosses and width % rate)
    return None if differ else rows.start % width % rate
