"""Keys and values of other ranks: blocks of rows that come and go while this rank computes, forward and backward.

One loop for `ring` and `allgather`, which differ in their routes only. In step t a rank computes with what arrived,
while step t + 1 is on its way. In the backward pass a second message follows each block: the sum of its dK and dV so
far, in float32, which the last user sends home.

Legend as in `blockwise` and `packing`; a part is the rows of one shared that one owner holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.problem import Inputs, Outputs
from dilated_attention.blocks import Block
from dilated_attention.distributed.group import GroupTransport, Pending
from dilated_attention.merge import merge_
from dilated_attention.ring import packing
from dilated_attention.ring.packing import Expected, Fields, Travelling
from dilated_attention.ring.routes import ROUTES, Route, Trip
from dilated_attention.ring.shards import Shards, SharedSegment


class Part(NamedTuple):
    """The rows of one shared that one owner holds."""

    shared: int  # which of this rank's shared_segments
    owner: int


Messages = dict[int, tuple[Part, ...]]  # by the other rank


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a rank sends and receives in each step (index 0 is step 1): blocks, and in the backward pass their sums."""

    sends: tuple[Messages, ...]
    receives: tuple[Messages, ...]
    sum_sends: tuple[Messages, ...]
    sum_receives: tuple[Messages, ...]

    @property
    def steps(self) -> int:
        return len(self.sends)


@functools.lru_cache(maxsize=256)
def traffic(shared_segments: tuple[SharedSegment, ...], exchange: str, is_causal: bool, rank: int) -> Traffic:
    """All messages of a rank, the same on both of their ends: parts in the order of the shared_segments."""
    routes = [ROUTES[exchange](shared.members, is_causal, rank) for shared in shared_segments]
    trips = [trip for route in routes for trip in (*route.arrivals, *route.departures, *route.returns)]
    # a collective takes part on every rank, also where it moves nothing
    steps = max((trip.step for trip in trips), default=int(exchange == "allgather"))

    def messages(trips: Callable[[Route], Iterable[Trip]], outgoing: bool) -> tuple[Messages, ...]:
        found: list[dict[int, list[Part]]] = [{} for _ in range(steps)]
        for index, route in enumerate(routes):
            for trip in sorted(trips(route), key=lambda trip: (trip.step, trip.owner)):
                other = trip.target if outgoing else trip.source
                found[trip.step - 1].setdefault(other, []).append(Part(index, trip.owner))
        return tuple({other: tuple(parts) for other, parts in step.items()} for step in found)

    return Traffic(
        messages(lambda route: route.departures, True),
        messages(lambda route: route.arrivals, False),
        messages(Route.sums_sent, True),
        messages(Route.sums_received, False),
    )


