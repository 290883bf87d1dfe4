"""What a branch is: which keys it shows to which queries, as a definition and as a few rectangles of rows.

A kind of branch writes `sees`, its definition, and `rects`, the same as dense problems. All else follows from `rects`:
blocks, counts of pairs, the rows that queries need. `without` is what another branch leaves of a rectangle, where that
is a few rectangles again.

Legend: positions count tokens of one sequence of n tokens; heads are key/value heads, as the whole model counts them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor

from dilated_attention.checks import Ints, check_int

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

FOREVER = 2**62  # a period that no sequence reaches


class CacheRule(NamedTuple):
    """What a cache keeps of a head for later queries: in slot s the latest of offset + s * step + i * period.

    A query sees all of them; if each period begins ``anew``, those of its own; where tokens see one another, ``among``
    themselves, none unless it is kept itself; and if ``asks``, only those that the branch's `sees` names.
    """

    offset: int = 0
    step: int = 1
    period: int = FOREVER
    most: int = FOREVER  # slots
    anew: bool = False
    among: bool = False
    asks: bool = False
    ahead: int = FOREVER  # if not causal, a query sees tokens up to so many after it, or of its own period

    def known(self, tokens: int) -> int:
        """How many of the first tokens see none after them."""
        return tokens - tokens % self.period if self.anew else max(0, tokens - self.ahead)

    def rows(self, tokens: int) -> int:
        """How many slots sequences of so many tokens fill."""
        return max(0, min(self.most, -((self.offset - min(self.period, tokens)) // self.step)))


def inside(rows: range, first: int, stop: int) -> range:
    """Those in [first, stop)."""
    start, step = rows.start, rows.step
    return rows[max(0, -((start - first) // step)) : max(0, -((start - stop) // step))]


def moved(rows: range, tokens: int) -> range:
    return range(rows.start + tokens, rows.stop + tokens, rows.step)


class Rect(NamedTuple):
    """Queries and keys that see one another, if low <= key - query <= high, in tokens. So many times, each a period
    after the one before."""

    queries: range
    keys: range
    low: int = -FOREVER
    high: int = FOREVER
    repeats: int = 1
    period: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.queries and self.keys)

    @property
    def span(self) -> range:
        """The tokens from the first query of all repeats to the last."""
        return range(self.queries[0], self.queries[-1] + (self.repeats - 1) * self.period + 1)

    @property
    def least(self) -> int:
        """The least key - query, at least; that of all repeats."""
        return max(self.low, self.keys[0] - self.queries[-1])

    @property
    def most(self) -> int:
        """The most, at most."""
        return min(self.high, self.keys[-1] - self.queries[0])

    def between(self, low: int = -FOREVER, high: int = FOREVER) -> Rect:
        """The pairs with low <= key - query <= high too: no rows that meet none, and no limit that always holds."""
        low, high, queries, keys = max(low, self.low), min(high, self.high), self.queries, self.keys
        if (low, high) == (-FOREVER, FOREVER):
            return self
        for _ in range(4):  # with both, fewer queries may need fewer keys
            if queries:
                keys = inside(keys, queries[0] + low, queries[-1] + high + 1)
            queries, keys, low, high = keys, queries, -high, -low
        if low > high:
            queries = range(0)
        return self._replace(queries=queries, keys=keys, low=low, high=high).eased()

    def eased(self) -> Rect:
        """Without limits that always hold."""
        if self.is_empty:
            return self
        queries, keys, low, high, *times = self
        low = low if keys[0] - queries[-1] < low else -FOREVER
        return Rect(queries, keys, low, high if keys[-1] - queries[0] > high else FOREVER, *times)

    def part(self, first: int, stop: int, key: int, last: int) -> Rect:
        """The pairs of the query rows [first, stop) with the key rows [key, last), counted from the first."""
        first, stop, key, last = (max(0, row) for row in (first, stop, key, last))
        return self._replace(queries=self.queries[first:stop], keys=self.keys[key:last]).eased()

    def in_rows(self) -> tuple[int | None, int | None]:
        """The limits in rows, if there are any; queries and keys go in steps of one size."""
        step, apart = self.queries.step, self.keys.start - self.queries.start
        low = None if self.low == -FOREVER else -((apart - self.low) // step)
        return low, None if self.high == FOREVER else (self.high - apart) // step

    def even(self) -> Iterator[Rect]:
        """The same pairs; where they are limited, queries and keys go in steps of one size."""
        step = math.lcm(self.queries.step, self.keys.step)
        if step == self.queries.step == self.keys.step or (self.low, self.high) == (-FOREVER, FOREVER):
            yield self
            return
        sides = ([x[i :: step // x.step] for i in range(min(step // x.step, len(x)))] for x in self[:2])
        for queries, keys in itertools.product(*sides):
            yield self._replace(queries=queries, keys=keys).between()

    def moved(self, tokens: int) -> Rect:
        return Rect(moved(self.queries, tokens), moved(self.keys, tokens), *self[2:])

    def some(self, first: int, stop: int) -> Rect:
        """The repeats [first, stop)."""
        count = stop - first
        return self.moved(first * self.period)._replace(repeats=count, period=self.period if count > 1 else 0)

    def singles(self) -> Iterator[Rect]:
        return (self.some(index, index + 1) for index in range(self.repeats))

    def with_keys(self, first: int, stop: int) -> list[Rect]:
        """The keys in [first, stop) alone. Repeats of which all are there stay together."""
        start, last = (self.keys[0], self.keys[-1]) if self.keys else (first, first)
        if self.is_empty or (first <= start and last + (self.repeats - 1) * self.period < stop):
            return [self]
        # the first repeats of which some are there, all are there, one is missing again, and none is there
        some, every, missing, end = (
            min(self.repeats, max(0, -((key - token) // (self.period or 1))))
            for key, token in ((last, first), (start, first), (last, stop), (start, stop))
        )
        every, missing = (every, missing) if every < missing else (end, end + 1)
        cuts = itertools.pairwise((*range(some, every + 1), *range(missing, end + 1)))
        parts = [self.some(*repeats) for repeats in cuts]
        return [part._replace(keys=inside(part.keys, first, stop)).between() for part in parts]

    def followed_by(self, other: Rect) -> Rect | None:
        """Both as one, if the other, of the same shape, comes a period later."""
        step = other.queries.start - self.queries.start
        period = self.period if self.repeats > 1 else step
        if step != period * self.repeats or (other.repeats > 1 and other.period != period):
            return None
        return self._replace(repeats=self.repeats + other.repeats, period=period)

    def turned(self) -> Rect:
        """The keys as queries, and the queries as keys."""
        return self._replace(queries=self.keys, keys=self.queries, low=-self.high, high=-self.low)

    def pairs(self) -> int:
        """How many (query, key) pairs there are."""
        return 0 if self.is_empty else self.repeats * (self._up_to(self.high) - self._up_to(self.low - 1))

    def _up_to(self, limit: int) -> int:
        """The pairs of one repeat with key - query <= limit."""
        step, count, divisor, most = self.queries.step, len(self.queries), self.keys.step, len(self.keys)
        first = self.queries.start + limit - self.keys.start
        # query i sees (first + i * step) // divisor + 1 keys, from 0 to all of them
        begin = min(count, max(0, -(first // step)))
        end = max(begin, min(count, -((first - (most - 1) * divisor) // step)))
        n = end - begin
        return n + sum_of_floors(n, step, first + begin * step, divisor) + (count - end) * most


def sum_of_floors(count: int, step: int, first: int, divisor: int) -> int:
    """The sum of (first + i * step) // divisor over i < count, none of which is negative; as in Euclid's algorithm."""
    total = 0
    while count > 0:
        total += count * (count - 1) // 2 * (step // divisor) + count * (first // divisor)
        step, first = step % divisor, first % divisor
        top = count * step + first
        if top < divisor:
            break
        count, first, step, divisor = top // divisor, top % divisor, divisor, step
    return total


