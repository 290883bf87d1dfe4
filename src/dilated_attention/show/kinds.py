"""What one head sees: its pairs in every cell, the keys of a query, the rows it covers. Heads that see the same are
one kind, and counted once.

Legend as in `seen`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dilated_attention.pattern import DilatedPattern, rows_at_offset
from dilated_attention.show.cells import BranchCells
from dilated_attention.show.coverage import Coverage, Covering


@dataclass(frozen=True, slots=True)
class Zeros:
    """Zero keys that torchscale appends, seen by each row of a branch: in a whole segment, and in the last one."""

    branch: int
    whole: int
    last: int
    last_length: int  # tokens of a shorter last segment; 0 if there is none


@dataclass(frozen=True, slots=True)
class Kind:
    """(Query) heads with the same offset in every branch, which therefore see the same."""

    heads: tuple[int, ...]
    offsets: tuple[int | None, ...]  # by branch; None: these heads do not run it
    branches: tuple[BranchCells | None, ...]
    coverage: Coverage
    zeros: tuple[Zeros, ...]
    keys: tuple[range, ...]  # of the query, by branch; empty without a query
    zero_keys: int  # of the query

    def pairs(self, row: int, column: int) -> tuple[int, ...]:
        """The pairs in a cell that each branch shows."""
        return tuple(0 if branch is None else branch.pairs(row, column) for branch in self.branches)

    def masks(self, merged: int = 1) -> list[list[int]]:
        """Of each cell, the branches that show something in it: bit i for branch i. ``merged``: so many cells as one,
        down and across."""
        found: list[list[int]] = []
        for index, branch in enumerate(self.branches):
            if branch is None:
                continue
            count = -(-len(branch.own) // merged)
            found = found or [[0] * count for _ in range(count)]
            for row, column in branch.filled():
                found[row // merged][column // merged] |= 1 << index
        return found

    def counts(self, merged: int = 1) -> list[list[int]]:
        """Of each cell, how many branches show something in it; of a single pair, how often its key counts."""
        return [[mask.bit_count() for mask in row] for row in self.masks(merged)]


def kinds_of(
    pattern: DilatedPattern,
    tokens: int,
    heads: int,
    kv_heads: int,
    is_causal: bool,
    query: int | None,
    edges: tuple[int, ...],
) -> tuple[Kind, ...]:
    """All heads, in the order of the first of each kind."""
    group = heads // kv_heads
    alike: dict[tuple[int | None, ...], list[int]] = {}
    runs = [pattern.heads(branch, kv_heads) for branch in range(len(pattern.branches))]
    for head in range(kv_heads):
        offsets = (pattern.offset(i, head, kv_heads) if head in some else None for i, some in enumerate(runs))
        alike.setdefault(tuple(offsets), []).extend(range(head * group, (head + 1) * group))
    found = []
    for of_kind, members in alike.items():
        placed = list(zip(pattern.branches, of_kind, strict=True))
        run = [Covering(w, r, frozenset({offset})) for (w, r), offset in placed if offset is not None]
        zero_keys = 0
        if query is not None:
            zero_keys = pattern.zero_keys(
                query, members[0], num_tokens=tokens, num_heads=heads, num_kv_heads=kv_heads, is_causal=is_causal
            )
        found.append(
            Kind(
                tuple(members),
                of_kind,
                tuple(None if o is None else BranchCells.of(edges, w, r, o, is_causal) for (w, r), o in placed),
                Coverage.of(run, tokens),
                () if is_causal else tuple(_zeros(pattern, of_kind, tokens)),
                tuple(_keys(query, w, r, o, tokens, is_causal) for (w, r), o in placed) if query is not None else (),
                zero_keys,
            )
        )
    return tuple(found)


def _keys(query: int, width: int, rate: int, offset: int | None, tokens: int, is_causal: bool) -> range:
    """The keys that a branch shows a query."""
    start = query - query % width
    if offset is None or (query - start) % rate != offset:
        return range(0)
    return range(start + offset, query + 1 if is_causal else min(start + width, tokens), rate)


def _zeros(pattern: DilatedPattern, offsets: tuple[int | None, ...], tokens: int) -> list[Zeros]:
    found = []
    for branch, (width, rate) in enumerate(pattern.branches):
        offset, width = offsets[branch], min(width, tokens)
        if offset is None:
            continue
        rest = tokens % width
        whole, last = (
            pattern.zeros_in_segment(branch, length, offset, tokens) if rows_at_offset(length, rate, offset) else 0
            for length in (width, rest)
        )
        if whole or last:
            found.append(Zeros(branch, whole, last, rest))
    return found
