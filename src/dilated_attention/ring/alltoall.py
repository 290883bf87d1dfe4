"""Whole segments for some of the heads: rows go to the ranks that compute them, and results come back.

Where a segment lies on s ranks, each of them computes it whole for 1/s of the heads. So the work is even when causal
too, and no sum over ranks ever travels. A rank gets no head of a branch where heads are fewer than ranks.

Legend as in `blockwise` and `packing`; a bundle is some heads of a shared segment that one rank computes, with the same
number of rows each: L rows in all, of which each member of the segment holds some.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.problem import Gradients, Inputs, Outputs
from dilated_attention.blocks import Block, SegmentHeads, View
from dilated_attention.merge import add_zero_keys_, merge_
from dilated_attention.ring import packing
from dilated_attention.ring.packing import Fields
from dilated_attention.ring.parallel import ParallelCall, own_tensors
from dilated_attention.ring.routes import share
from dilated_attention.ring.shards import Shards, SharedSegment


class Bundle(NamedTuple):
    segment: SharedSegment  # with the bundle's heads only
    target: int  # the rank that computes it


@functools.lru_cache(maxsize=256)
def bundles(segments: tuple[SharedSegment, ...], shards: Shards, apart: bool) -> tuple[Bundle, ...]:
    """Every segment's heads dealt to its members; those with equally many rows everywhere are one bundle.

    ``apart``: only heads of one offset are.
    """
    found = []
    for segment in segments:
        pieces = [segment.piece(shards, member) for member in segment.members]
        for index, member in enumerate(segment.members):
            alike: dict[tuple[int, ...], list[tuple[int, int]]] = {}
            turn = (index - segment.branch) % len(segment.members)  # where heads are few, others in each branch
            for at in share(len(segment.heads), len(segment.members), turn):
                head, offset = segment.heads[at]
                rows = (*(segment.rows(offset, piece) for piece in pieces), offset if apart else 0)
                alike.setdefault(rows, []).append((head, offset))
            found += [Bundle(replace(segment, heads=tuple(heads)), member) for heads in alike.values()]
    return tuple(found)


class AllToAll(ParallelCall):
    """Queries, keys and values go to the ranks that compute with them, and results come back."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # kernels that group heads want one padding for all of them
        self.bundles = bundles(self.segments, self.shards, self.call.has_padding and self.q_per_kv > 1)
        self.mine = [bundle for bundle in self.bundles if bundle.target == self.rank]

    def computed_remotely(self) -> SegmentHeads:
        return frozenset(
            (segment.branch, segment.start, head) for segment in self.segments for head, _ in segment.heads
        )

    def forward(self, work: Work) -> tuple[Tensor, Tensor]:
        segments = self.there("hop 1 of the forward alltoall", self.fields.inputs, own_tensors(work))
        next(segments)
        out, lse = work.forward()
        results = []
        for bundle, segment in zip(self.mine, segments, strict=True):
            results.append(self.compute(work, bundle, Inputs(*segment)))
            self.kept += segment if self.keeps else []
        home = self.back("hop 2 of the forward alltoall", self.fields.results, results)
        for bundle, (part_lse, part) in zip(self.bundles, home, strict=True):
            for block in self.blocks(bundle.segment, self.rank, self.q_per_kv):
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
        segments = self.there("hop 1 of the backward alltoall", fields, tensors)
        next(segments)
        grads = work.backward(results)
        computed = []
        for bundle, segment in zip(self.mine, segments, strict=True):
            *dlse, lse, dout, out = segment[:of_rows]
            sources = Inputs(*(segment[of_rows:] or [next(kept) for _ in self.fields.inputs]))
            if self.keeps and lse.device.type == "cpu":  # as `without_bad_rows` has made the rows of this rank
                sources = sources._replace(q=sources.q.masked_fill((lse == torch.inf).unsqueeze(-1), 0.0))
            computed.append(self.compute(work, bundle, sources, Outputs(out, lse, dout, dlse[0] if dlse else None)))
        home = self.back("hop 2 of the backward alltoall", self.fields.gradients, computed)
        for bundle, packed in zip(self.bundles, home, strict=True):
            self.add(grads, bundle.segment, packed)
        return grads

    def compute(self, work: Work, bundle: Bundle, sources: Inputs, results: Outputs | None = None) -> list[Tensor]:
        """lse and out of a whole segment, (B, L, heads, ...), or with ``results`` its gradients, as they go home."""
        segment, heads = bundle.segment, len(bundle.segment.heads)
        rows, is_causal = sources.q.shape[1], self.call.is_causal
        view = View(0, self.samples, 0, 1, rows, rows, 1, 0, heads, 1, 0)
        at = tuple(segment.start + offset for _, offset in segment.heads)
        numbers = tuple(head for head, _ in segment.heads)
        whole = Block(segment.branch, segment.dilation, view, view, is_causal, at, at, segment.start, numbers=numbers)
        found: list[Tensor] = []
        for block, parts in work.each([whole], sources, results):
            if block == whole:
                found = list(parts)
                continue
            if not found:
                sizes = [(self.samples, rows, heads * part.shape[2] // block.heads, *part.shape[3:]) for part in parts]
                found = [part.new_empty(size) for part, size in zip(parts, sizes, strict=True)]
            for x, part in zip(found, parts, strict=True):
                block.queries.of(x, part.shape[2] // block.heads).copy_(part)
        dtype = work.q.dtype
        return [found[1], found[0].to(dtype)] if results is None else [x.to(dtype) for x in found]

    def blocks(
        self, segment: SharedSegment, owner: int, q_per_kv: int, zeros: tuple[int, ...] = ()
    ) -> tuple[Block, ...]:
        """With zero keys: a segment is computed whole, but without them."""
        zeros_of, tokens = self.call.pattern.zeros_in_segment, segment.stop - segment.start
        zeros = tuple(zeros_of(segment.branch, tokens, offset, segment.sequence) for _, offset in segment.heads)
        return super().blocks(segment, owner, q_per_kv, zeros)

    # --- rows to whoever computes them, and results back --------------------------------------------------------

    def there(self, hop: str, fields: Fields, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """First nothing: this rank's rows are on their way. Then each whole segment that it computes: for each field
        (B, L, heads of the bundle, ...)."""
        outgoing = [(bundle.target, self.packed(bundle.segment, fields, tensors)) for bundle in self.bundles]
        coming = [(member, bundle, member) for bundle in self.mine for member in bundle.segment.members]
        arrive = self.post(hop, fields, outgoing, coming)
        yield []
        parts = iter(arrive())
        for bundle in self.mine:
            pieces = [self.by_head(bundle, next(parts), fields, member) for member in bundle.segment.members]
            yield [torch.cat(some, 2).movedim(0, 2) for some in zip(*pieces, strict=True)]

    def back(self, hop: str, fields: Fields, results: list[list[Tensor]]) -> list[list[Tensor]]:
        """Results (B, L, heads, ...) of the segments computed here for those of this rank's rows, packed."""
        outgoing = []
        for bundle, tensors in zip(self.mine, results, strict=True):
            segment, at = bundle.segment, 0
            for member in segment.members:
                count = segment.rows(segment.heads[0][1], segment.piece(self.shards, member))
                part = self.empty(fields, self.rows(segment, member))
                for place, x in zip(self.by_head(bundle, part, fields, member), tensors, strict=True):
                    place.copy_(x[:, at : at + count].movedim(2, 0))
                at += count
                outgoing.append((member, part))
        coming = [(bundle.target, bundle, self.rank) for bundle in self.bundles]
        return [
            packing.unpack(part, fields, self.rows(bundle.segment, self.rank))
            for bundle, part in zip(self.bundles, self.post(hop, fields, outgoing, coming)(), strict=True)
        ]

    def by_head(self, bundle: Bundle, part: Tensor, fields: Fields, member: int) -> list[Tensor]:
        """A member's rows of each field as (heads, B, rows, ...)."""
        tensors, heads = packing.unpack(part, fields, self.rows(bundle.segment, member)), len(bundle.segment.heads)
        return [
            x.view(heads * field.heads, self.samples, -1, *field.sizes)
            for x, field in zip(tensors, fields, strict=True)
        ]

    def post(
        self,
        hop: str,
        fields: Fields,
        outgoing: Iterable[tuple[int, Tensor]],
        coming: Sequence[tuple[int, Bundle, int]],
    ) -> Callable[[], list[Tensor]]:
        """Send parts to these ranks. Then gives the parts that come: from whom, of which bundle, and whose rows."""
        messages: dict[int, list[Tensor]] = {}
        for peer, part in outgoing:
            messages.setdefault(peer, []).append(part)
        sizes: dict[int, list[int]] = {}
        for peer, bundle, owner in coming:
            sizes.setdefault(peer, []).append(packing.part_bytes(fields, self.rows(bundle.segment, owner)))
        own, _ = messages.pop(self.rank, []), sizes.pop(self.rank, None)
        sends = {peer: packing.join(parts) for peer, parts in messages.items()}
        pending = self.transport.post(hop, sends, {peer: sum(some) for peer, some in sizes.items()}, collective=True)

        def arrive() -> list[Tensor]:
            came = pending.wait()
            self.transport.release(came, reuse=False)
            parts = {peer: iter(torch.split(came[peer], some)) for peer, some in sizes.items()} | {self.rank: iter(own)}
            return [next(parts[peer]) for peer, *_ in coming]

        return arrive
