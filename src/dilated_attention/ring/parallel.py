"""One call over a group of ranks, as all of them have agreed on it: what `circulate` and `alltoall` share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.choose import Choice
from dilated_attention.backends.problem import Inputs
from dilated_attention.call import Call, sample_ends
from dilated_attention.distributed.group import GroupTransport, Pending
from dilated_attention.plan import SegmentHeads
from dilated_attention.ring.messages import Travelling
from dilated_attention.ring.shards import Shards


@dataclass(eq=False)
class ParallelCall:
    """What every exchange does with a call."""

    call: Call  # with this rank's place in the sequence
    transport: GroupTransport
    shards: Shards
    name: str  # of the exchange
    keeps: bool  # received rows, for the backward pass
    kept: list[Tensor] = field(default_factory=list)
    ends: Tensor | None = None  # (B,) where each sample ends on the last rank that has some of it
    keys_follow: bool = False  # whether this rank gets rows of others
    computed_remotely: SegmentHeads = frozenset()

    def __post_init__(self) -> None:
        self.rank, self.q_per_kv = self.transport.rank, self.call.q_per_kv

    def work(self, call: Call, inputs: Inputs, choice: Choice, backward: bool = False) -> Work:
        if not backward:
            self.ends = self._ends(inputs.padding)
        work = Work.of(
            call, inputs, choice, backward=backward, ends=self.ends, keys_follow=self.keys_follow,
            computed_remotely=self.computed_remotely,
        )  # fmt: skip
        self.fields = Travelling.of(work.k.dtype, self.q_per_kv, work.k.shape[3], work.padding is not None)
        return work

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

    def post(self, hop: str, sends: Mapping[int, Tensor], receives: Mapping[int, int]) -> Pending | None:
        """Begin a step, if there is something to send or to receive."""
        return self.transport.post(hop, sends, receives) if sends or receives else None


def own_tensors(work: Work) -> list[Tensor]:
    """q, k, v, and padding where there is any."""
    return [work.q, work.k, work.v, *([] if work.padding is None else [work.padding])]
