"""Keys and values of other ranks come to this rank's queries while it computes, forward and backward.

`away` lists the rows of one rank that the queries of another need: the reader and the owner make the same list. They go
straight from the owner to the reader. On a ring step t is with the ranks t places before and after; in an all-gather
one step is with all. While a rank computes with what arrived, the next step is on its way. In the backward pass the
gradients of these rows go straight home, in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.problem import Gradients, Inputs, Outputs, Pair
from dilated_attention.blocks import View
from dilated_attention.call import Call
from dilated_attention.plan import Away, away
from dilated_attention.ring.parallel import NO_STEP, Coming, ParallelCall, Part, Step, message_bytes, unpack
from dilated_attention.ring.shards import Shards


@functools.lru_cache(maxsize=256)
def steps_of(call: Call, shards: Shards, is_ring: bool, rank: int) -> tuple[Step, ...]:
    """All steps of a rank. Steps without messages are there too: all ranks count alike."""

    def needs(reader: int, owner: int) -> tuple[Away, ...]:
        (start, stop), (first, last) = shards.of_rank(reader), shards.of_rank(owner)
        return away(call._replace(start=start, queries=stop - start, key_start=0, keys=0), first, last - first)

    def rows_in(needed: dict[int, tuple[Away, ...]]) -> dict[int, tuple[View, ...]]:
        return {peer: tuple(part.rows for part in parts) for peer, parts in needed.items() if parts}

    size, steps = shards.ranks, []
    for places in [(place,) for place in range(1, size)] if is_ring else [range(1, size)]:
        readers = {(rank + place) % size: needs((rank + place) % size, rank) for place in places}
        owners = {(rank - place) % size: needs(rank, (rank - place) % size) for place in places}
        steps.append(Step(rows_in(readers), rows_in(owners), owners))
    return tuple(steps)


Totals = dict[View, Tensor]  # sums in float32 of a tensor's rows


class Circulation(ParallelCall):
    """Rows of K and V go to the ranks whose queries see them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps = steps_of(self.call, self.shards, self.name == "ring", self.rank)

    def forward(self, work: Work) -> Pair:
        arriving = self.arriving("forward", self.fields.blocks, self.own(work)[1:])
        next(arriving)
        out, lse = work.forward()
        for step, came in zip(self.steps, arriving, strict=True):
            if self.keeps:
                self.kept.append(dict(sorted(came.items())))
            for owner, arrived in came.items():
                for part, tensors in zip(step.away[owner], arrived, strict=True):
                    work.merge_away(part, tensors, out, lse)
        return out, lse

    def backward(self, work: Work, results: Outputs) -> Gradients:
        """What others' rows add to dq, and what other ranks add to dk and dv, is summed in float32 and added once."""
        arriving = self.arriving("backward", self.fields.blocks, self.own(work)[1:])
        if self.keeps:
            arriving, self.kept = iter([{}, *self.kept]), []
        next(arriving)
        grads = work.backward(results)
        totals: list[Totals] = [{}, {}, {}]  # of dq, dk and dv
        before = NO_STEP, self.post("nothing of the", {}, {}, ())
        for number, (step, came) in enumerate(zip(self.steps, arriving, strict=True), 1):
            sums = {
                owner: self.gradients(work, results, step.away[owner], arrived, totals[0])
                for owner, arrived in came.items()
            }
            self.take_sums(*before, totals)
            before = step, self.post(f"hop {number} of the gradients'", sums, step.sends, self.fields.sums)
        self.take_sums(*before, totals)
        for grad, some, group in zip(grads, totals, (work.group, 1, 1), strict=True):
            for rows, total in some.items():
                rows.of(grad, group).add_(total)
        return grads

    # --- sums of their gradients ------------------------------------------------------------------------------------

    def gradients(
        self, work: Work, results: Outputs, parts: Iterable[Away], arrived: Iterable[Part], totals: Totals
    ) -> Tensor:
        """dK and dV of an owner's parts as a message to it; adds what they give to dq to the totals."""
        rows_there, fields = [part.rows for part in parts], self.fields.sums
        sums = torch.zeros(message_bytes(rows_there, fields), dtype=torch.uint8, device=work.own.q.device)
        for part, tensors, (dk_all, dv_all) in zip(parts, arrived, unpack(sums, rows_there, fields), strict=True):
            for whole in part.blocks:
                rows = whole.queries
                if rows not in totals:
                    like = rows.of(work.own.q, work.group)
                    totals[rows] = like.new_zeros(like.shape, dtype=self.call.sum_dtype)
                for block, (dq, dk, dv) in work.each([whole], Inputs(work.own.q, *tensors), results, (None, part.rows)):
                    block.queries.within(rows).of(totals[rows], work.group).add_(dq)
                    keys = block.keys.within(part.rows)
                    keys.of(dk_all).add_(dk)
                    keys.of(dv_all).add_(dv)
        return sums

    def take_sums(self, step: Step, coming: Coming, totals: list[Totals]) -> None:
        """Add what readers send home: readers of the same rows to one sum."""
        with coming as came:
            for reader, parts in came.items():
                for rows, some in zip(step.sends[reader], parts, strict=True):
                    for total, x in zip(totals[1:], some, strict=True):
                        total[rows] = total[rows].add_(x) if rows in total else x
