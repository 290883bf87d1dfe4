"""Which slots of a cache hold which tokens, and which of them the next token sees.

Both are arithmetic on positions: `Branch.kept` has its numbers. Layers with the same pattern share what is made here.

Legend: at (B,) the position of the next token of each sample; h heads that have the same b branches, S slots of a head.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.blocks import View
from dilated_attention.branches import Branch
from dilated_attention.branches.base import FOREVER, CacheRule, grouped, in_order
from dilated_attention.pattern import Pattern


class Slot(NamedTuple):
    """Where the next token of each sample belongs, and what it sees."""

    place: Tensor  # (B * h * b,), among the slots of all samples and heads
    absent: Tensor | None  # (B * h * b, 1), which heads do not keep it for a branch; None: all keep every token
    hidden: Tensor  # (B * h, S), the slots that it does not see


class SlotTable:
    """The slots of heads that have the same branches: those of one branch, then those of the next."""

    def __init__(
        self, pattern: Pattern, heads: list[int], branches: dict[int, Branch], tokens: int, device: torch.device
    ) -> None:
        """``branches``: by their numbers in the pattern. ``tokens``: there is room for sequences so long."""
        self.heads, self.branches, self.once = heads, branches, pattern.counts == "once"
        self.listed = kept = [[branch.kept(head) for branch in branches.values()] for head in heads]
        with torch.inference_mode(False):
            self.head = torch.tensor(heads, device=device)
            self.kept: Any = CacheRule(*torch.tensor(kept, device=device).permute(2, 0, 1))  # (h, b) each
            self.count = torch.tensor([[rule.rows(tokens) for rule in some] for some in kept], device=device)
            sizes = self.count.amax(0).clamp(min=1)
            self.begin, self.sizes = sizes.cumsum(0) - sizes, sizes.tolist()
            self.takes_all = all(rule[:2] == (0, 1) and rule.most == FOREVER for some in kept for rule in some)
            self.number = torch.arange(len(sizes), device=device).repeat_interleave(sizes)  # (S,) the branch of a slot
        neighbours = heads[-1] - heads[0] == len(heads) - 1
        self.pick = slice(heads[0], heads[-1] + 1) if neighbours else self.head  # of all heads

    def spread(self) -> Tensor:
        """Of each slot, (2, h, S): how far its token is from that of the branch's first slot, and from its next one."""
        row = torch.arange(len(self.number), device=self.begin.device) - self.begin[self.number]
        here = row < self.count[:, self.number]  # other heads may have more rows: one that is never filled is far away
        after = torch.where(here, row * self.kept.step[:, self.number], FOREVER // 2)
        return torch.stack((after, torch.where(here, self.kept.period[:, self.number], FOREVER)))

    _spread = functools.cached_property(spread)

    def distance(self, place: Tensor, spread: Tensor) -> Tensor:
        """How long ago the token of each slot came, (..., h, S); ``place``: in each branch's period, (..., h, b)."""
        distance = place[..., self.number] - spread[0]
        return torch.where(distance < 0, distance + spread[1], distance)

    def slot(self, at: Tensor, count: Tensor | None) -> Slot:
        """Of the next token. Where the count is 0 it is not real: it sees nothing, and the real one takes its slot."""
        at, kept = at[:, None, None], self.kept
        place = (at - kept.offset) % kept.period
        row = place // kept.step
        absent = (place % kept.step != 0) | (row >= self.count)
        since = torch.where(kept.anew > 0, at % kept.period, at).masked_fill(absent & (kept.among > 0), -1)
        distance = self.distance(place, self._spread)
        hidden = distance > since[:, :, self.number]
        if self.once or any(rule.asks for rule in self.listed[0]):
            self._ask(at, (at - distance).clamp(min=0), hidden)
        if count is not None:
            hidden |= (count == 0)[:, None, None]
        first = torch.arange(0, hidden.numel(), hidden.shape[2], device=at.device).view(*hidden.shape[:2], 1)
        place = first + self.begin + row.masked_fill(absent, 0)
        return Slot(place.flatten(), None if self.takes_all else absent.view(-1, 1), hidden.flatten(0, 1))

    def _ask(self, at: Tensor, token: Tensor, hidden: Tensor) -> None:
        """Hide what only a branch's definition can tell, and what an earlier branch shows, where it counts."""
        head, end = self.head.unsqueeze(1), 0
        for branch, kept, size in zip(self.branches.values(), self.listed[0], self.sizes, strict=True):
            begin, end = end, end + size
            if kept.asks:
                hidden[:, :, begin:end] |= ~branch.sees(head, at, token[:, :, begin:end])
            if self.once and end < len(self.number):
                hidden[:, :, end:] |= branch.sees(head, at, token[:, :, end:])

    def written(self, first: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Which slots have some of the tokens [first, stop) then: the places of their heads here, the slots, and which
        of these tokens."""
        distance = self.distance((stop - 1 - self.kept.offset) % self.kept.period, self.spread())
        head, slot = (distance < stop - first).nonzero(as_tuple=True)
        return head, slot, stop - first - 1 - distance[head, slot]

    def slots_of(self, view: View, branch: int, mine: list[int]) -> tuple[slice | Tensor, slice | Tensor]:
        """Rows of a branch, as a view of all tokens: of some of its heads the places here, and the slots. As slices if
        all heads have the same slots, in one stretch; else as (h, 1, 1) and (h, segments, rows)."""
        number = [*self.branches].index(branch)
        places = [self.heads.index(view.numbers[i]) for i in mine]
        kept = [self.listed[place][number] for place in places]
        (_, step, period, *_), begin, (heads, *others) = kept[0], sum(self.sizes[:number]), in_order(places)
        starts = {(view.token + i * view.token_step - rule.offset) % period for i, rule in zip(mine, kept, strict=True)}
        (start, *more), rows = starts, view.row_step * view.rows
        if view.segments == 1 and not others and not more and start + rows - view.row_step < period:
            first = begin + start // step
            slots = slice(first, first + rows // step, view.row_step // step)
            return slice(places[0], places[-1] + 1, heads.step), slots
        place = torch.tensor(places, device=self.head.device)[:, None, None]
        token = view.positions(place.device)[:, :, mine].permute(2, 0, 1) - self.kept.offset[place, number]
        return place, begin + token % period // step


@functools.lru_cache(maxsize=32)
def tables_of(pattern: Pattern, kv_heads: int, tokens: int, device: torch.device) -> tuple[SlotTable, ...]:
    """Room for sequences of so many tokens: a table for all heads that have the same branches."""
    branches = pattern.branches_for(kv_heads)
    alike = grouped(range(kv_heads), lambda head: tuple(i for i, x in enumerate(branches) if head in x.members))
    return tuple(
        SlotTable(pattern, heads, {i: branches[i] for i in numbers}, tokens, device)
        for numbers, heads in alike.items() if numbers
    )  # fmt: skip
