"""Window: near tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dilated_attention.branches.base import FOREVER, Branch, CacheRule, Rect


@dataclass(frozen=True, repr=False)
class Window(Branch):
    """Shows each query the tokens around it: ``left`` before it, itself, and ``right`` after it.

    Hugging Face's ``sliding_window=W`` is ``Window(W - 1)`` in a causal call.

    Args:
        left: how many earlier tokens.
        right: how many later tokens; None: as many. A causal call has none.
        rate: of every rate-th token, counted from the query.
        heads: the key/value heads that have the branch; None: all.

    Examples:
        >>> da.Pattern([da.Window(2)]).keys(query=5, head=0, num_tokens=8, num_heads=1)
        (3, 4, 5, 6, 7)
    """

    kind: ClassVar[str] = "window"
    cuts: ClassVar[bool] = True

    left: int
    right: int | None = None
    rate: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.checked("left", 0)
        self.checked("rate")
        if self.right is not None:
            self.checked("right", 0)

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the most key - query, in tokens."""
        right = self.left if self.right is None else self.right
        return max(-self.left * self.rate, -FOREVER), min(right * self.rate, FOREVER)

    def sees(self, head: int | Tensor, query: Tensor, key: Tensor) -> Tensor:
        (low, high), distance = self.limits, key - query
        near = (distance >= low) & (distance <= high)
        return near if self.rate == 1 else near & (distance % self.rate == 0)  # a remainder takes long on a CPU

    def rects(self, head: int, queries: range, n: int, is_causal: bool) -> Iterator[Rect]:
        step, (low, high) = (self.rate, self.limits) if self.rate < n else (1, (0, 0))  # no token is so far away
        for first in range(queries.start, min(queries.stop, queries.start + step)):
            rows, keys = range(first, queries.stop, step), range(first % step, n, step)
            yield Rect(rows, keys).between(low, 0 if is_causal else high)

    def repeats(self) -> tuple[int, int]:
        return 0, 1

    def reach(self, queries: range) -> range:
        low, high = self.limits
        return range(queries.start + low, queries.stop + high)

    def kept(self, head: int) -> CacheRule:
        return CacheRule(period=1 - self.limits[0], asks=self.rate > 1, ahead=self.limits[1])

    def without(self, rect: Rect, head: int) -> list[Rect] | None:
        low, high = self.limits
        if rect.between(low, high).is_empty:
            return [rect]
        if rect.queries.step % self.rate or rect.keys.step % self.rate:
            return None
        if (rect.keys.start - rect.queries.start) % self.rate:
            return [rect]  # none of the pairs is a multiple of the rate apart, else all are
        return [rect.between(high=low - 1), rect.between(low=high + 1)]
