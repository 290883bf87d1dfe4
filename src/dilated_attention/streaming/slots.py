"""Which slots of a cache hold which tokens, and which of them the next token sees.

Both are arithmetic on positions: `Branch.kept` has its numbers. Layers with the same pattern share what is made here.

Legend: at (B,) the position of the next token of each sample; h heads that have the same b branches, S slots of a head.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.blocks import View
from dilated_attention.branches import Branch
from dilated_attention.branches.base import FOREVER, Kept, in_order, rows_at
from dilated_attention.pattern import Pattern


class Slot(NamedTuple):
    """Where the next token of each sample belongs, and what it sees."""

    place: tuple[Tensor, Tensor, Tensor]  # sample, head and slot, broadcast to (B, h, b)
    absent: Tensor  # (B, h, b, 1), which heads do not keep it for a branch
    hidden: Tensor  # (B, 1 or h, S), the slots that it does not see


class OfBranches(NamedTuple):
    """Numbers of each branch, (1 or h, b)."""

    begin: Tensor  # the first slot
    rows: Tensor
    offset: Tensor
    step: Tensor
    period: Tensor
    segment: Tensor  # within which a query sees rows
    among: Tensor


class OfSlots(NamedTuple):
    """Numbers of each slot, (1 or h, S)."""

    after: Tensor  # how many tokens after that of the branch's first slot
    period: Tensor


@dataclass(frozen=True, eq=False)
class Table:
    """The slots of heads that have the same branches: those of one branch, then those of the next."""

    heads: tuple[int, ...]
    numbers: tuple[int, ...]  # of the branches in the pattern
    branches: tuple[Branch, ...]
    kept: tuple[tuple[Kept, ...], ...]  # of each branch by each head
    borders: tuple[int, ...]  # where each branch's slots begin, and where the last one's end
    tokens: int  # there is room for sequences so long
    once: bool
    device: torch.device

    @functools.cached_property
    def pick(self) -> slice | Tensor:
        """The heads as an index of all."""
        if self.heads[-1] - self.heads[0] == len(self.heads) - 1:
            return slice(self.heads[0], self.heads[-1] + 1)
        return torch.tensor(self.heads, device=self.device)

    # --- one token per sample, on the device ------------------------------------------------------------------

    def slot(self, at: Tensor, count: Tensor | None) -> Slot:
        """Of the next token; none where the count is 0."""
        branches, slots, heads, number = self._on_device
        at = at[:, None, None]
        place = (at - branches.offset) % branches.period
        row = place // branches.step
        absent = (place % branches.step != 0) | (row >= branches.rows)
        if count is not None:
            absent |= (count == 0)[:, None, None]
        since = (at % branches.segment).masked_fill(absent & branches.among, -1)
        distance = place[:, :, number] - slots.after
        distance = torch.where(distance < 0, distance + slots.period, distance)
        hidden = distance > since[:, :, number]
        if self.once or any(one.asks for kept in self.kept for one in kept):
            hidden = hidden.expand(-1, len(self.heads), -1).clone()
            key = (at - distance).clamp(min=0)
            for branch, kept, (begin, end) in zip(
                self.branches, self.kept, itertools.pairwise(self.borders), strict=True
            ):
                if kept[0].asks:
                    hidden[:, :, begin:end] |= ~branch.sees(heads, at, key[:, :, begin:end])
                if self.once and end < self.borders[-1]:  # what an earlier branch shows counts there
                    hidden[:, :, end:] |= branch.sees(heads, at, key[:, :, end:])
        if count is not None:
            hidden = hidden | (count == 0)[:, None, None]
        sample = torch.arange(len(at), device=at.device)[:, None, None]
        head = torch.arange(len(self.heads), device=at.device)[:, None]
        column = torch.where(absent, branches.begin, branches.begin + row)
        return Slot((sample, head, column), absent.unsqueeze(3), hidden)

    @functools.cached_property
    def _on_device(self) -> tuple[OfBranches, OfSlots, Tensor, Tensor]:
        """And the heads, (h, 1), and the branch of each slot, (S,)."""
        rows = [b - a for a, b in itertools.pairwise(self.borders)]
        alike = all(len(set(kept)) == 1 for kept in self.kept)
        branches, slots = [], []
        with torch.inference_mode(False):
            for mine in [*zip(*self.kept, strict=True)][: 1 if alike else None]:
                numbers, parts = [], []
                for first, count, one in zip(self.borders, rows, mine, strict=False):
                    most, slot = one.rows(self.tokens), torch.arange(count)
                    width = one.period if one.anew else FOREVER
                    numbers.append((first, most, one.offset, one.step, one.period, width, one.among))
                    # other heads may have more rows: a slot that is never filled is far away
                    here = slot < most
                    after = torch.where(here, slot * one.step, FOREVER // 2)
                    parts.append(torch.stack((after, torch.where(here, one.period, FOREVER))))
                branches.append(numbers)
                slots.append(torch.cat(parts, 1))
            per_branch = torch.tensor(branches, device=self.device).permute(2, 0, 1)
            per_slot = torch.stack(slots, 1).to(self.device)
            heads = torch.tensor(self.heads, device=self.device).unsqueeze(1)
            number = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows)).to(self.device)
        begin, filled, offset, step, period, segment, among = per_branch.unbind()
        return (
            OfBranches(begin, filled, offset, step, period, segment, among > 0),
            OfSlots(*per_slot.unbind()),
            heads,
            number,
        )

    # --- several tokens of samples at one position, by the host -------------------------------------------------

    def written(self, first: int, stop: int) -> Iterator[tuple[slice, slice, slice]]:
        """The heads, by their place here, the slots, and the tokens [first, stop) that they have then, counted from the
        first."""
        for begin, kept in zip(self.borders, self.kept, strict=False):
            alike: dict[Kept, list[int]] = {}
            for place, one in enumerate(kept):
                alike.setdefault(one, []).append(place)
            for one, places in alike.items():
                since, most = max(first, stop - one.period), one.rows(self.tokens)
                at = since % one.period
                for turn in (0, one.period):  # up to where the period ends, and after that
                    tokens = rows_at(
                        one.offset, one.step, max(one.offset, at - turn), min(one.period, at + stop - since - turn)
                    )
                    row = (tokens.start - one.offset) // one.step
                    start, count = tokens.start + turn - at + since - first, min(tokens.length, most - row)
                    for some in in_order(places) if count > 0 else ():
                        yield (
                            slice(some.start, some.last + 1, some.step),
                            slice(begin + row, begin + row + count),
                            slice(start, start + (count - 1) * one.step + 1, one.step),
                        )

    def slots_of(self, view: View, branch: int, mine: list[int]) -> tuple[Tensor, Tensor]:
        """Rows of a branch, as a view of all tokens: of some of its heads the places here, (h, 1, 1), and the slots,
        (h, segments, rows)."""
        number, numbers = self.numbers.index(branch), []
        for i in mine:
            place = self.heads.index(view.head + i * view.head_step)
            one = self.kept[number][place]
            numbers.append((place, view.token + i * view.token_step - one.offset, one.period, one.step))
        place, token, period, step = torch.tensor(numbers).T.reshape(4, -1, 1, 1)
        segment, row = torch.arange(view.segments).unsqueeze(1), torch.arange(view.rows)
        token = token + segment * view.segment_step + row * view.row_step
        return place, self.borders[number] + token % period // step


@functools.lru_cache(maxsize=32)
def tables_of(pattern: Pattern, kv_heads: int, tokens: int, device: torch.device) -> tuple[Table, ...]:
    """Room for sequences of so many tokens: a table for all heads that have the same branches."""
    branches, alike = pattern.branches_for(kv_heads), dict[tuple[int, ...], list[int]]()
    for head in range(kv_heads):
        alike.setdefault(tuple(i for i, branch in enumerate(branches) if head in branch.members), []).append(head)
    tables = []
    for numbers, heads in alike.items():
        kept = tuple(tuple(branches[i].kept(head) for head in heads) for i in numbers)
        rows = [max(1, *(one.rows(tokens) for one in some)) for some in kept]
        borders = tuple(itertools.accumulate(rows, initial=0))
        mine, once = tuple(branches[i] for i in numbers), pattern.counts == "once"
        if numbers:
            tables.append(Table(tuple(heads), numbers, mine, kept, borders, tokens, once, device))
    return tuple(tables)


def rows_kept(pattern: Pattern, kv_heads: int, tokens: int) -> int:
    """Of all heads, for sequences of so many tokens."""
    tables = tables_of(pattern, kv_heads, tokens, torch.device("cpu"))
    return sum(len(table.heads) * table.borders[-1] for table in tables)


def tokens_until_full(pattern: Pattern, kv_heads: int) -> int:
    """Longer sequences keep no more rows than those of so many tokens; `FOREVER` if they always do."""
    return max(min(one.period, one.offset + one.most * one.step) for one in _every(pattern, kv_heads))


def period_of(pattern: Pattern, kv_heads: int) -> int:
    """All segments begin together every so many tokens; `FOREVER` if some branch has none."""
    every = _every(pattern, kv_heads)
    return math.lcm(*(one.period for one in every)) if all(one.anew for one in every) else FOREVER


def _every(pattern: Pattern, kv_heads: int) -> list[Kept]:
    return [branch.kept(head) for branch in pattern.branches_for(kv_heads) for head in branch.members]
