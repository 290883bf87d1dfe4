"""Prefix and Global: tokens that all others see."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dilated_attention.branches.base import FOREVER, Branch, CacheRule, Rect, in_order, inside, rising
from dilated_attention.checks import Ints

MOST_PARTS = 64  # rectangles that are left of one


@dataclass(frozen=True, repr=False)
class Prefix(Branch):
    """Shows the first ``count`` tokens to every query: attention sinks.

    Args:
        count: how many tokens.
        heads: the key/value heads that have the branch; None: all.

    Examples:
        >>> da.Pattern([da.Prefix(2)]).keys(query=7, head=0, num_tokens=8, num_heads=1)
        (0, 1)
    """

    kind: ClassVar[str] = "prefix"
    cuts: ClassVar[bool] = True

    count: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.checked("count")

    def sees(self, head: int | Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key < self.count) & (query >= 0)

    def rects(self, head: int, queries: range, n: int, is_causal: bool) -> Iterator[Rect]:
        return seen_by_all(range(min(self.count, n)), queries, is_causal)

    def repeats(self) -> tuple[int, int]:
        return self.count, 1

    def kept(self, head: int) -> CacheRule:
        return CacheRule(most=self.count, ahead=self.count)

    def without(self, rect: Rect, head: int) -> list[Rect] | None:
        return rect.with_keys(self.count, FOREVER)


@dataclass(frozen=True, repr=False)
class Global(Branch):
    """Shows some tokens to every query, and every token to them: class tokens, registers.

    Args:
        tokens: an int: the first ones; else their positions.
        heads: the key/value heads that have the branch; None: all.

    Examples:
        >>> da.Pattern([da.Global([0, 6])]).keys(query=3, head=0, num_tokens=8, num_heads=1)
        (0, 6)
    """

    kind: ClassVar[str] = "global"
    cuts: ClassVar[bool] = True

    tokens: int | Iterable[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.tokens, Iterable):
            object.__setattr__(self, "tokens", rising("tokens", self.tokens))
        else:
            self.checked("tokens")

    def sees(self, head: int | Tensor, query: Tensor, key: Tensor) -> Tensor:
        if isinstance(self.tokens, int):
            return (query < self.tokens) | (key < self.tokens)
        tokens = _listed(tuple(self.tokens), query.device)
        return torch.isin(query, tokens) | torch.isin(key, tokens)

    def rects(self, head: int, queries: range, n: int, is_causal: bool) -> Iterator[Rect]:
        """Their columns, then of their rows what lies between the columns."""
        if isinstance(self.tokens, int):
            first = min(self.tokens, n)
            stretches, gaps = [range(first)], [range(first, n)]
        else:
            tokens = [token for token in self.tokens if token < n]
            stretches, gaps = in_order(tokens), list(between(range(n), tokens))
        for keys in stretches:
            yield from seen_by_all(keys, queries, is_causal)
        for rows in (inside(keys, queries.start, queries.stop) for keys in stretches):
            singles = [rows] if rows.step == 1 else [range(token, token + 1) for token in rows]
            for mine, gap in itertools.product(singles, gaps):
                yield Rect(mine, gap).between(high=0 if is_causal else FOREVER)

    def without(self, rect: Rect, head: int) -> list[Rect] | None:
        if isinstance(self.tokens, int):
            some = (part.turned() for part in rect.with_keys(self.tokens, FOREVER))
            return [part.turned() for left in some for part in left.with_keys(self.tokens, FOREVER)]
        spans = list(between(rect.queries, self.tokens)), list(between(rect.keys, self.tokens))
        if rect.repeats > 1 or len(spans[0]) * len(spans[1]) > MOST_PARTS:
            return None
        return [rect._replace(queries=queries, keys=keys).between() for queries, keys in itertools.product(*spans)]

    def repeats(self) -> tuple[int, int]:
        return self.tokens if isinstance(self.tokens, int) else max(self.tokens, default=-1) + 1, 1

    def kept(self, head: int) -> CacheRule:
        """Queries up to the last of these tokens may see all before them, and later ones see none after it."""
        return CacheRule(most=self.repeats()[0], asks=not isinstance(self.tokens, int))


@functools.lru_cache(maxsize=64)
def _listed(tokens: Ints, device: torch.device) -> Tensor:
    """Copied once: while a CUDA graph is captured, nothing may be."""
    with torch.inference_mode(False):
        return torch.tensor(tokens, device=device)


def seen_by_all(keys: range, queries: range, is_causal: bool) -> Iterator[Rect]:
    """All queries with these keys; when causal those that see all of them, then those that see some."""
    if not is_causal or not keys:
        yield Rect(queries, keys)
        return
    yield Rect(inside(queries, keys[-1], queries.stop), keys)
    yield Rect(inside(queries, queries.start, keys[-1]), keys).between(high=0)


def between(rows: range, tokens: Iterable[int]) -> Iterator[range]:
    """The rows before, between and after some tokens."""
    borders = [rows.start - 1, *(token for token in tokens if token in rows), rows.stop]
    for before, token in itertools.pairwise(borders):
        part = inside(rows, before + 1, token)
        if part:
            yield part
