"""All that a picture of a pattern shows, as data: what each kind of head sees, covers and reaches, and what travels.

`View.of` counts it; `text`, `picture` and `page` only draw it. Everything is exact integers of any size, and nothing
has the length of the sequence: 10**9 tokens take no longer than 10**4.

Legend: a kind is the (query) heads that see the same; a stretch is the tokens between two edges of the picture, and a
cell the queries of one stretch with the keys of another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dilated_attention.pattern import DilatedPattern, whole_number
from dilated_attention.show.cells import edges
from dilated_attention.show.coverage import Coverage, Covering
from dilated_attention.show.kinds import Kind, kinds_of
from dilated_attention.show.reach import Reach
from dilated_attention.show.travel import Travel


@dataclass(frozen=True, slots=True)
class View:
    pattern: DilatedPattern
    tokens: int
    heads: int
    kv_heads: int
    is_causal: bool
    query: int | None  # the one asked for
    head: int | None  # likewise
    edges: tuple[int, ...]
    kinds: tuple[Kind, ...]
    coverage: Coverage  # rows that at least one head covers
    reach: Reach
    travel: Travel | None

    @classmethod
    def of(
        cls,
        pattern: DilatedPattern,
        tokens: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        is_causal: bool = False,
        query: int | None = None,
        head: int | None = None,
        ranks: int | None = None,
        exchange: str = "ring",
        head_dim: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        window: tuple[int, int] | None = None,
        cells: int = 64,
    ) -> View:
        """Count what a picture of the pattern shows.

        Args:
            query: the query whose keys are listed. The receptive field is its own, too; without it, that of the last
                token when causal, else of the middle one.
            head: the head to draw, if not all.
            ranks: cut the sequence into so many shards, and list what travels by ``exchange`` (ring, allgather,
                alltoall or auto); ``head_dim`` and ``dtype`` say how many bytes a row has.
            window: [start, stop) of the tokens to draw, if not all.
            cells: draw at most so many cells down and across.
        """
        tokens, heads, cells = (
            whole_number(*x) for x in (("tokens", tokens), ("heads", heads), ("cells", cells))
        )  # fmt: skip
        kv_heads = heads if kv_heads is None else whole_number("kv_heads", kv_heads)
        pattern.check_heads(heads, kv_heads)
        start, stop = window or (0, tokens)
        _check(tokens, heads, query, head, start, stop)
        cuts = edges(start, stop, cells, (*pattern.segment_lengths, *pattern.dilation_rates))
        kinds = kinds_of(pattern, tokens, heads, kv_heads, is_causal, query, cuts)
        together = [
            Covering(width, rate, frozenset(kind.offsets[i] for kind in kinds) - {None})  # type: ignore[arg-type]
            for i, (width, rate) in enumerate(pattern.branches)
        ]
        from_query = query if query is not None else tokens - 1 if is_causal else tokens // 2
        travel = None
        if ranks is not None:
            ranks = whole_number("ranks", ranks)
            travel = Travel.of(pattern, tokens, heads, kv_heads, is_causal, ranks, exchange, head_dim, dtype)
        return cls(
            pattern, tokens, heads, kv_heads, is_causal, query, head, cuts, kinds, Coverage.of(together, tokens),
            Reach.of(from_query, tokens, together, is_causal, cuts), travel,
        )  # fmt: skip

    @property
    def shown(self) -> tuple[Kind, ...]:
        """The kinds to draw: all, or that of the head asked for."""
        return tuple(kind for kind in self.kinds if self.head is None or self.head in kind.heads)

    @property
    def cell_size(self) -> int:
        """Tokens of a stretch; the last may have fewer."""
        return self.edges[1] - self.edges[0]

    @property
    def query_stretch(self) -> int | None:
        """The stretch that holds the query asked for, if the picture does."""
        if self.query is None or not self.edges[0] <= self.query < self.edges[-1]:
            return None
        return (self.query - self.edges[0]) // self.cell_size

    def pictures(self, merged: int = 1) -> list[tuple[list[int], list[list[int]]]]:
        """What to draw: heads and their `Kind.counts`. Heads that look the same are one picture: in large cells also
        some that do not see the same."""
        found: dict[str, tuple[list[int], list[list[int]]]] = {}
        for kind in self.shown:
            counts = kind.counts(merged)
            found.setdefault(repr(counts), ([], counts))[0].extend(kind.heads)
        return [(sorted(heads), counts) for heads, counts in found.values()]


def _check(tokens: int, heads: int, query: int | None, head: int | None, start: int, stop: int) -> None:
    if query is not None and not 0 <= query < tokens:
        raise ValueError(f"there is no query {query} among {tokens} tokens: count from 0 to {tokens - 1}")
    if head is not None and not 0 <= head < heads:
        raise ValueError(f"there is no head {head} among {heads}: count from 0 to {heads - 1}")
    if not 0 <= start < stop <= tokens:
        raise ValueError(f"window is [{start}, {stop}): give a first token and a later end, from 0 to {tokens}")
