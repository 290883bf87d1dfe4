"""Whole segments for some of the heads: rows go to the ranks that compute them, and results come back.

Where a segment lies on s ranks, each of them computes it whole for 1/s of the heads. So the work is even when causal
too, and no sum over ranks ever travels. A rank gets no head of a branch where heads are fewer than ranks.

Legend as in `blockwise` and `packing`; L rows of one head in a whole segment, of which each member holds some.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.problem import Gradients, Inputs, Outputs
from dilated_attention.blocks import Block, SegmentHeads, View
from dilated_attention.distributed.group import Pending
from dilated_attention.merge import add_zero_keys_, merge_
from dilated_attention.pattern import rows_at_offset, zeros_beside
from dilated_attention.ring.packing import Fields
from dilated_attention.ring.parallel import ParallelCall, own_tensors
from dilated_attention.ring.routes import Part, Step, dealing


class AllToAll(ParallelCall):
    """Queries, keys and values go to the ranks that compute with them, and results come back."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # kernels that group heads want one padding for all of them
        apart = self.call.has_padding and self.q_per_kv > 1
        self.segments, self.mine, self.outward, self.homeward = dealing(self.segments, apart, self.rank)

    def computed_remotely(self) -> SegmentHeads:
        return frozenset(
            (segment.branch, segment.start, head) for segment in self.segments for head, _ in segment.heads
        )

    def forward(self, work: Work) -> tuple[Tensor, Tensor]:
        segments = self.there("forward", self.fields.inputs, own_tensors(work))
        next(segments)
        out, lse = work.forward()
        results = []
        for index, segment in zip(self.mine, segments, strict=True):
            results.append(self.compute(work, index, Inputs(*segment)))
            self.kept += segment if self.keeps else []
        for index, (part_lse, part) in enumerate(self.back("forward", self.fields.results, results)):
            for block in self.blocks(Part(index, self.rank), self.q_per_kv):
                assert block.packed_queries is not None
                here, here_lse = block.packed_queries.of(part), block.packed_queries.of(part_lse)
                log_zeros = work.log_zero_keys(block)
                if log_zeros is not None:
                    here, here_lse = here.to(here_lse.dtype, copy=True), here_lse.clone()
                    add_zero_keys_(here, here_lse, log_zeros)
                merge_(block.queries.of(out, self.q_per_kv), block.queries.of(lse, self.q_per_kv), here, here_lse)
        return out, lse

    def backward(self, work: Work, results: Outputs) -> Gradients:
        """q, k and v of the segments computed here were kept, or travel again."""
        tensors, fields = [results.lse, results.dout, results.out], self.fields.rows
        if results.dlse is not None:  # a column more
            tensors, fields = [results.dlse, *tensors], (fields[0], *fields)
        of_rows, kept = len(tensors), iter(self.kept)
        self.kept = []
        if not self.keeps:
            tensors, fields = [*tensors, *own_tensors(work)], (*fields, *self.fields.inputs)
        segments = self.there("backward", fields, tensors)
        next(segments)
        grads = work.backward(results)
        computed = []
        for index, segment in zip(self.mine, segments, strict=True):
            *dlse, lse, dout, out = segment[:of_rows]
            sources = Inputs(*(segment[of_rows:] or [next(kept) for _ in self.fields.inputs]))
            if self.keeps and lse.device.type == "cpu":  # as `without_bad_rows` has made the rows of this rank
                sources = sources._replace(q=sources.q.masked_fill((lse == torch.inf).unsqueeze(-1), 0.0))
            computed.append(self.compute(work, index, sources, Outputs(out, lse, dout, dlse[0] if dlse else None)))
        for index, packed in enumerate(self.back("backward", self.fields.gradients, computed)):
            self.add(grads, index, packed)
        return grads

    def compute(self, work: Work, index: int, sources: Inputs, results: Outputs | None = None) -> list[Tensor]:
        """lse and out of a whole segment, (B, L, heads, ...), or with ``results`` its gradients, as they go home."""
        segment, (samples, rows) = self.segments[index], sources.q.shape[:2]
        heads = len(segment.heads)
        view = View(0, samples, 0, 1, rows, rows, 1, 0, heads, 1, 0)
        at = tuple(segment.start + offset for _, offset in segment.heads)
        numbers = tuple(head for head, _ in segment.heads)
        whole = Block(
            segment.branch,
            segment.dilation,
            segment.dilation,
            view,
            view,
            None,
            0 if self.call.is_causal else None,
            at,
            at,
            segment.start,
            numbers=numbers,
        )
        found: list[Tensor] = []
        for block, parts in work.each([whole], sources, results):
            if block == whole:
                found = list(parts)
                continue
            if not found:
                sizes = [(samples, rows, heads * part.shape[2] // block.heads, *part.shape[3:]) for part in parts]
                found = [part.new_empty(size) for part, size in zip(parts, sizes, strict=True)]
            for x, part in zip(found, parts, strict=True):
                block.queries.of(x, part.shape[2] // block.heads).copy_(part)
        dtype = work.q.dtype
        return [found[1], found[0].to(dtype)] if results is None else [x.to(dtype) for x in found]

    def blocks(self, part: Part, q_per_kv: int, zeros: tuple[int, ...] = ()) -> tuple[Block, ...]:
        """With zero keys: a segment is computed whole, but without them."""
        segment, call = self.segments[part.segment], self.call
        branch, tokens = call.dilated.branches_for(call.held.total)[segment.branch], segment.stop - segment.start
        if call.adds_zeros:
            rows = (rows_at_offset(tokens, segment.dilation, offset) for _, offset in segment.heads)
            zeros = tuple(zeros_beside(branch, count, segment.sequence) for count in rows)
        return super().blocks(part, q_per_kv, zeros)

    # --- rows to whoever computes them, and results back --------------------------------------------------------

    def there(self, direction: str, fields: Fields, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """First nothing: this rank's rows are on their way. Then each whole segment that it computes: for each field
        (B, L, heads of the segment, ...)."""
        parts = {Part(index, self.rank): self.packed(index, fields, tensors) for index in range(len(self.segments))}
        pending = self.post(f"hop 1 of the {direction} alltoall", self.outward, parts, fields)
        yield []
        parts |= self.arrived(pending, self.outward, fields)
        for index in self.mine:
            members = [Part(index, member) for member in self.segments[index].members]
            pieces = [self.by_head(part, parts[part], fields) for part in members]
            yield [torch.cat(some, 2).movedim(0, 2) for some in zip(*pieces, strict=True)]

    def back(self, direction: str, fields: Fields, results: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Results (B, L, heads, ...) of the segments computed here for those of this rank's rows, packed."""
        parts: dict[Part, Tensor] = {}
        for index, tensors in zip(self.mine, results, strict=True):
            at = 0
            for member in self.segments[index].members:
                part = Part(index, member)
                parts[part] = self.empty(part, fields)
                places = self.by_head(part, parts[part], fields)
                for place, x in zip(places, tensors, strict=True):
                    place.copy_(x.movedim(2, 0).narrow(2, at, place.shape[2]))
                at += places[0].shape[2]
        pending = self.post(f"hop 2 of the {direction} alltoall", self.homeward, parts, fields)
        parts |= self.arrived(pending, self.homeward, fields)
        mine = [Part(index, self.rank) for index in range(len(self.segments))]
        return [self.unpacked(part, parts[part], fields) for part in mine]

    def arrived(self, pending: Pending, step: Step, fields: Fields) -> dict[Part, Tensor]:
        messages = pending.wait()
        self.transport.release(messages)
        return dict(self.parts(messages, step, fields))

    def by_head(self, part: Part, packed: Tensor, fields: Fields) -> list[Tensor]:
        """A member's rows of each field as (heads, B, rows, ...)."""
        heads = len(self.segments[part.segment].heads)
        return [
            x.view(heads * field.heads, self.samples, -1, *field.sizes)
            for x, field in zip(self.unpacked(part, packed, fields), fields, strict=True)
        ]
