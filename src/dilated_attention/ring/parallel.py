"""One call over a group of ranks, as all of them have agreed on it: what is computed where, and this rank's rows.

Legend: R rows of all heads that a rank owns in a shared segment, B samples; G query heads per key/value head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.choose import Choice
from dilated_attention.backends.problem import Inputs
from dilated_attention.backends.run import OneDevice
from dilated_attention.blocks import Block, SegmentHeads
from dilated_attention.call import Call, sample_ends
from dilated_attention.distributed.group import GroupTransport, Pending
from dilated_attention.ring import packing
from dilated_attention.ring.packing import Fields, Travelling
from dilated_attention.ring.routes import Part, Step
from dilated_attention.ring.shards import Shards, shared_segments


@dataclass(eq=False)
class ParallelCall(OneDevice):
    """Where no segment lies on two ranks, each computes its own. `circulate` and `alltoall` have the others."""

    call: Call  # with this rank's place in the sequence
    transport: GroupTransport
    shards: Shards
    name: str  # of the exchange
    keeps: bool  # received rows, for the backward pass
    kept: list[Tensor] = field(default_factory=list)
    ends: Tensor | None = None  # (B,) where each sample ends on the last rank that has some of it

    def __post_init__(self) -> None:
        call, self.rank = self.call, self.transport.rank
        self.samples, self.q_per_kv = call.samples, call.q_per_kv
        self.segments = shared_segments(call.dilated, self.shards, call.held, self.rank)

    def work(self, call: Call, inputs: Inputs, choice: Choice, backward: bool = False) -> Work:
        if not backward:
            self.ends = self._ends(inputs.padding)
        work = Work.of(
            call, inputs, choice, backward=backward, ends=self.ends, keys_follow=bool(self.segments),
            computed_remotely=self.computed_remotely(),
        )  # fmt: skip
        self.fields = Travelling.of(work.k.dtype, self.q_per_kv, work.k.shape[3], work.padding is not None)
        return work

    def computed_remotely(self) -> SegmentHeads:
        return frozenset()

    def _ends(self, padding: Tensor | None) -> Tensor | None:
        """Only zero keys ask for them."""
        if padding is None or not self.call.adds_zeros:
            return None
        here = sample_ends(padding, self.call.start)
        if not here.numel():
            return here
        for other in self.transport.post_all("the ends of the samples", here.view(torch.uint8)).wait().values():
            here = torch.maximum(here, other.view(torch.int64).to(self.call.device))
        return here

    # --- this rank's rows of a segment --------------------------------------------------------------------------

    def blocks(self, part: Part, q_per_kv: int, zeros: tuple[int, ...] = ()) -> tuple[Block, ...]:
        """This rank's queries with the part's keys."""
        segment, start = self.segments[part.segment], self.call.start
        return packing.packed_blocks(segment, self.rank, start, part.owner, self.samples, q_per_kv, zeros)

    def packed(self, index: int, fields: Fields, tensors: Sequence[Tensor]) -> Tensor:
        """This rank's rows of (B, n, H, D) tensors, one per field, as bytes."""
        part = Part(index, self.rank)
        packed, blocks = self.empty(part, fields), self.blocks(part, max(x.heads for x in fields))
        for place, one, x in zip(self.unpacked(part, packed, fields), fields, tensors, strict=True):
            for block in blocks:
                view = block.keys if one.heads == 1 or block.packed_queries is None else block.packed_queries
                view.of(place).copy_(block.queries.of(x, one.heads))
        return packed

    def add(self, grads: Sequence[Tensor], index: int, packed: Sequence[Tensor]) -> None:
        """Add what is packed of dq, dk and dv to this rank's rows of them."""
        for grad, x, heads in zip(grads, packed, (self.q_per_kv, 1, 1), strict=True):
            for block in self.blocks(Part(index, self.rank), heads):
                assert block.packed_queries is not None
                block.queries.of(grad, heads).add_(block.packed_queries.of(x))

    # --- parts and messages -------------------------------------------------------------------------------------

    def rows(self, part: Part) -> int:
        return self.samples * self.segments[part.segment].packed_rows(part.owner)

    def size(self, part: Part, fields: Fields) -> int:
        return packing.part_bytes(fields, self.rows(part))

    def empty(self, part: Part, fields: Fields) -> Tensor:
        return torch.empty(self.size(part, fields), dtype=torch.uint8, device=self.call.device)

    def unpacked(self, part: Part, packed: Tensor, fields: Fields) -> list[Tensor]:
        return packing.unpack(packed, fields, self.rows(part))

    def post(self, hop: str, step: Step, parts: Mapping[Part, Tensor], fields: Fields) -> Pending:
        """Equal messages are joined once; a single part is sent as it lies."""
        joined = {
            some: torch.cat([parts[part] for part in some]) if len(some) > 1 else parts[some[0]]
            for some in map(tuple, step.sends.values())
        }
        sends = {peer: joined[tuple(some)] for peer, some in step.sends.items()}
        sizes = {peer: sum(self.size(part, fields) for part in some) for peer, some in step.receives.items()}
        return self.transport.post(hop, sends, sizes)

    def parts(self, messages: Mapping[int, Tensor], step: Step, fields: Fields) -> list[tuple[Part, Tensor]]:
        """What came, part by part. Sums of one part may come from several ranks."""
        sizes = {peer: [self.size(part, fields) for part in some] for peer, some in step.receives.items()}
        return [
            arrived
            for peer, some in step.receives.items()
            for arrived in zip(some, torch.split(messages[peer], sizes[peer]), strict=True)
        ]


def own_tensors(work: Work) -> list[Tensor]:
    """q, k, v, and padding where there is any."""
    return [work.q, work.k, work.v, *([] if work.padding is None else [work.padding])]
