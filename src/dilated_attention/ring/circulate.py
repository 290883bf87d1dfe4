"""Keys and values of other ranks come to this rank's queries while it computes, forward and backward.

`away` lists the rows of one rank that the queries of another need: the reader and the owner make the same list. They go
straight from the owner to the reader. On a ring step t is with the ranks t places before and after; in an all-gather
one step is with all. While a rank computes with what arrived, the next step is on its way. In the backward pass the
gradients of these rows go straight home, in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.problem import Gradients, Inputs, Outputs, Pair
from dilated_attention.blocks import View
from dilated_attention.call import Call
from dilated_attention.distributed.group import Pending
from dilated_attention.merge import merge_
from dilated_attention.plan import Away, away
from dilated_attention.ring.messages import message_bytes, pack, rows_of, shape_of, sizes_of, unpack
from dilated_attention.ring.parallel import ParallelCall, own_tensors
from dilated_attention.ring.shards import Shards


class Step(NamedTuple):
    """What one step is about, by the other rank."""

    readers: dict[int, tuple[View, ...]]  # this rank's rows that each of them needs
    owners: dict[int, tuple[Away, ...]]  # their rows that this rank needs, with the blocks of its queries


NO_STEP = Step({}, {})


@functools.lru_cache(maxsize=256)
def steps_of(call: Call, shards: Shards, is_ring: bool, rank: int) -> tuple[Step, ...]:
    """All steps of a rank. Steps without messages are there too: all ranks count alike."""

    def needs(reader: int, owner: int) -> tuple[Away, ...]:
        (start, stop), (first, last) = shards.of_rank(reader), shards.of_rank(owner)
        return away(call._replace(start=start, queries=stop - start, key_start=0, keys=0), first, last - first)

    size, found = shards.ranks, []
    for places in [(place,) for place in range(1, size)] if is_ring else [range(1, size)]:
        readers = {(rank + place) % size: needs((rank + place) % size, rank) for place in places}
        owners = {(rank - place) % size: needs(rank, (rank - place) % size) for place in places}
        rows = {reader: tuple(part.rows for part in parts) for reader, parts in readers.items() if parts}
        found.append(Step(rows, {owner: parts for owner, parts in owners.items() if parts}))
    return tuple(found)


Totals = dict[View, Tensor]  # sums in float32 of a tensor's rows


class Circulation(ParallelCall):
    """Rows of K and V go to the ranks whose queries see them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps = steps_of(self.call, self.shards, self.name == "ring", self.rank)
        self.keys_follow = any(step.owners for step in self.steps)

    def forward(self, work: Work) -> Pair:
        arriving = self.arriving("forward", work)
        next(arriving)
        out, lse = work.forward()
        for step, messages in zip(self.steps, arriving, strict=True):
            for owner, message in messages.items():
                parts = step.owners[owner]
                arrived = unpack(message, [part.rows for part in parts], self.fields.blocks)
                for part, tensors in zip(parts, arrived, strict=True):
                    results = work.each(part.blocks, Inputs(work.q, *tensors), None, (None, part.rows))
                    for block, (seen, seen_lse) in results:
                        here, here_lse = (block.queries.of(x, self.q_per_kv) for x in (out, lse))
                        merge_(here, here_lse, seen, seen_lse)
        return out, lse

    def backward(self, work: Work, results: Outputs) -> Gradients:
        """What others' rows add to dq, and what other ranks add to dk and dv, is summed in float32 and added once."""
        arriving = self.replay() if self.keeps else self.arriving("backward", work)
        next(arriving)
        grads = work.backward(results)
        totals: tuple[Totals, Totals, Totals] = {}, {}, {}
        before: tuple[Step, Pending | None] = NO_STEP, None
        for number, (step, messages) in enumerate(zip(self.steps, arriving, strict=True), 1):
            sums = {
                owner: self.gradients(work, results, step.owners[owner], message, totals[0])
                for owner, message in messages.items()
            }
            self.take_sums(*before, totals)
            pending = self.post(
                f"hop {number} of the gradients' {self.name}", sums, sizes_of(step.readers, self.fields.sums)
            )
            before = step, pending
        self.take_sums(*before, totals)
        for grad, some, group in zip(grads, totals, (self.q_per_kv, 1, 1), strict=True):
            for rows, total in some.items():
                rows.of(grad, group).add_(total)
        return grads

    # --- rows of K and V --------------------------------------------------------------------------------------------

    def arriving(self, direction: str, work: Work) -> Iterator[dict[int, Tensor]]:
        """First nothing: the first step is on its way. Then what came in each step, with the next one on its way."""
        own, fields = own_tensors(work)[1:], self.fields.blocks

        packed: dict[tuple[View, ...], Tensor] = {}  # the last message: the next one may be equal

        def post(number: int) -> Pending | None:
            readers, owners = self.steps[number] if number < len(self.steps) else NO_STEP
            sends = {}
            for reader, parts in readers.items():
                if parts not in packed:
                    packed.clear()
                    packed[parts] = pack([rows_of(own, rows, fields) for rows in parts], parts, fields)
                sends[reader] = packed[parts]
            rows = {owner: [part.rows for part in parts] for owner, parts in owners.items()}
            return self.post(f"hop {number + 1} of the {direction} {self.name}", sends, sizes_of(rows, fields))

        pending = post(0)
        yield {}
        for number in range(len(self.steps)):
            messages = {} if pending is None else pending.wait()
            self.kept += [messages[owner] for owner in sorted(messages) if self.keeps]
            pending = post(number + 1)
            with torch.profiler.record_function(f"dilated_attention::{self.name} {direction} step {number + 1}"):
                yield messages
            self.transport.release(messages)

    def replay(self) -> Iterator[dict[int, Tensor]]:
        """As `arriving`, with the messages that were kept."""
        waiting, self.kept = iter(self.kept), []
        yield {}
        for step in self.steps:
            yield {owner: next(waiting) for owner in sorted(step.owners)}

    # --- sums of their gradients ------------------------------------------------------------------------------------

    def gradients(
        self, work: Work, results: Outputs, parts: tuple[Away, ...], message: Tensor, totals: Totals
    ) -> Tensor:
        """dK and dV of an owner's parts as a message to it; adds what they give to dq to the totals."""
        rows_there, fields = [part.rows for part in parts], self.fields.sums
        sums = torch.zeros(message_bytes(rows_there, fields), dtype=torch.uint8, device=message.device)
        arrived, made = unpack(message, rows_there, self.fields.blocks), unpack(sums, rows_there, fields)
        for part, tensors, (dk_all, dv_all) in zip(parts, arrived, made, strict=True):
            for whole in part.blocks:
                rows = whole.queries
                if rows not in totals:
                    samples, count, heads = shape_of(rows)
                    size = samples, count, heads * self.q_per_kv, work.q.shape[3]
                    totals[rows] = work.q.new_zeros(size, dtype=self.call.sum_dtype)
                for block, (dq, dk, dv) in work.each([whole], Inputs(work.q, *tensors), results, (None, part.rows)):
                    block.queries.within(rows).of(totals[rows], self.q_per_kv).add_(dq)
                    keys = block.keys.within(part.rows)
                    keys.of(dk_all).add_(dk)
                    keys.of(dv_all).add_(dv)
        return sums

    def take_sums(self, step: Step, pending: Pending | None, totals: tuple[Totals, Totals, Totals]) -> None:
        """Add what readers send home: readers of the same rows to one sum."""
        messages = {} if pending is None else pending.wait()
        for reader, message in messages.items():
            parts = step.readers[reader]
            for rows, some in zip(parts, unpack(message, parts, self.fields.sums), strict=True):
                for total, x in zip(totals[1:], some, strict=True):
                    total[rows] = total[rows].add_(x) if rows in total else x
        self.transport.release(messages)
