"""Whole segments for some of the heads: rows go to the ranks that compute them, and results come back.

Where a segment lies on s ranks, each of them computes it whole for 1/s of the heads. So the work is even when causal
too, and no sum over ranks ever travels. A rank gets no head of a branch where heads are fewer than ranks.

Legend as in `blockwise` and `packing`; a bundle is some heads of a shared that one rank computes, with the same number
of rows each: L rows in all, of which each member of the shared holds some.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.problem import Gradients, Inputs, Outputs
from dilated_attention.blocks import Block, View
from dilated_attention.distributed.group import GroupTransport, Pending
from dilated_attention.merge import add_zero_keys_, merge_
from dilated_attention.ring import packing
from dilated_attention.ring.packing import Expected, Fields, Travelling
from dilated_attention.ring.routes import share
from dilated_attention.ring.shards import Shards, SharedSegment


class Bundle(NamedTuple):
    shared: SharedSegment  # with the bundle's heads only
    target: int  # the rank that computes it


Segments = dict[Bundle, list[Tensor]]


@functools.lru_cache(maxsize=256)
def bundles(shared_segments: tuple[SharedSegment, ...], shards: Shards, apart: bool) -> tuple[Bundle, ...]:
    """Every shared's heads dealt to its members; those with equally many rows everywhere are one bundle.

    ``apart``: only heads of one offset are.
    """
    found = []
    for shared in shared_segments:
        pieces = [shared.piece(shards, member) for member in shared.members]
        for index, member in enumerate(shared.members):
            alike: dict[tuple[int, ...], list[tuple[int, int]]] = {}
            turn = (index - shared.branch) % len(shared.members)  # where heads are few, others in each branch
            for at in share(len(shared.heads), len(shared.members), turn):
                head, offset = shared.heads[at]
                rows = (*(shared.rows(offset, piece) for piece in pieces), offset if apart else 0)
                alike.setdefault(rows, []).append((head, offset))
            found += [Bundle(replace(shared, heads=tuple(heads)), member) for heads in alike.values()]
    return tuple(found)


@dataclass
class AllToAll:
    """One rank's part in the exchange of one call."""

    work: Work
    transport: GroupTransport
    shards: Shards
    shared_segments: tuple[SharedSegment, ...]

    def __post_init__(self) -> None:
        work, call = self.work, self.work.call
        self.rank, self.samples, self.group = self.transport.rank, call.samples, call.q_per_kv
        # kernels that group heads want one padding for all of them
        self.bundles = bundles(self.shared_segments, self.shards, work.padding is not None and call.q_per_kv > 1)
        self.fields = Travelling.of(work.q.dtype, call.q_per_kv, work.q.shape[3], work.padding is not None)

    def forward(self, keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        """out, lse, and the q, k, v of the segments computed here if they are to be kept for the backward pass."""
        posted = self.post("hop 1 of the forward alltoall", self.fields.inputs, self.input_tensors)
        out, lse = self.work.forward()
        kept: list[Tensor] = []
        results: Segments = {}
        for bundle, segment in self.segments(posted, self.fields.inputs).items():
            results[bundle] = self.compute(bundle, Inputs(*segment))
            kept += segment if keep else []
        hop = "hop 2 of the forward alltoall"
        for bundle, (part_lse, part) in self.send_back(hop, self.fields.results, results).items():
            for block in self.blocks(bundle, self.group):
                assert block.home is not None
                here, here_lse = block.home.of(part), block.home.of(part_lse)
                log_zeros = self.work.log_zero_keys(block)
                if log_zeros is not None:
                    here, here_lse = here.to(here_lse.dtype, copy=True), here_lse.clone()
                    add_zero_keys_(here, here_lse, log_zeros)
                merge_(block.queries.of(out, self.group), block.queries.of(lse, self.group), here, here_lse)
        return out, lse, kept

    def backward(self, results: Outputs, kept: list[Tensor] | None) -> Gradients:
        """dq, dk, dv of this rank's rows. ``kept``: q, k, v of the segments computed here; None: they travel again."""
        tensors, fields = [results.lse, results.dout, results.out], self.fields.rows
        if results.dlse is not None:  # a column more
            tensors, fields = [results.dlse, *tensors], (fields[0], *fields)
        of_rows = len(tensors)
        if kept is None:
            tensors, fields = [*tensors, *self.input_tensors], (*fields, *self.fields.inputs)
        posted = self.post("hop 1 of the backward alltoall", fields, tensors)
        grads = self.work.backward(results)
        waiting = iter(kept or ())
        computed: Segments = {}
        for bundle, segment in self.segments(posted, fields).items():
            *dlse, lse, dout, out = segment[:of_rows]
            sources = Inputs(*(segment[of_rows:] or [next(waiting) for _ in self.fields.inputs]))
            if kept is not None and lse.device.type == "cpu":  # as `without_bad_rows` has made the rows of this rank
                sources = sources._replace(q=sources.q.masked_fill((lse == torch.inf).unsqueeze(-1), 0.0))
            here = Outputs(out, lse, dout, dlse[0] if dlse else None)
            computed[bundle] = self.compute(bundle, sources, here)
        home = self.send_back("hop 2 of the backward alltoall", self.fields.gradients, computed)
        for bundle, packed in home.items():
            for grad, part, group in zip(grads, packed, (self.group, 1, 1), strict=True):
                for block in self.blocks(bundle, group):
                    assert block.home is not None
                    block.queries.of(grad, group).add_(block.home.of(part))
        return grads

    def compute(self, bundle: Bundle, sources: Inputs, results: Outputs | None = None) -> list[Tensor]:
        """lse and out of a whole segment, (B, L, heads, ...), or with ``results`` its gradients, as they go home."""
        shared, heads = bundle.shared, len(bundle.shared.heads)
        rows = sources.q.shape[1]
        view = View(0, self.samples, 0, 1, rows, rows, 1, 0, heads, 1, 0)
        at = tuple(shared.start + offset for _, offset in shared.heads)
        numbers = tuple(head for head, _ in shared.heads)
        is_causal = self.work.call.is_causal
        whole = Block(shared.branch, shared.dilation, view, view, is_causal, at, at, shared.start, numbers=numbers)
        found: list[Tensor] = []
        for block, parts in self.work.each([whole], sources, results):
            if block == whole:
                found = list(parts)
                continue
            if not found:
                sizes = [(self.samples, rows, heads * part.shape[2] // block.heads, *part.shape[3:]) for part in parts]
                found = [part.new_empty(size) for part, size in zip(parts, sizes, strict=True)]
            for x, part in zip(found, parts, strict=True):
                block.queries.of(x, part.shape[2] // block.heads).copy_(part)
        dtype = self.work.q.dtype
        return [found[1], found[0].to(dtype)] if results is None else [x.to(dtype) for x in found]

    @property
    def input_tensors(self) -> list[Tensor]:
        work = self.work
        return [work.q, work.k, work.v, *([work.padding] if work.padding is not None else [])]

    def blocks(self, bundle: Bundle, group: int) -> tuple[Block, ...]:
        """This rank's rows of a bundle, in place and packed."""
        shared, pattern = bundle.shared, self.work.call.pattern
        about = (shared.branch, shared.stop - shared.start)
        zeros = tuple(pattern.zeros_in_segment(*about, offset, shared.sequence) for _, offset in shared.heads)
        return packing.packed_blocks(shared, self.shards, self.rank, self.rank, self.samples, group, zeros)

    def rows(self, bundle: Bundle, member: int) -> int:
        return self.samples * bundle.shared.packed_rows(self.shards, member)

    # --- rows to whoever computes them --------------------------------------------------------------------------

    def post(self, name: str, fields: Fields, tensors: Sequence[Tensor]) -> tuple[Pending, dict[Bundle, Tensor]]:
        """Send this rank's rows to the ranks that compute them; also gives those that stay."""
        me = self.rank
        messages: dict[int, list[Tensor]] = {}
        staying: dict[Bundle, Tensor] = {}
        for bundle in self.bundles:
            rows = self.rows(bundle, me)
            part = torch.empty(packing.part_bytes(fields, rows), dtype=torch.uint8, device=self.work.q.device)
            packing.pack(part, fields, rows, self.blocks(bundle, max(field.heads for field in fields)), tensors)
            if bundle.target == me:
                staying[bundle] = part
            else:
                messages.setdefault(bundle.target, []).append(part)
        sends = {peer: packing.join(parts) for peer, parts in messages.items()}
        sizes = packing.totals(self.expected(staying, fields))
        return self.transport.post(name, sends, sizes, collective=True), staying

    def expected(self, computed: Iterable[Bundle], fields: Fields) -> list[Expected]:
        """What other members send for the bundles computed here."""
        return [
            Expected(member, packing.part_bytes(fields, self.rows(bundle, member)))
            for bundle in computed
            for member in bundle.shared.members
            if member != self.rank
        ]

    def segments(self, posted: tuple[Pending, dict[Bundle, Tensor]], fields: Fields) -> Segments:
        """The whole segments computed here: for each field (B, L, heads of the bundle, ...)."""
        pending, staying = posted
        messages = pending.wait()
        parts = packing.split(messages, self.expected(staying, fields))
        found: Segments = {}
        for bundle, own in staying.items():
            pieces = [
                self.by_head(bundle, own if member == self.rank else next(parts), fields, member)
                for member in bundle.shared.members
            ]
            whole = (torch.cat(some, 2) for some in zip(*pieces, strict=True))
            found[bundle] = [x.movedim(0, 2) for x in whole]
        self.transport.release(messages)
        return found

    def by_head(self, bundle: Bundle, part: Tensor, fields: Fields, member: int) -> list[Tensor]:
        """A member's rows of each field as (heads, B, rows, ...)."""
        tensors = packing.unpack(part, fields, self.rows(bundle, member))
        heads = len(bundle.shared.heads)
        return [
            x.view(heads * field.heads, self.samples, -1, *field.sizes)
            for x, field in zip(tensors, fields, strict=True)
        ]

    # --- results home -------------------------------------------------------------------------------------------

    def send_back(self, name: str, fields: Fields, results: Segments) -> Segments:
        """Results (B, L, heads, ...) of the segments computed here for those of this rank's rows, packed."""
        me, shards = self.rank, self.shards
        found: Segments = {}
        messages: dict[int, list[Tensor]] = {}
        for bundle, tensors in results.items():
            offset, at = bundle.shared.heads[0][1], 0
            for member in bundle.shared.members:
                count = bundle.shared.rows(offset, bundle.shared.piece(shards, member))
                rows = self.rows(bundle, member)
                part = torch.empty(packing.part_bytes(fields, rows), dtype=torch.uint8, device=self.work.q.device)
                for place, x in zip(self.by_head(bundle, part, fields, member), tensors, strict=True):
                    place.copy_(x[:, at : at + count].movedim(2, 0))
                at += count
                if member == me:
                    found[bundle] = packing.unpack(part, fields, rows)
                else:
                    messages.setdefault(member, []).append(part)
        away = [bundle for bundle in self.bundles if bundle.target != me]
        expected = [Expected(one.target, packing.part_bytes(fields, self.rows(one, me))) for one in away]
        sends = {peer: packing.join(parts) for peer, parts in messages.items()}
        arrived = self.transport.post(name, sends, packing.totals(expected), collective=True).wait()
        for bundle, part in zip(away, packing.split(arrived, expected), strict=True):
            found[bundle] = packing.unpack(part, fields, self.rows(bundle, me))
        self.transport.release(arrived, reuse=False)
        return found
