"""Keys and values of other ranks: blocks of rows that come and go while this rank computes, forward and backward.

One loop for `ring` and `allgather`, which differ in their routes only. In step t a rank computes with what arrived,
while step t + 1 is on its way. In the backward pass a second message follows each block: the sum of its dK and dV so
far, in float32, which the last user sends home.

Legend as in `blockwise` and `packing`; a part is the rows of one shared segment that one owner holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.problem import Gradients, Inputs, Outputs
from dilated_attention.blocks import Block
from dilated_attention.distributed.group import Pending
from dilated_attention.merge import merge_
from dilated_attention.ring import packing
from dilated_attention.ring.packing import Fields
from dilated_attention.ring.parallel import ParallelCall, own_tensors
from dilated_attention.ring.routes import ROUTES, Route, Trip
from dilated_attention.ring.shards import SharedSegment


class Part(NamedTuple):
    """The rows of one shared segment that one owner holds."""

    segment: int  # which of this rank's
    owner: int


class Step(NamedTuple):
    """The parts that a rank sends and receives, by the other rank, in the order of its segments."""

    sends: dict[int, list[Part]]
    receives: dict[int, list[Part]]


class Traffic(NamedTuple):
    """All messages of a rank, the same on both of their ends."""

    blocks: tuple[Step, ...]
    sums: tuple[Step, ...]  # of the backward pass


@functools.lru_cache(maxsize=256)
def traffic(segments: tuple[SharedSegment, ...], exchange: str, is_causal: bool, rank: int) -> Traffic:
    routes = [ROUTES[exchange](segment.members, is_causal, rank) for segment in segments]
    trips = [trip for route in routes for trip in (*route.arrivals, *route.departures, *route.returns)]
    # a collective takes part on every rank, also where it moves nothing
    count = max((trip.step for trip in trips), default=int(exchange == "allgather"))

    def steps(sent: Callable[[Route], Iterable[Trip]], received: Callable[[Route], Iterable[Trip]]) -> tuple[Step, ...]:
        found = tuple(Step({}, {}) for _ in range(count))
        for index, route in enumerate(routes):
            for trip in sorted(sent(route)):
                found[trip.step - 1].sends.setdefault(trip.target, []).append(Part(index, trip.owner))
            for trip in sorted(received(route)):
                found[trip.step - 1].receives.setdefault(trip.source, []).append(Part(index, trip.owner))
        return found

    blocks = steps(lambda route: route.departures, lambda route: route.arrivals)
    return Traffic(blocks, steps(Route.sums_sent, Route.sums_received))


class Circulation(ParallelCall):
    """Keys and values of other ranks come to this rank's queries."""

    @property
    def traffic(self) -> Traffic:
        return traffic(self.segments, self.name, self.call.is_causal, self.rank)

    def forward(self, work: Work) -> tuple[Tensor, Tensor]:
        steps = self.arriving("forward", work)
        next(steps)
        out, lse = work.forward()
        for parts in steps:
            for part in sorted(parts):
                for block, (seen, seen_lse) in work.each(self.blocks_of(part), self.sources(work, part, parts[part])):
                    merge_(block.queries.of(out, self.q_per_kv), block.queries.of(lse, self.q_per_kv), seen, seen_lse)
        return out, lse

    def backward(self, work: Work, results: Outputs) -> Gradients:
        """What other ranks' rows add is summed in float32 for each segment, and added once: like one more branch."""
        steps = self.replay() if self.keeps else self.arriving("backward", work)
        next(steps)
        grads = work.backward(results)
        dtype, dim = self.fields.sums[0].dtype, work.q.shape[3]
        totals = [
            [
                work.q.new_zeros(1, self.rows(segment, self.rank) * heads, 1, dim, dtype=dtype)
                for heads in (self.q_per_kv, 1, 1)
            ]
            for segment in self.segments
        ]
        pending: Pending | None = None
        for number, parts in enumerate(steps):
            sums = {
                part: self.gradients(work, results, part, parts[part], totals[part.segment][0])
                for part in sorted(parts)
            }
            if pending is not None:
                self.take_sums(number - 1, pending, totals, sums)
            pending = self.post_sums(number, sums)
            sums.clear()
        if pending is not None:
            self.take_sums(-1, pending, totals, {})
        for segment, packed in zip(self.segments, totals, strict=True):
            self.add(grads, segment, packed)
        return grads

    # --- blocks -------------------------------------------------------------------------------------------------

    def arriving(self, direction: str, work: Work) -> Iterator[dict[Part, Tensor]]:
        """First nothing: the first step is on its way. Then the parts of each step, with the next one on its way."""
        steps, parts = self.traffic.blocks, self.own_parts(work)

        def post(number: int) -> Pending:
            return self.post(
                f"hop {number + 1} of the {direction} {self.name}", steps[number], parts, self.fields.blocks
            )

        pending = post(0) if steps else None
        yield {}
        passed_on: dict[int, Tensor] = {}
        for number, step in enumerate(steps):
            assert pending is not None
            messages = pending.wait()
            self.transport.release(passed_on, reuse=not self.keeps)  # what came a step ago has now been sent on
            passed_on = messages
            self.kept += [messages[peer] for peer in sorted(messages) if self.keeps]
            parts = dict(self.parts(messages, step, self.fields.blocks))
            pending = post(number + 1) if number + 1 < len(steps) else None
            with torch.profiler.record_function(f"dilated_attention::{self.name} {direction} step {number + 1}"):
                yield parts
        self.transport.release(passed_on, reuse=not self.keeps)

    def replay(self) -> Iterator[dict[Part, Tensor]]:
        """As `arriving`, with the messages that were kept."""
        waiting, self.kept = iter(self.kept), []
        yield {}
        for step in self.traffic.blocks:
            messages = {peer: next(waiting) for peer in sorted(step.receives)}
            yield dict(self.parts(messages, step, self.fields.blocks))

    def own_parts(self, work: Work) -> dict[Part, Tensor]:
        """This rank's rows, packed, of each segment in which someone needs them."""
        wanted = {part for step in self.traffic.blocks[:1] for parts in step.sends.values() for part in parts}
        tensors = own_tensors(work)[1:]
        return {part: self.packed(self.segments[part.segment], self.fields.blocks, tensors) for part in sorted(wanted)}

    def blocks_of(self, part: Part) -> tuple[Block, ...]:
        return self.blocks(self.segments[part.segment], part.owner, self.q_per_kv)

    def sources(self, work: Work, part: Part, packed: Tensor) -> Inputs:
        return Inputs(work.q, *self.unpacked(part, packed, self.fields.blocks))

    # --- sums of their gradients --------------------------------------------------------------------------------

    def gradients(self, work: Work, results: Outputs, part: Part, packed: Tensor, dq: Tensor) -> Tensor:
        """Add to the segment's dq, packed; give the part's dK and dV, packed."""
        sums = self.empty(self.fields.sums, self.rows_of(part))
        dk_all, dv_all = self.unpacked(part, sums, self.fields.sums)
        for block, parts in work.each(self.blocks_of(part), self.sources(work, part, packed), results):
            assert block.packed_queries is not None
            block.packed_queries.of(dq).add_(parts[0])
            block.keys.of(dk_all).copy_(parts[1])
            block.keys.of(dv_all).copy_(parts[2])
        return sums

    def post_sums(self, number: int, sums: dict[Part, Tensor]) -> Pending:
        """Send the sums of the blocks used in this step on, or home."""
        hop = f"hop {number + 1} of the gradients' {self.name}"
        return self.post(hop, self.traffic.sums[number], sums, self.fields.sums)

    def take_sums(self, number: int, pending: Pending, totals: list[list[Tensor]], sums: dict[Part, Tensor]) -> None:
        """Add what came after a step: to the sums of the next step's blocks, or to those of this rank's own rows."""
        messages, fields = pending.wait(), self.fields.sums
        for part, packed in self.parts(messages, self.traffic.sums[number], fields):
            is_home = part.owner == self.rank
            before = totals[part.segment][1:] if is_home else self.unpacked(part, sums[part], fields)
            for total, more in zip(before, self.unpacked(part, packed, fields), strict=True):
                total.add_(more)
        self.transport.release(messages)

    # --- messages -----------------------------------------------------------------------------------------------

    def post(self, hop: str, step: Step, parts: Mapping[Part, Tensor], fields: Fields) -> Pending:
        """Equal messages are joined once."""
        joined = {some: packing.join([parts[part] for part in some]) for some in map(tuple, step.sends.values())}
        sends = {peer: joined[tuple(some)] for peer, some in step.sends.items()}
        sizes = {peer: sum(self.size(part, fields) for part in some) for peer, some in step.receives.items()}
        return self.transport.post(hop, sends, sizes, collective=self.name == "allgather")

    def parts(self, messages: Mapping[int, Tensor], step: Step, fields: Fields) -> list[tuple[Part, Tensor]]:
        """What came, part by part."""
        return [
            found
            for peer, some in step.receives.items()
            for found in zip(some, torch.split(messages[peer], [self.size(part, fields) for part in some]), strict=True)
        ]

    def unpacked(self, part: Part, packed: Tensor, fields: Fields) -> list[Tensor]:
        return packing.unpack(packed, fields, self.rows_of(part))

    def size(self, part: Part, fields: Fields) -> int:
        return packing.part_bytes(fields, self.rows_of(part))

    def rows_of(self, part: Part) -> int:
        return self.rows(self.segments[part.segment], part.owner)
