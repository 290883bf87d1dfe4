"""One call over a group of ranks, as all of them have agreed on it: what `circulate` and `alltoall` share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.choose import Choice
from dilated_attention.backends.problem import Inputs
from dilated_attention.blocks import View
from dilated_attention.call import Call, sample_ends
from dilated_attention.distributed.group import GroupTransport, Pending
from dilated_attention.plan import Away, SegmentHeads
from dilated_attention.ring.messages import Fields, Part, Travelling, pack, rows_of, sizes_of, unpack
from dilated_attention.ring.shards import Shards


class Step(NamedTuple):
    """The rows of one step, by the other rank."""

    sends: dict[int, tuple[View, ...]]  # of this rank
    receives: dict[int, tuple[View, ...]]
    away: dict[int, tuple[Away, ...]]  # where those that come are keys: with the blocks of this rank's queries


NO_STEP = Step({}, {}, {})


@dataclass(eq=False)
class ParallelCall:
    """What every exchange does with a call."""

    call: Call  # with this rank's place in the sequence
    transport: GroupTransport
    shards: Shards
    name: str  # of the exchange
    keeps: bool  # received rows, for the backward pass
    kept: list[Any] = field(default_factory=list)
    ends: Tensor | None = None  # (B,) where each sample ends on the last rank that has some of it
    steps: tuple[Step, ...] = ()
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

    def arriving(self, direction: str, fields: Fields, tensors: Sequence[Tensor]) -> Iterator[dict[int, list[Part]]]:
        """First nothing: the first step is on its way. Then what came in each step, with the next one on its way."""
        packed: dict[tuple[View, ...], Tensor] = {}  # the last message: the next one may be equal

        def post(number: int, step: Step) -> Pending:
            sends = {}
            for peer, parts in step.sends.items():
                if parts not in packed:
                    packed.clear()
                    packed[parts] = pack([rows_of(tensors, rows, fields) for rows in parts], parts, fields)
                sends[peer] = packed[parts]
            hop = f"hop {number} of the {direction} {self.name}"
            return self.transport.post(hop, sends, sizes_of(step.receives, fields))

        posted = map(post, itertools.count(1), (*self.steps, NO_STEP))
        pending = next(posted)
        yield {}
        for number, step in enumerate(self.steps, 1):
            messages, pending = pending.wait(), next(posted)
            with torch.profiler.record_function(f"dilated_attention::{self.name} {direction} step {number}"):
                yield {peer: unpack(messages[peer], parts, fields) for peer, parts in step.receives.items()}
            self.transport.release(messages)


def own_tensors(work: Work) -> list[Tensor]:
    """q, k, v, and padding where there is any."""
    return [x for x in work.own if x is not None]
