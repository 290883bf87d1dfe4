"""Every branch of a call counted, for all exchanges: its messages, and what ranks compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch import Tensor

from dilated_attention.context_parallel import ROUTES
from dilated_attention.cost.call import Call
from dilated_attention.cost.messages import Bundles, Tally, circulate, deal, finish_circulating, finish_dealing
from dilated_attention.cost.pieces import Branches, Pieces, Work, sums_before
from dilated_attention.pattern import rows_at_offset

# When two take equally long the first is taken. A ring waits only for the ranks whose rows it needs, holds the least,
# and on gloo its errors name one rank; with two ranks it sends the same messages as an all-gather.
EXCHANGES = ROUTES


def count(call: Call, pairs: bool = False) -> dict[str, Tally]:
    """Each exchange's numbers, by rank. ``pairs``: also what each computes."""
    call.check_range()
    elsewhere = torch.get_default_device().type != "cpu"  # new tensors would go there
    with torch.device("cpu") if elsewhere else contextlib.nullcontext():
        return _count(call, pairs)


def _count(call: Call, pairs: bool) -> dict[str, Tally]:
    starts = torch.tensor(call.shards.starts)
    borders = starts[starts < call.shards.tokens]
    ring, allgather, alltoall = (Tally.empty(call.shards.ranks) for _ in EXCHANGES)
    home_steps: list[Tensor] = []
    bundled = torch.zeros(3, 4, call.shards.ranks, dtype=torch.int64)
    some = [  # those of which this process has heads and, unless all is to be computed, a segment crosses a border
        branch
        for branch, width in enumerate(call.pattern.segment_lengths)
        if call.heads.of_branch(call.pattern, branch) and (pairs or bool((borders % width).any()))
    ]
    for branches in Branches.groups(call, some, len(borders)):
        for work in branches.work(Pieces.of(starts, branches.widths)):
            bundles = Bundles.of(call, work)
            home_steps += circulate(call, work, ring, allgather)
            deal(call, work, bundles, alltoall, bundled)
            if pairs:
                _compute(call, work, bundles, ring, alltoall)
    if pairs:
        _compute_inside(call, starts, (ring, alltoall))
        allgather.pairs = ring.pairs
    finish_circulating(ring, allgather, home_steps)
    finish_dealing(alltoall, *bundled)
    return dict(zip(EXCHANGES, (ring, allgather, alltoall), strict=True))


# --- computing ----------------------------------------------------------------------------------------------------


def _alone(call: Call, rows: Tensor) -> Tensor:
    """The pairs of so many rows among themselves."""
    return rows * (rows + 1) / 2 if call.is_causal else rows * rows


def _compute(call: Call, work: Work, bundles: Bundles, ring: Tally, alltoall: Tally) -> None:
    """Add the pairs of pieces."""
    pieces, rows = work.pieces, work.rows.double()
    all_rows, before = pieces.per_segment(work.rows), sums_before(work.rows)
    if call.is_causal:
        others = before[:, :-1] - before[:, pieces.first[pieces.segment]]
    else:
        others = all_rows[:, pieces.segment] - work.rows
    mine = _alone(call, rows)
    ring.pairs.index_add_(0, pieces.rank, ((mine + rows * others) * work.heads).sum(0))
    # in an alltoall what several ranks share is whole on one of them
    mine = mine.masked_fill(work.members[:, pieces.segment] > 1, 0.0)
    alltoall.pairs.index_add_(0, pieces.rank, (mine * work.heads).sum(0))
    dealt = _alone(call, all_rows[bundles.kind, pieces.segment[bundles.target]].double()) * bundles.heads
    alltoall.pairs.index_add_(0, pieces.rank[bundles.target], dealt)


def _compute_inside(call: Call, starts: Tensor, tallies: Iterable[Tally]) -> None:
    """Add the pairs of the segments inside a shard but its first and last, which are pieces."""
    for branch, (width, rate) in enumerate(call.pattern.branches):
        segments = ((starts[1:] - 1) // width - starts[:-1] // width - 1).clamp_(min=0)
        offsets = [offset for _, offset in call.heads.of_branch(call.pattern, branch)]
        rows = torch.tensor([rows_at_offset(width, rate, offset) for offset in offsets], dtype=torch.float64)
        for tally in tallies:
            tally.pairs += segments * _alone(call, rows).sum()
