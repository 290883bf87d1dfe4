"""Keys and values of other ranks: blocks of rows that come and go while this rank computes, forward and backward.

One loop for `ring` and `allgather`, which differ in their routes only. In step t a rank computes with what arrived,
while step t + 1 is on its way. In the backward pass a second message follows each block: the sum of its dK and dV so
far, in float32, which the last user sends home.

Legend as in `blockwise` and `packing`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.problem import Gradients, Inputs, Outputs
from dilated_attention.distributed.group import Pending
from dilated_attention.merge import merge_
from dilated_attention.ring.parallel import ParallelCall, own_tensors
from dilated_attention.ring.routes import Part, traffic


class Circulation(ParallelCall):
    """Keys and values of other ranks come to this rank's queries."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.traffic = traffic(self.segments, self.name, self.call.is_causal, self.rank)

    def forward(self, work: Work) -> tuple[Tensor, Tensor]:
        steps = self.arriving("forward", work)
        next(steps)
        out, lse = work.forward()
        for parts in steps:
            for part in sorted(parts):
                blocks, sources = self.blocks(part, self.q_per_kv), self.sources(work, part, parts[part])
                for block, (seen, seen_lse) in work.each(blocks, sources):
                    merge_(block.queries.of(out, self.q_per_kv), block.queries.of(lse, self.q_per_kv), seen, seen_lse)
        return out, lse

    def backward(self, work: Work, results: Outputs) -> Gradients:
        """What other ranks' rows add is summed in float32 for each segment, and added once: like one more branch."""
        steps = self.replay() if self.keeps else self.arriving("backward", work)
        next(steps)
        grads = work.backward(results)
        mine, fields = [Part(index, self.rank) for index in range(len(self.segments))], self.fields.totals
        totals = [self.unpacked(part, self.empty(part, fields).zero_(), fields) for part in mine]
        pending: Pending | None = None
        for number, parts in enumerate(steps):
            sums = {
                part: self.gradients(work, results, part, parts[part], totals[part.segment][0])
                for part in sorted(parts)
            }
            if pending is not None:
                self.take_sums(number - 1, pending, totals, sums)
            hop = f"hop {number + 1} of the gradients' {self.name}"
            # the sums of the blocks of this step go on, or home
            pending = self.post(hop, self.traffic.sums[number], sums, self.fields.sums)
            sums.clear()
        if pending is not None:
            self.take_sums(-1, pending, totals, {})
        for index, packed in enumerate(totals):
            self.add(grads, index, packed)
        return grads

    # --- blocks -------------------------------------------------------------------------------------------------

    def arriving(self, direction: str, work: Work) -> Iterator[dict[Part, Tensor]]:
        """First nothing: the first step is on its way. Then the parts of each step, with the next one on its way."""
        steps, fields, own = self.traffic.blocks, self.fields.blocks, own_tensors(work)[1:]
        wanted = {part for step in steps[:1] for some in step.sends.values() for part in some}
        parts = {part: self.packed(part.segment, fields, own) for part in sorted(wanted)}

        def post(number: int) -> Pending | None:
            name = f"hop {number + 1} of the {direction} {self.name}"
            return self.post(name, steps[number], parts, fields) if number < len(steps) else None

        pending = post(0)
        yield {}
        passed_on: dict[int, Tensor] = {}
        for number, step in enumerate(steps):
            assert pending is not None
            messages = pending.wait()
            self.transport.release(passed_on)  # what came a step ago has now been sent on
            passed_on = messages
            self.kept += [messages[peer] for peer in sorted(messages) if self.keeps]
            parts = dict(self.parts(messages, step, fields))
            pending = post(number + 1)
            with torch.profiler.record_function(f"dilated_attention::{self.name} {direction} step {number + 1}"):
                yield parts
        self.transport.release(passed_on)

    def replay(self) -> Iterator[dict[Part, Tensor]]:
        """As `arriving`, with the messages that were kept."""
        waiting, self.kept = iter(self.kept), []
        yield {}
        for step in self.traffic.blocks:
            messages = {peer: next(waiting) for peer in sorted(step.receives)}
            yield dict(self.parts(messages, step, self.fields.blocks))

    def sources(self, work: Work, part: Part, packed: Tensor) -> Inputs:
        return Inputs(work.q, *self.unpacked(part, packed, self.fields.blocks))

    # --- sums of their gradients --------------------------------------------------------------------------------

    def gradients(self, work: Work, results: Outputs, part: Part, packed: Tensor, dq: Tensor) -> Tensor:
        """Add to the segment's dq, packed; give the part's dK and dV, packed."""
        sums = self.empty(part, self.fields.sums)
        dk_all, dv_all = self.unpacked(part, sums, self.fields.sums)
        blocks, sources = self.blocks(part, self.q_per_kv), self.sources(work, part, packed)
        for block, (dq_here, dk, dv) in work.each(blocks, sources, results):
            assert block.packed_queries is not None
            block.packed_queries.of(dq).add_(dq_here)
            block.keys.of(dk_all).copy_(dk)
            block.keys.of(dv_all).copy_(dv)
        return sums

    def take_sums(self, number: int, pending: Pending, totals: list[list[Tensor]], sums: dict[Part, Tensor]) -> None:
        """Add what came after a step: to the sums of the next step's blocks, or to those of this rank's own rows."""
        messages, fields = pending.wait(), self.fields.sums
        for part, packed in self.parts(messages, self.traffic.sums[number], fields):
            is_home = part.owner == self.rank
            before = totals[part.segment][1:] if is_home else self.unpacked(part, sums[part], fields)
            for total, more in zip(before, self.unpacked(part, packed, fields), strict=True):
                total.add_(more)
        self.transport.release(messages)