@dataclass(frozen=True, repr=False)
class Branch:
    """What all kinds of branches share.

    Args:
        heads: the key/value heads that have the branch, as the whole model counts them; None: all.
    """

    kind: ClassVar[str]  # its name in `to_dict`
    # alone, it has blocks with pairs that do not count, besides the later keys of a causal call
    needs_masks: ClassVar[bool] = True
    cuts: ClassVar[bool] = False  # whether `without` has rectangles for most others, so that it is best asked first

    _: KW_ONLY
    heads: Iterable[int] | None = None

    @property
    def members(self) -> Ints:
        """The heads, of a branch that names them."""
        return tuple(self.heads or ())

    def __post_init__(self) -> None:
        if self.heads is not None:
            object.__setattr__(self, "heads", rising("heads", self.heads))

    def checked(self, name: str, least: int = 1) -> int:
        """A field, as an int of ``least`` or more from here on."""
        number = check_int(name, getattr(self, name), least=least)
        object.__setattr__(self, name, number)
        return number

    def to_dict(self) -> dict[str, Any]:
        """The kind, and the fields that are not at their defaults, for JSON."""
        given = ((x.name, getattr(self, x.name), x.default) for x in dataclasses.fields(self))
        return {"kind": self.kind} | {name: value for name, value, default in given if value != default}

    def __repr__(self) -> str:
        given = {name: value for name, value in self.to_dict().items() if name != "kind"}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def offset_of(self, head: int) -> int:
        """Heads of one offset see the same."""
        return 0

    def sees(self, head: int | Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The definition: which keys a head's queries see, both as positions; all are broadcast."""
        raise NotImplementedError

    def rects(self, head: int, queries: range, n: int, is_causal: bool) -> Iterator[Rect]:
        """All pairs of these queries, each once. Heads have equally many rectangles in one order; some are empty."""
        raise NotImplementedError

    def near(self, rect: Rect, head: int, n: int) -> Iterator[Rect]:
        """All pairs that may be in a rectangle, each once."""
        return self.rects(head, rect.span, n, False)

    def repeats(self) -> tuple[int, int]:
        """A token and a period: from there on, a pair is shown if that a period later is; a period of 0: unknown."""
        return 0, 0

    def reach(self, queries: range) -> range | None:
        """The tokens that these queries see at most, if it does not depend on the length of the sequence."""
        return None

    def kept(self, head: int) -> CacheRule:
        """What later queries of a causal sequence can see; by default all tokens."""
        return CacheRule(asks=True)

    def without(self, rect: Rect, head: int) -> list[Rect] | None:
        """The pairs of a rectangle that this branch does not show, some of them empty; None if only `sees` can tell
        them."""
        return None


def rising(name: str, values: Iterable[int]) -> Ints:
    """Numbers that a user lists, each once."""
    if isinstance(values, (str, bytes, Tensor)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of whole numbers, got {values!r}")
    return tuple(sorted({check_int(f"every entry of {name}", value, least=0) for value in values}))


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items that agree in something, by it."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def segments(queries: range, width: int, n: int) -> Iterator[tuple[range, range, int, int]]:
    """The segments that hold queries: the segment, its queries, how often it is repeated, and at which period."""
    first = queries.start
    while first < queries.stop:
        start = first - first % width
        stop = min(start + width, n)
        whole = max(1, (queries.stop - first) // width if first == start else 1)
        yield range(start, stop), range(first, min(stop, queries.stop)), whole, width if whole > 1 else 0
        first = start + whole * width


def in_order(numbers: Iterable[int]) -> list[range]:
    """Rising numbers as the fewest stretches of constant step, taken greedily."""
    stretches: list[range] = []
    for number in numbers:
        step = number - stretches[-1][-1] if stretches else 0
        if stretches and (len(stretches[-1]) == 1 or stretches[-1].step == step):
            stretches[-1] = range(stretches[-1].start, number + 1, step)
        else:
            stretches.append(range(number, number + 1))
    return stretches