@dataclass
class Exchange:
    """One rank's part in the exchange of one call."""

    work: Work
    transport: GroupTransport
    shards: Shards
    shared_segments: tuple[SharedSegment, ...]
    name: str  # ring or allgather

    def __post_init__(self) -> None:
        work, call = self.work, self.work.call
        self.rank, self.samples, self.group = self.transport.rank, call.samples, call.q_per_kv
        self.traffic = traffic(self.shared_segments, self.name, call.is_causal, self.rank)
        travelling = Travelling.of(work.k.dtype, call.q_per_kv, work.k.shape[3], work.padding is not None)
        self.fields, self.sum_fields = travelling.blocks, travelling.sums

    # --- forward ------------------------------------------------------------------------------------------------

    def forward(self, keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        """out, lse, and the received messages if they are to be kept for the backward pass."""
        kept: list[Tensor] = []
        state: list[Tensor] = []

        def own() -> None:
            state.extend(self.work.forward())

        def visit(part: Part, packed: Tensor) -> None:
            self.visit(state[0], state[1], part, packed)

        for messages in self.circulate("forward", own, visit, keep):
            if keep:
                kept += [messages[peer] for peer in sorted(messages)]
        return state[0], state[1], kept

    def circulate(
        self, direction: str, own: Callable[[], None], visit: Callable[[Part, Tensor], None], keep: bool = False
    ) -> Iterable[dict[int, Tensor]]:
        """Post a step, compute the one before; gives each step's messages after they were used."""
        if not self.traffic.steps:
            own()
            return
        pending = self.post(direction, 1, self.own_parts())
        own()
        passed_on: dict[int, Tensor] = {}
        for step in range(1, self.traffic.steps + 1):
            messages = pending.wait()
            self.transport.release(passed_on, reuse=not keep)  # what came a step ago has now been sent on
            passed_on = messages
            parts = dict(self.parts(messages, self.traffic.receives[step - 1], self.fields))
            if step < self.traffic.steps:
                pending = self.post(direction, step + 1, parts)
            with torch.profiler.record_function(f"dilated_attention::{self.name} {direction} step {step}"):
                for part in sorted(parts):
                    visit(part, parts[part])
            yield messages
        self.transport.release(passed_on, reuse=not keep)

    def post(self, direction: str, step: int, parts: dict[Part, Tensor]) -> Pending:
        sends, receives = self.traffic.sends[step - 1], self.traffic.receives[step - 1]
        return self._post(f"hop {step} of the {direction} {self.name}", sends, receives, parts, self.fields)

    def _post(
        self, hop: str, sends: Messages, receives: Messages, parts: dict[Part, Tensor], fields: Fields
    ) -> Pending:
        sizes = packing.totals(self.expected(receives, fields))
        return self.transport.post(hop, _joined(sends, parts), sizes, collective=self.name == "allgather")

    def own_parts(self) -> dict[Part, Tensor]:
        """This rank's rows, packed, of each shared in which someone needs them."""
        wanted = {part for step in self.traffic.sends[:1] for parts in step.values() for part in parts}
        found = {}
        tensors = [self.work.k, self.work.v]
        if self.work.padding is not None:
            tensors.append(self.work.padding)
        for part in sorted(wanted):
            packed = torch.empty(self.size(part, self.fields), dtype=torch.uint8, device=self.work.k.device)
            packing.pack(packed, self.fields, self.rows(part), self.blocks(part, 1), tensors)
            found[part] = packed
        return found

    def rows(self, part: Part) -> int:
        return self.samples * self.shared_segments[part.shared].packed_rows(self.shards, part.owner)

    def size(self, part: Part, fields: Fields) -> int:
        return packing.part_bytes(fields, self.rows(part))

    def expected(self, messages: Messages, fields: Fields) -> list[Expected]:
        return [Expected(peer, self.size(part, fields)) for peer, parts in messages.items() for part in parts]

    def parts(self, messages: dict[int, Tensor], receives: Messages, fields: Fields) -> list[tuple[Part, Tensor]]:
        """What came, part by part."""
        which = [part for parts in receives.values() for part in parts]
        return list(zip(which, packing.split(messages, self.expected(receives, fields)), strict=True))

    def blocks(self, part: Part, group: int) -> tuple[Block, ...]:
        """This rank's queries with the keys of a part."""
        where = (self.shards, self.rank, part.owner, self.samples)
        return packing.packed_blocks(self.shared_segments[part.shared], *where, group)

    def sources(self, part: Part, packed: Tensor) -> Inputs:
        return Inputs(self.work.q, *packing.unpack(packed, self.fields, self.rows(part)))

    def visit(self, out: Tensor, lse: Tensor, part: Part, packed: Tensor) -> None:
        """Merge what this rank's queries see in a part."""
        blocks, sources = self.blocks(part, self.group), self.sources(part, packed)
        for block, (seen, seen_lse) in self.work.each(blocks, sources):
            merge_(block.queries.of(out, self.group), block.queries.of(lse, self.group), seen, seen_lse)

    # --- backward -----------------------------------------------------------------------------------------------

    def backward(self, results: Outputs, kept: list[Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's rows. ``kept``: the messages of the forward pass; None: they travel again.

        What other ranks' rows add is summed in float32 for each shared, and added once: like one more branch.
        """
        grads: list[Tensor] = []
        sums: dict[Part, Tensor] = {}
        own_sums: dict[int, list[Tensor]] = {}  # by shared: dq, and when they have come home dk, dv
        pending: Pending | None = None

        def own() -> None:
            grads.extend(self.work.backward(results))

        def visit(part: Part, packed: Tensor) -> None:
            dq = own_sums.setdefault(part.shared, [self.zeros(part.shared, self.group)])[0]
            sums[part] = self.visit_backward(dq, results, part, packed)

        steps = self.circulate("backward", own, visit) if kept is None else self.replay(kept, own, visit)
        for step, _ in enumerate(steps, 1):
            if pending is not None:
                self.take_sums(step - 1, pending, sums, own_sums)
            pending = self.post_sums(step, sums)
        if pending is not None:
            self.take_sums(self.traffic.steps, pending, sums, own_sums)
        self.add_home(grads, own_sums)
        return grads[0], grads[1], grads[2]

    def zeros(self, shared: int, heads: int = 1) -> Tensor:
        """A sum over this rank's rows of a shared, packed."""
        rows = self.rows(Part(shared, self.rank)) * heads
        return self.work.q.new_zeros(1, rows, 1, self.work.q.shape[3], dtype=self.sum_fields[0].dtype)

    def add_home(self, grads: list[Tensor], own_sums: dict[int, list[Tensor]]) -> None:
        for shared, packed in own_sums.items():
            for grad, x, group in zip(grads, packed, (self.group, 1, 1), strict=False):
                for block in self.blocks(Part(shared, self.rank), group):
                    assert block.home is not None
                    block.queries.of(grad, group).add_(block.home.of(x))

    def replay(
        self, kept: list[Tensor], own: Callable[[], None], visit: Callable[[Part, Tensor], None]
    ) -> Iterable[dict[int, Tensor]]:
        """As `circulate`, with the messages that were kept."""
        waiting = iter(kept)
        own()
        for receives in self.traffic.receives:
            messages = {peer: next(waiting) for peer in sorted(receives)}
            parts = dict(self.parts(messages, receives, self.fields))
            for part in sorted(parts):
                visit(part, parts[part])
            yield messages

    def visit_backward(self, dq: Tensor, results: Outputs, part: Part, packed: Tensor) -> Tensor:
        """Add to the shared's dq, packed; give the part's dK and dV, packed."""
        sums = torch.empty(self.size(part, self.sum_fields), dtype=torch.uint8, device=packed.device)
        dk_all, dv_all = packing.unpack(sums, self.sum_fields, self.rows(part))
        blocks, sources = self.blocks(part, self.group), self.sources(part, packed)
        for block, (dq_part, dk, dv) in self.work.each(blocks, sources, results):
            assert block.home is not None
            block.home.of(dq).add_(dq_part)
            block.keys.of(dk_all).copy_(dk)
            block.keys.of(dv_all).copy_(dv)
        return sums

    def post_sums(self, step: int, sums: dict[Part, Tensor]) -> Pending:
        """Send the sums of the blocks used in this step on, or home."""
        sends, receives = self.traffic.sum_sends[step - 1], self.traffic.sum_receives[step - 1]
        hop = f"hop {step} of the gradients' {self.name}"
        pending = self._post(hop, sends, receives, sums, self.sum_fields)
        for part in {part for parts in sends.values() for part in parts}:
            del sums[part]
        return pending

    def take_sums(
        self, step: int, pending: Pending, sums: dict[Part, Tensor], own_sums: dict[int, list[Tensor]]
    ) -> None:
        """Add what came after a step: to the sums of the next step's blocks, or to those of this rank's own rows."""
        messages = pending.wait()
        for part, packed in self.parts(messages, self.traffic.sum_receives[step - 1], self.sum_fields):
            if part.owner == self.rank:
                found = own_sums.setdefault(part.shared, [self.zeros(part.shared, self.group)])
                if len(found) == 1:
                    found += [self.zeros(part.shared), self.zeros(part.shared)]
                totals = found[1:]
            else:
                totals = packing.unpack(sums[part], self.sum_fields, self.rows(part))
            for total, more in zip(totals, packing.unpack(packed, self.sum_fields, self.rows(part)), strict=True):
                total.add_(more)
        self.transport.release(messages)


def _joined(messages: Messages, parts: dict[Part, Tensor]) -> dict[int, Tensor]:
    """The bytes for each rank; equal messages are joined once."""
    done: dict[tuple[Part, ...], Tensor] = {}
    for some in messages.values():
        if some not in done:
            done[some] = packing.join([parts[part] for part in some])
    return {peer: done[some] for peer, some in messages.items()}
