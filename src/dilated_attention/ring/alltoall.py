"""Whole segments for some of the heads: rows go to the ranks that compute them, and results come back.

For patterns whose branches are all dilated, where queries and keys of a segment are the same rows. Where a segment lies
on s ranks, each of them computes it whole for 1/s of the heads. So the work is even when causal too, and no sum over
ranks ever travels. A rank gets no head of a branch where heads are fewer than ranks.

Legend as in `blockwise` and `messages`; L rows of one head in a whole segment, of which each member holds some.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.problem import Gradients, Inputs, Outputs, Pair
from dilated_attention.blocks import Block, View, head_runs
from dilated_attention.branches import Dilated
from dilated_attention.branches.base import grouped, rows_at
from dilated_attention.call import Call
from dilated_attention.distributed.group import Pending
from dilated_attention.merge import add_zero_keys_, merge_
from dilated_attention.pattern import Pattern, zeros_beside
from dilated_attention.ring.messages import Fields, pack, rows_of, sizes_of, unpack
from dilated_attention.ring.parallel import ParallelCall, own_tensors
from dilated_attention.ring.shards import Shards


class Bundle(NamedTuple):
    """Some heads of a segment that lies on several ranks, which one of them computes."""

    block: Block  # all rows
    members: dict[int, View]  # those of each rank that holds some, in its tensors
    target: int  # computes it

    @property
    def heads(self) -> range:
        return self.block.queries.numbers


def can_deal(pattern: Pattern) -> bool:
    """Whether segments can be computed whole: queries and keys are the same rows, and no branch knows of another."""
    return pattern.counts == "sum" and all(isinstance(branch, Dilated) for branch in pattern.listed)  # rules list none


@functools.lru_cache(maxsize=256)
def bundles_of(call: Call, shards: Shards, rank: int) -> tuple[Bundle, ...]:
    """Those that a rank is a member of, in an order that all members share."""
    (first, stop), found = shards.of_rank(rank), []
    for index, branch in enumerate(call.branches):
        assert isinstance(branch, Dilated)
        tokens = (first, stop - 1) if first < stop else ()  # segments of other tokens lie inside of the shard
        for start in sorted({segment_at(shards, token, branch.length)[0] for token in tokens}):
            found += [bundle for bundle in bundles_at(call, shards, index, start) if rank in bundle.members]
    return tuple(found)


def segment_at(shards: Shards, token: int, length: int) -> tuple[int, int]:
    """Where the segment of a token begins and ends."""
    begin, end = shards.sequence(token)
    start = token - (token - begin) % length
    return start, min(start + length, end)


@functools.lru_cache(maxsize=1 << 12)
def bundles_at(call: Call, shards: Shards, index: int, token: int) -> list[Bundle]:
    """The heads of a branch's segment that several ranks have rows of, shared evenly by these ranks."""
    branch = call.branches[index]
    assert isinstance(branch, Dilated)
    start, stop = segment_at(shards, token, branch.length)
    offsets, found, ranks = dict(call.placed(index)), list[Bundle](), shards.holders(start, stop)
    held: dict[int, dict[int, int]] = {}  # by offset: how many rows each rank has, if it has some
    for offset in {*offsets.values()}:
        rows = rows_at(start + offset, branch.rate, start + offset, stop)
        held[offset] = {rank: number for rank in ranks if (number := rows.inside(*shards.of_rank(rank)).length)}
    for members, heads in grouped(offsets, lambda head: tuple(held[offsets[head]])).items():
        for place, target in enumerate(members if len(members) > 1 else ()):
            turn = (place - index) % len(members)  # where heads are few, others in each branch
            some = [heads[at] for at in share(len(heads), len(members), turn)]
            placed = [(head, start + offsets[head]) for head in some]
            counts = {head: tuple(held[offsets[head]].values()) for head in some}
            for run in head_runs(placed, counts.__getitem__, call.q_per_kv):
                (head, first), count = run.first, counts[run.first[0]]
                whole = View(0, call.samples, first, 1, 0, sum(count), branch.rate, head, run.heads, *run.steps)
                befores = itertools.accumulate(count, initial=0)
                views = {
                    rank: whole._replace(token=first + before * branch.rate, rows=here, start=shards.starts[rank])
                    for rank, before, here in zip(members, befores, count, strict=False)
                }
                begin, end = shards.sequence(token)
                zeros = zeros_beside(branch, whole.rows, end - begin) if call.adds_zeros else 0
                high = 0 if call.is_causal else None
                found.append(Bundle(Block(index, whole, whole, None, high, start, zeros), views, target))
    return found


