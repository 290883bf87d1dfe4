"""Whole segments for some of the heads: rows go to the ranks that compute them, and results come back.

For patterns whose branches are all dilated, where queries and keys of a segment are the same rows. Where a segment lies
on s ranks, each of them computes it whole for 1/s of the heads. So the work is even when causal too, and no sum over
ranks ever travels. A rank gets no head of a branch where heads are fewer than ranks.

Legend as in `blockwise` and `parallel`; L rows of one head in a whole segment, of which each member holds some.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.blockwise import Work
from dilated_attention.backends.problem import Gradients, Inputs, Outputs, Pair
from dilated_attention.blocks import Block, View
from dilated_attention.branches import Dilated
from dilated_attention.branches.base import T, grouped
from dilated_attention.call import Call
from dilated_attention.checks import Ints
from dilated_attention.merge import merge_
from dilated_attention.pattern import Pattern
from dilated_attention.plan import blocks_of
from dilated_attention.ring.parallel import Came, Fields, ParallelCall, Part, Step, pack, rows_of
from dilated_attention.ring.shards import Shards


class Bundle(NamedTuple):
    """Some heads of a segment that lies on several ranks, which one of them computes."""

    block: Block  # all rows
    members: dict[int, View]  # those of each rank that holds some, in its tensors
    target: int  # computes it


def can_deal(pattern: Pattern) -> bool:
    """Whether segments can be computed whole: queries and keys are the same rows, and no branch knows of another."""
    return pattern.counts == "sum" and all(isinstance(branch, Dilated) for branch in pattern.listed)  # rules list none


@functools.lru_cache(maxsize=256)
def bundles_of(call: Call, shards: Shards, rank: int) -> tuple[Bundle, ...]:
    """Those that a rank is a member of, in an order that all members share."""
    (first, stop), bundles = shards.of_rank(rank), []
    for index, branch in enumerate(call.branches):
        assert isinstance(branch, Dilated)
        tokens = (first, stop - 1) if first < stop else ()  # segments of other tokens lie inside of the shard
        for segment in sorted({segment_at(shards, token, branch.length) for token in tokens}):
            bundles += [bundle for bundle in bundles_at(call, shards, index, *segment) if rank in bundle.members]
    return tuple(bundles)


def segment_at(shards: Shards, token: int, length: int) -> tuple[int, int]:
    """Where the segment of a token begins and ends."""
    begin, end = shards.sequence(token)
    start = token - (token - begin) % length
    return start, min(start + length, end)


def bundles_at(call: Call, shards: Shards, index: int, start: int, stop: int) -> Iterator[Bundle]:
    """The heads of a branch's segment that several ranks have rows of, shared evenly by these ranks."""
    (ranks, cut), size = shards.cut(start, stop), stop - start
    rows, targets = deal(call, index, cut)
    placed, held = call.placed(index), rows.tolist()
    call = call._replace(start=start, queries=size, key_start=start, keys=size, cu_seqlens=shards.cu_seqlens)
    for (target, numbers), alike in grouped(targets, lambda at: (targets[at], tuple(held[at]))).items():
        for block in blocks_of(call, index, [placed[at][0] for at in alike]):
            views, token = {}, block.queries.token
            for rank, number in zip(ranks, numbers, strict=True):
                if number:
                    views[rank] = block.queries._replace(token=token, rows=number, start=shards.starts[rank])
                token += number * block.queries.row_step
            if len(views) > 1:
                yield Bundle(block, views, ranks[target])


def deal(call: Call, index: int, cut: Ints) -> tuple[Tensor, dict[int, int]]:
    """Of a segment that is cut at these tokens: (heads, ranks) how many rows each rank has of each head that runs the
    branch, and which rank computes the head: those that have rows of it share such heads evenly."""
    branch, targets = call.branches[index], dict[int, int]()
    assert isinstance(branch, Dilated)
    offsets = torch.tensor([offset for _, offset in call.placed(index)], dtype=torch.int64, device="cpu")
    rows = rows_before(torch.tensor(cut, device="cpu"), offsets.unsqueeze(1), branch.rate).diff()
    holders = [tuple(row.nonzero().flatten().tolist()) for row in rows]
    for ranks, heads in grouped(range(len(rows)), holders.__getitem__).items():
        for place, head in enumerate(heads if ranks else ()):
            share = ((place + 1) * len(ranks) - 1) // len(heads)
            targets[head] = ranks[(share + index) % len(ranks)]  # where heads are few, others in each branch
    return rows, targets


def by_rank(pairs: Iterable[tuple[int, T]]) -> dict[int, tuple[T, ...]]:
    return {rank: tuple(x for _, x in some) for rank, some in grouped(pairs, lambda pair: pair[0]).items()}


