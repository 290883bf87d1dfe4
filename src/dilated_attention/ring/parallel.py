"""What all exchanges share: rows as bytes, and the steps in which they are sent.

A message has parts, each some rows of some heads in one view. It holds all parts of one field, then all of the next
one, widest numbers first: so every number is aligned.

Legend: a part (b, L, h): so many samples, rows of each, and key/value heads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.choose import Choice
from dilated_attention.backends.problem import Inputs
from dilated_attention.blocks import View
from dilated_attention.call import Call, accumulate_dtype, sample_ends
from dilated_attention.checks import Ints
from dilated_attention.distributed.group import GroupTransport, Waiting
from dilated_attention.plan import Away, SegmentHeads
from dilated_attention.ring.shards import Shards


class Field(NamedTuple):
    """One tensor of a part: its dtype, and how many heads per key/value head and which trailing sizes it has."""

    dtype: torch.dtype
    heads: int = 1
    sizes: Ints = ()

    @property
    def bytes_per_row(self) -> int:
        return self.heads * math.prod(self.sizes) * self.dtype.itemsize


Fields = tuple[Field, ...]
Part = tuple[Tensor, ...]  # one tensor per field
Came = dict[int, list[Part]]  # by the rank that sent them
Coming = AbstractContextManager[Came]  # which waits for them; after it their memory is free


class Travelling(NamedTuple):
    """What travels in each kind of message."""

    blocks: Fields  # ring and allgather: K and V, and padding if there is any;
    sums: Fields  # in the backward pass their gradients
    inputs: Fields  # alltoall: q, k, v, padding
    results: Fields  # and back lse, out;
    rows: Fields  # in the backward pass dlse if there is one, lse, dout, out,
    gradients: Fields  # and back dq, dk, dv

    @classmethod
    def of(cls, dtype: torch.dtype, q_per_kv: int, head_dim: int, has_padding: bool) -> Travelling:
        """``q_per_kv`` query heads to a key/value head."""
        exact, dim = accumulate_dtype(dtype), (head_dim,)
        queries, keys, column = Field(dtype, q_per_kv, dim), Field(dtype, 1, dim), Field(exact, q_per_kv)
        blocks = (keys, keys, Field(torch.bool)) if has_padding else (keys, keys)
        sums, rows = (Field(exact, 1, dim),) * 2, (column, column, queries, queries)
        return cls(blocks, sums, (queries, *blocks), (column, queries), rows, (queries, keys, keys))


def shape_of(rows: View) -> tuple[int, int, int]:
    return rows.samples * rows.segments, rows.rows, rows.heads


def row_bytes(fields: Fields) -> int:
    """Of one key/value head and its query heads."""
    return sum(field.bytes_per_row for field in fields)


def message_bytes(parts: Iterable[View], fields: Fields) -> int:
    return sum(math.prod(shape_of(rows)) for rows in parts) * row_bytes(fields)


def unpack(message: Tensor, parts: Sequence[View], fields: Fields) -> list[Part]:
    """Views of a message's bytes: for each part the tensors of its fields, (b, L, heads, ...)."""
    shapes = [shape_of(rows) for rows in parts]
    sizes = [math.prod(shape) * field.bytes_per_row for field in fields for shape in shapes]
    pieces = iter(message.split_with_sizes(sizes))
    columns = [
        [next(pieces).view(field.dtype).view(b, rows, heads * field.heads, *field.sizes) for b, rows, heads in shapes]
        for field in fields
    ]
    return [*zip(*columns, strict=True)]


def pack(tensors: Sequence[Part], parts: Sequence[View], fields: Fields) -> Tensor:
    """One message: for each part the tensors of its fields, which may be views with any strides."""
    message = torch.empty(message_bytes(parts, fields), dtype=torch.uint8, device=tensors[0][0].device)
    for places, some in zip(unpack(message, parts, fields), tensors, strict=True):
        for place, x in zip(places, some, strict=True):
            place.copy_(x)
    return message


def rows_of(tensors: Sequence[Tensor], rows: View, fields: Fields) -> Part:
    """A part of (B, n, H, ...) tensors, one per field."""
    return tuple(rows.of(x, field.heads) for x, field in zip(tensors, fields, strict=True))


# --- steps ------------------------------------------------------------------------------------------------------------


Peers = dict[int, tuple[View, ...]]  # rows by the other rank


class Step(NamedTuple):
    """What one step is about."""

    sends: Peers  # rows of this rank
    receives: Peers
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
    computed_remotely: SegmentHeads = frozenset()

    def __post_init__(self) -> None:
        self.rank = self.transport.rank

    def of(self, call: Call, inputs: Inputs, choice: Choice, backward: bool = False) -> Work:
        if not backward and inputs.padding is not None and call.adds_zeros and call.samples:  # zero keys ask for ends
            ends = sample_ends(inputs.padding, call.start)
            self.ends = torch.stack(self.transport.from_all("the ends of the samples", ends)).amax(0)
        work = Work.of(
            call, inputs, choice, backward=backward, ends=self.ends, computed_remotely=self.computed_remotely,
            keys_follow=any(step.receives for step in self.steps),
        )  # fmt: skip
        self.fields = Travelling.of(work.own.k.dtype, call.q_per_kv, work.own.k.shape[3], work.own.padding is not None)
        return work

    @staticmethod
    def own(work: Work) -> list[Tensor]:
        """q, k, v, and padding where there is any."""
        return [x for x in work.own[:4] if x is not None]

    def post(self, hop: str, messages: dict[int, Tensor], receives: Peers, fields: Fields) -> Coming:
        """Begin a step."""
        sizes = {peer: message_bytes(parts, fields) for peer, parts in receives.items()}
        return self._received(self.transport.post(f"{hop} {self.name}", messages, sizes), receives, fields)

    @contextmanager
    def _received(self, wait: Waiting, receives: Peers, fields: Fields) -> Iterator[Came]:
        messages = wait()
        yield {peer: unpack(messages[peer], parts, fields) for peer, parts in receives.items()}
        self.transport.stats.hold(-sum(map(Tensor.numel, messages.values())))

    def arriving(self, direction: str, fields: Fields, tensors: Sequence[Tensor]) -> Iterator[Came]:
        """First nothing: the first step is on its way. Then what came in each step, with the next one on its way."""

        @functools.lru_cache(maxsize=1)  # the next message may be equal to the last
        def packed(parts: tuple[View, ...]) -> Tensor:
            return pack([rows_of(tensors, rows, fields) for rows in parts], parts, fields)

        posted = (
            self.post(
                f"hop {number} of the {direction}", {peer: packed(parts) for peer, parts in step.sends.items()},
                step.receives, fields,
            )
            for number, step in enumerate((*self.steps, NO_STEP), 1)
        )  # fmt: skip
        coming = next(posted)
        yield {}
        for number in range(1, len(self.steps) + 1):
            with coming as came:
                coming = next(posted)
                with torch.profiler.record_function(f"dilated_attention::{self.name} {direction} step {number}"):
                    yield came