def share(items: int, parts: int, index: int) -> range:
    """Which of so many items the index-th of so many parts gets: as even as can be, none where items are few."""
    return range(items * index // parts, items * (index + 1) // parts)


Peers = dict[int, list[View]]  # rows by the other rank


def peers_of(bundles: Sequence[Bundle], rank: int) -> tuple[Peers, Peers]:
    """The rows of a rank that others compute, by who does; and those of others that it computes."""
    there: Peers = {}
    here: Peers = {}
    for bundle in bundles:
        for member, rows in bundle.members.items():
            if member == rank != bundle.target:
                there.setdefault(bundle.target, []).append(rows)
            elif member != rank == bundle.target:
                here.setdefault(member, []).append(rows)
    return there, here


class AllToAll(ParallelCall):
    """Queries, keys and values go to the ranks that compute with them, and results come back."""

    def __post_init__(self) -> None:
        super().__post_init__()
        call = self.call._replace(start=0, queries=0, key_start=0, keys=0)
        self.bundles = bundles_of(call, self.shards, self.rank) if call.samples else ()
        self.computed_remotely = frozenset(
            (bundle.block.branch, bundle.block.origin, head) for bundle in self.bundles for head in bundle.heads
        )
        self.mine = [bundle for bundle in self.bundles if bundle.target == self.rank]
        self.rows_there, self.rows_here = peers_of(self.bundles, self.rank)

    def forward(self, work: Work) -> Pair:
        fields, own = self.fields.inputs, own_tensors(work)
        pending = self.send("forward", fields, own)
        out, lse = work.forward()
        results = []
        for bundle, tensors in self.wholes(pending, fields, own):
            results.append(self.compute(work, bundle, Inputs(*tensors)))
            self.kept += tensors if self.keeps else []
        for bundle, (part_lse, part) in self.back("forward", self.fields.results, results):
            rows = bundle.members[self.rank]
            log_zeros = work.log_zero_keys(bundle.block)
            if log_zeros is not None:
                part, part_lse = part.to(part_lse.dtype, copy=True), part_lse.clone()
                add_zero_keys_(part, part_lse, log_zeros)
            merge_(rows.of(out, self.q_per_kv), rows.of(lse, self.q_per_kv), part, part_lse)
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
        pending = self.send("backward", fields, tensors)
        grads = work.backward(results)
        computed = []
        for bundle, whole in self.wholes(pending, fields, tensors):
            *dlse, lse, dout, out = whole[:of_rows]
            sources = Inputs(*(whole[of_rows:] or [next(kept) for _ in self.fields.inputs]))
            if self.keeps and lse.device.type == "cpu":  # as `without_bad_rows` has made the rows of this rank
                sources = sources._replace(q=sources.q.masked_fill((lse == torch.inf).unsqueeze(-1), 0.0))
            computed.append(self.compute(work, bundle, sources, Outputs(out, lse, dout, dlse[0] if dlse else None)))
        for bundle, parts in self.back("backward", self.fields.gradients, computed):
            for grad, x, group in zip(grads, parts, (self.q_per_kv, 1, 1), strict=True):
                bundle.members[self.rank].of(grad, group).add_(x)
        return grads

    def compute(self, work: Work, bundle: Bundle, sources: Inputs, results: Outputs | None = None) -> list[Tensor]:
        """lse and out of a whole segment, (B, L, heads, ...), or with ``results`` its gradients."""
        whole, found = bundle.block.queries, list[Tensor]()
        for block, parts in work.each([bundle.block], sources, results, (whole, whole)):
            groups = [part.shape[2] // block.heads for part in parts]
            if not found:
                sizes = [(*sources.q.shape[:2], whole.heads * group) for group in groups]
                found = [part.new_empty(*size, *part.shape[3:]) for part, size in zip(parts, sizes, strict=True)]
            for x, part, group in zip(found, parts, groups, strict=True):
                block.queries.within(whole).of(x, group).copy_(part)
        return found if results is not None else [found[1], found[0]]

    # --- rows to whoever computes them, and results back ------------------------------------------------------------

    def send(self, direction: str, fields: Fields, tensors: Sequence[Tensor]) -> Pending | None:
        """This rank's rows are on their way."""
        sends = {
            target: pack([rows_of(tensors, rows, fields) for rows in some], some, fields)
            for target, some in self.rows_there.items()
        }
        return self.post(f"hop 1 of the {direction} alltoall", sends, sizes_of(self.rows_here, fields))

    def wholes(
        self, pending: Pending | None, fields: Fields, tensors: Sequence[Tensor]
    ) -> Iterator[tuple[Bundle, list[Tensor]]]:
        """Each segment that is computed here: for each field (B, L, heads of the bundle, ...)."""
        came = self.came(pending, self.rows_here, fields)
        for bundle in self.mine:
            pieces = [
                rows_of(tensors, view, fields) if member == self.rank else next(came[member])
                for member, view in bundle.members.items()
            ]
            yield bundle, [torch.cat(some, 1) for some in zip(*pieces, strict=True)]

    def back(
        self, direction: str, fields: Fields, results: Sequence[Sequence[Tensor]]
    ) -> Iterator[tuple[Bundle, Sequence[Tensor]]]:
        """Results (B, L, heads, ...) of the segments computed here go to their rows; then those of this rank's rows."""
        sends: dict[int, list[Sequence[Tensor]]] = {member: [] for member in [*self.rows_here, self.rank]}
        for bundle, tensors in zip(self.mine, results, strict=True):
            counts = [view.rows for view in bundle.members.values()]
            pieces = (torch.split(x, counts, 1) for x in tensors)
            for member, parts in zip(bundle.members, zip(*pieces, strict=True), strict=True):
                sends[member].append(parts)
        here = iter(sends.pop(self.rank))
        messages = {member: pack(parts, self.rows_here[member], fields) for member, parts in sends.items()}
        pending = self.post(f"hop 2 of the {direction} alltoall", messages, sizes_of(self.rows_there, fields))
        came = self.came(pending, self.rows_there, fields)
        for bundle in self.bundles:
            yield bundle, next(here if bundle.target == self.rank else came[bundle.target])

    def came(self, pending: Pending | None, peers: Peers, fields: Fields) -> dict[int, Iterator[Sequence[Tensor]]]:
        """The parts from each rank, in order."""
        messages = {} if pending is None else pending.wait()
        self.transport.release(messages)
        return {peer: iter(unpack(messages[peer], some, fields)) for peer, some in peers.items()}