def rows_before(tokens: Tensor, start: Tensor, step: Tensor | int) -> Tensor:
    """How many of start, start + step, ... come before each token."""
    return (-((start - tokens) // step)).clamp(min=0)


class AllToAll(ParallelCall):
    """Queries, keys and values go to the ranks that compute with them, and results come back."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.bundles = bundles_of(self.call, self.shards, self.rank) if self.call.samples else ()
        self.computed_remotely = frozenset(
            (block.branch, block.origin, head) for block, *_ in self.bundles for head in block.queries.numbers
        )
        self.mine = [bundle for bundle in self.bundles if bundle.target == self.rank]
        there = by_rank((target, members[self.rank]) for _, members, target in self.bundles if target != self.rank)
        here = by_rank(member for bundle in self.mine for member in bundle.members.items() if member[0] != self.rank)
        self.steps = (Step(there, here, {}),)

    def forward(self, work: Work) -> Pair:
        fields, own = self.fields.inputs, self.own(work)
        arriving = self.arriving("forward", fields, own)
        next(arriving)
        out, lse = work.forward()
        results = []
        for bundle, tensors in self.wholes(arriving, fields, own):
            results.append(self.compute(work, bundle, Inputs(*tensors))[::-1])
            self.kept += [tensors] if self.keeps else []
        for bundle, (part_lse, part) in self.back("forward", self.fields.results, results):
            here, here_lse = (bundle.members[self.rank].of(x, work.group) for x in (out, lse))
            merge_(here, here_lse, part.to(here.dtype), part_lse, work.log_zero_keys(bundle.block))
        return out, lse

    def backward(self, work: Work, results: Outputs) -> Gradients:
        """q, k and v of the segments computed here were kept, or travel again."""
        tensors = [x for x in (results.dlse, results.lse, results.dout, results.out) if x is not None]
        of_rows, fields = len(tensors), self.fields.rows[-len(tensors) :]
        kept, self.kept = iter(self.kept), []
        if not self.keeps:
            tensors, fields = [*tensors, *self.own(work)], (*fields, *self.fields.inputs)
        arriving = self.arriving("backward", fields, tensors)
        next(arriving)
        grads = work.backward(results)
        computed = []
        for bundle, whole in self.wholes(arriving, fields, tensors):
            *dlse, lse, dout, out = whole[:of_rows]
            sources = Inputs(*(whole[of_rows:] or next(kept)))
            if self.keeps and lse.device.type == "cpu":  # as `without_silent_rows` has made the rows of this rank
                sources = sources._replace(q=sources.q.masked_fill((lse == torch.inf).unsqueeze(-1), 0.0))
            computed.append(self.compute(work, bundle, sources, Outputs(out, lse, dout, dlse[0] if dlse else None)))
        for bundle, parts in self.back("backward", self.fields.gradients, computed):
            for grad, x, group in zip(grads, parts, (work.group, 1, 1), strict=True):
                bundle.members[self.rank].of(grad, group).add_(x)
        return grads

    def wholes(
        self, arriving: Iterator[Came], fields: Fields, tensors: Sequence[Tensor]
    ) -> Iterator[tuple[Bundle, list[Tensor]]]:
        """Each segment that is computed here: for each field (B, L, heads of the bundle, ...)."""
        (came,) = arriving
        came[self.rank] = [rows_of(tensors, bundle.members[self.rank], fields) for bundle in self.mine]
        waiting = {member: iter(parts) for member, parts in came.items()}
        for bundle in self.mine:
            pieces = zip(*(next(waiting[member]) for member in bundle.members), strict=True)
            yield bundle, [torch.cat(some, 1) for some in pieces]

    def compute(self, work: Work, bundle: Bundle, sources: Inputs, results: Outputs | None = None) -> list[Tensor]:
        """out and lse of a whole segment, (B, L, heads, ...), or with ``results`` its gradients."""
        whole, outputs = bundle.block.queries, list[Tensor]()
        for block, parts in work.each([bundle.block], sources, results, (whole, whole)):
            groups = [part.shape[2] // block.heads for part in parts]
            outputs = outputs or [
                part.new_empty(*sources.q.shape[:2], whole.heads * group, *part.shape[3:])
                for part, group in zip(parts, groups, strict=True)
            ]
            for x, part, group in zip(outputs, parts, groups, strict=True):
                block.queries.within(whole).of(x, group).copy_(part)
        return outputs

    def back(
        self, direction: str, fields: Fields, results: Sequence[Sequence[Tensor]]
    ) -> Iterator[tuple[Bundle, Part]]:
        """Results (B, L, heads, ...) of the segments computed here go to their rows; then those of this rank's rows."""
        ((there, here, _),) = self.steps
        parts = by_rank(
            (member, rows_of(tensors, view.within(bundle.block.queries), fields))
            for bundle, tensors in zip(self.mine, results, strict=True)
            for member, view in bundle.members.items()
        )
        own = parts.pop(self.rank, ())
        messages = {member: pack(some, here[member], fields) for member, some in parts.items()}
        with self.post(f"hop 2 of the {direction}", messages, there, fields) as came:
            waiting = {target: iter(some) for target, some in (came | {self.rank: own}).items()}
            for bundle in self.bundles:
                yield bundle, next(waiting[bundle.target])
