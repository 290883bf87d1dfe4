"""A call block by block: one loop over blocks each way, whatever the rule, the backend or the masks.

The backward pass needs nothing of the forward pass but the merged out and lse: given those, the ordinary flash backward
of each block gives its exact share of the gradients.

Legend: q, out (B, n, H, D); k, v (B, N, Hk, D); lse (B, n, H); padding (B, N), True = ignore; group = H // Hk.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from dilated_attention import merge
from dilated_attention.backends import triton
from dilated_attention.backends.choose import Choice
from dilated_attention.backends.problem import Gradients, Inputs, Limits, Outputs, Pair, Problem
from dilated_attention.backends.tensors import readable, span, within, without_infinity
from dilated_attention.blocks import Block, View
from dilated_attention.call import Call, outside, sample_ends
from dilated_attention.dropout import Dropout, row_words
from dilated_attention.plan import Away, Plan, SegmentHeads, folds, plan

log = logging.getLogger("dilated_attention")
Wholes = tuple[View | None, View | None]  # the rows that tensors of queries and of keys have; None: all of this rank
HERE: Wholes = (None, None)


class MemoryCap:
    """A cap on the bytes that the results of one block may take, and how often memory ran out nevertheless.

    A call names it by number, as it must be hashable; without a limit memory that runs out still leads to a second try.
    """

    _all: ClassVar[weakref.WeakValueDictionary[int, MemoryCap]] = weakref.WeakValueDictionary()
    _numbers: ClassVar[Iterator[int]] = itertools.count(1)

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes, self.retries, self.number = max_bytes, 0, next(self._numbers)
        self._all[self.number] = self

    @classmethod
    def of(cls, call: Call) -> MemoryCap | None:
        return cls._all.get(call.memory_cap_id)


@dataclass(frozen=True)
class Work:
    """A call with its tensors made readable for the chosen backend, and its plan."""

    call: Call
    own: Inputs  # what the views of the call's blocks are views of; other blocks have rows that came from elsewhere
    choice: Choice
    limits: Limits
    plan: Plan
    ends: Tensor | None  # (B,) where each sample ends: after its last token that is not padding

    @staticmethod
    def of(
        call: Call, inputs: Inputs, choice: Choice, *, backward: bool = False, ends: Tensor | None = None,
        keys_follow: bool = False, computed_remotely: SegmentHeads = frozenset(),
    ) -> Work:  # fmt: skip
        """``ends``: of all ranks, where there are several. ``keys_follow`` and ``computed_remotely`` as in `plan`."""
        q, k, v, padding, seed, positions, _ = inputs
        limits: Limits = choice.module.limits(call)
        if limits.span is not None and not call.in_parts and all(span(x) < limits.span for x in (q, k, v)):
            limits = limits._replace(span=None)  # so no view of them is too long
        if padding is not None:
            padding = padding.contiguous()
            if ends is None and call.adds_zeros:
                ends = sample_ends(padding, call.key_start)
            padding = padding.unsqueeze(2).expand(-1, -1, k.shape[2])  # the same for each head
        q = readable(q if backward else without_infinity(q), call, limits)
        if not call.is_decode:  # few queries read few keys: only what they see is cleaned and converted
            k, v = readable(k, call, limits, padding), readable(v, call, limits, padding)
        if positions is None:
            blocks = _cut_plan(call, limits, backward, folds(q, k, v), keys_follow, computed_remotely)
        else:
            blocks = _plan_of_positions(call, limits, backward, positions)
        return Work(call, Inputs(q, k, v, padding, seed), choice, limits, blocks, ends)

    @property
    def group(self) -> int:
        return self.call.q_per_kv

    def results(self, results: Outputs) -> Outputs:
        """The merged results and their gradients as blocks read them, in one layout: blocks may fold samples."""
        out, lse, dout, dlse = results
        dout, out = (readable(x, self.call, self.limits).contiguous() for x in (dout, out))
        return Outputs(out, lse.contiguous(), dout, None if dlse is None else dlse.contiguous())

    # --- one block ----------------------------------------------------------------------------------------------

    def compute(self, block: Block, sources: Inputs, results: Outputs | None, wholes: Wholes) -> tuple[Tensor, ...]:
        """(out, lse) of a block's queries with its keys alone, or the block's share of the gradients."""
        call, limits, module, kernels = self.call, self.limits, self.choice.module, self.choice.kernels
        queries, keys = block.queries.within(wholes[0]), block.keys.within(wholes[1])
        q, k, v = queries.of(sources.q, self.group), keys.of(sources.k), keys.of(sources.v)
        padding = ignored = None
        if sources.padding is not None:
            padding = keys.of(sources.padding)
            if not block.keys.token_step:  # heads share it, and kernels that group heads want one for all
                padding = padding[:, :, :1]
            ignored = padding.transpose(1, 2).unsqueeze(2)
        if call.is_decode:
            k, v = readable(k, call, limits, padding), readable(v, call, limits, padding)
        q, k, v = (within(x, limits.span) for x in (q, k, v))
        dropout = None if self.own.seed is None else self._dropout(block, self.own.seed)
        if block.has_mask:
            hidden = self._hidden(block)
            ignored = hidden if ignored is None else ignored | hidden
        problem = Problem(q, k, v, call.scale, block.is_causal, ignored, dropout)
        if results is None:
            return module.forward(kernels, problem)  # type: ignore[no-any-return]
        here = (None if x is None else within(queries.of(x, self.group), limits.span) for x in results)
        mine = Outputs(*here)  # type: ignore[arg-type]
        return module.backward(kernels, problem, mine)  # type: ignore[no-any-return]

    def _hidden(self, block: Block) -> Tensor:
        """(1, 1, Lq, Lk) bool: the pairs of a block that do not count."""
        views, device = (block.queries, block.keys), self.call.device
        rows, keys = (torch.arange(view.rows, device=device) for view in views)
        distance = keys - rows.unsqueeze(1)
        low, high = (-block.queries.rows if block.low is None else block.low), block.high
        hidden = (distance < low) | (distance > (block.keys.rows if high is None else high))
        if block.but:  # then it is a block of one head and segment
            query, key = (view.positions(device)[0, :, 0] - block.origin for view in views)
        for branch in block.but:
            hidden |= branch.sees(block.queries.head + self.call.first_head, query.unsqueeze(1), key)
        return hidden[None, None]

    def _dropout(self, block: Block, seed: Tensor) -> Dropout:
        """The words and positions of the block's rows, all by global index."""
        call, view, device = self.call, block.queries, self.call.device
        query, key = (
            x.positions(device).repeat(x.samples, 1, 1).repeat_interleave(self.group, 2) for x in (view, block.keys)
        )
        sample = torch.arange(view.samples, device=device).repeat_interleave(view.segments) + view.sample
        numbers = view.numbers
        head = torch.arange(numbers.start, numbers.stop, numbers.step, device=device)[:, None] + call.first_head
        head = (head * self.group + torch.arange(self.group, device=device)).flatten()
        return Dropout(call.dropout_p, *row_words(seed, block.branch, sample[:, None, None], head, query), key)

    def log_zero_keys(self, block: Block) -> Tensor | float | None:
        """Log of how many appended zero keys each row attends to; with padding, a sample ends at its last token."""
        if not self.call.adds_zeros:
            return None
        if self.ends is None:
            return math.log(block.zeros) if block.zeros else None
        view, rate, device = block.queries, block.queries.row_step, self.call.device
        longest = self.call.dilated.segment_lengths[block.branch]
        ends = self.ends[view.sample : view.sample + view.samples, None, None]
        starts = block.origin + view.segment_step * torch.arange(view.segments, device=device)
        real = (ends - starts[:, None]).clamp(0, longest)  # (samples, segments, 1)
        offset = (view.positions(device)[0, 0] - block.origin) % rate
        rows = -((offset - real) // rate).clamp(max=0)
        zeros = torch.where(real > 0, -(-ends.clamp(max=longest) // rate) - rows, 0)
        return zeros.repeat_interleave(self.group, 2).flatten(0, 1).unsqueeze(1).to(self.call.sum_dtype).log()

    # --- all blocks ---------------------------------------------------------------------------------------------

    def each(
        self, blocks: Iterable[Block], sources: Inputs, results: Outputs | None = None, wholes: Wholes = HERE
    ) -> Iterator[tuple[Block, tuple[Tensor, ...]]]:
        """(out, lse) of each block; with ``results`` its gradients. Blocks come cut as kernels and memory want them.
        ``wholes``: which rows the sources have, if they are not this rank's.

        Whoever asks takes each result before the next is computed, so no more than one is there at a time. Heads do not
        know of one another: a block that runs out of memory is computed again with half as many at a time.
        """
        backward = results is not None
        waiting = deque(blocks if blocks is self.plan.blocks else cut(blocks, self.call, self.limits, backward))
        if self.limits.span is not None:
            most = self.limits.span
            waiting = deque(part for block in waiting for part in self._within_span(block, sources, most, wholes))
        while waiting:
            block = waiting.popleft()
            try:
                parts = self.compute(block, sources, results, wholes)
            except torch.OutOfMemoryError as error:
                cap = MemoryCap.of(self.call)
                if cap is None:
                    raise
                if block.heads == 1:
                    raise torch.OutOfMemoryError(
                        f"out of memory with a single head in a call, whose results alone take "
                        f"{_bytes_per_head(block, self.call, self.limits, backward):,} bytes: use more ranks, shorter "
                        "segments, or fewer samples at a time"
                    ) from error
                cap.retries += 1
                half = block.heads // 2
                log.warning("out of memory with %d heads in a call: going on with %d at a time", block.heads, half)
                waiting.extendleft(reversed(block.cut(heads=half)))
                continue
            yield block, parts
            del parts  # taken by now: the next block has its room

    def _within_span(self, block: Block, sources: Inputs, most: int, wholes: Wholes) -> list[Block]:
        queries, keys = block.queries.within(wholes[0]), block.keys.within(wholes[1])
        views = queries.of(sources.q, self.group), keys.of(sources.k)
        if all(span(x) < most for x in views):
            return [block]
        batch = max(1, min(most // max(1, x.stride(0) * x.itemsize) for x in views))
        if any(span(x[:batch]) >= most for x in views):
            return block.cut(heads=1, batch=1)  # rows so far apart are copied, one head at a time
        return block.cut(batch=batch)

    def forward(self) -> Pair:
        out = lse = None
        for block, (part, part_lse) in self.each(self.plan.blocks, self.own):
            log_zeros = self.log_zero_keys(block)
            if out is None or lse is None:
                if block.covers(self.call) and log_zeros is None:
                    out = part.reshape(self.own.q.shape).to(self.out_dtype).contiguous()
                    lse = part_lse.reshape(self.own.q.shape[:3]).contiguous()
                    continue
                out, lse = self.empty_result()
            here, here_lse = block.queries.of(out, self.group), block.queries.of(lse, self.group)
            self.merging.merge_(here, here_lse, part, part_lse, log_zeros, first=block.is_first)
        return self.empty_result() if out is None or lse is None else (out, lse)

    def merge_away(self, part: Away, keys: Iterable[Tensor], out: Tensor, lse: Tensor) -> None:
        """Merge what the queries see of keys that lie elsewhere: k and v, and padding where there is any."""
        for block, seen in self.each(part.blocks, Inputs(self.own.q, *keys), None, (None, part.rows)):
            merge.merge_(*(block.queries.of(x, self.group) for x in (out, lse)), *seen)

    def backward(self, results: Outputs) -> Gradients:
        grads: list[Tensor] = []
        for block, parts in self.each(self.plan.blocks, self.own, results):
            if not grads:
                if block.covers(self.call) and not self.call.is_decode:
                    wholes = zip(parts, self.own[:3], strict=True)
                    grads = [x.reshape(y.shape).to(y.dtype).contiguous() for x, y in wholes]
                    continue
                grads = self._no_grads()
            views = [block.queries.of(grads[0], self.group), block.keys.of(grads[1]), block.keys.of(grads[2])]
            for view, x in zip(views, parts, strict=True):  # the rows of few queries' keys were padded when read
                self.merging.put_(view, x[..., : view.shape[-1]], not block.is_first)
        dq, dk, dv = grads or self._no_grads()
        return dq, dk, dv

    @functools.cached_property
    def merging(self) -> ModuleType:
        """What puts results together: our kernels, each step one launch, on devices that have Triton."""
        if self.call.device.type != "cuda" or not triton.INSTALLED or self.call.dtype is torch.float64:
            return merge
        from dilated_attention.backends.triton import fuse

        return fuse

    @property
    def out_dtype(self) -> torch.dtype:
        """Merging in half precision rounds at every merge: one or two of them keep within the bound, more do not."""
        one_device = not self.call.in_parts and not self.call.is_decode and self.merging is not merge
        few_merges = one_device and not self.call.pattern.needs_masks and len(self.call.pattern.branches) <= 3
        return self.call.sum_dtype if self.plan.merges and not few_merges else self.call.computed

    def empty_result(self) -> Pair:
        """(out, lse) of rows that see no key."""
        q = self.own.q
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=self.call.sum_dtype)
        return q.new_zeros(q.shape, dtype=self.out_dtype), lse

    def _no_grads(self) -> list[Tensor]:
        """In the dtype computed in: unlike out, gradients keep within their bound when branches are summed so."""
        dtype = self.call.computed
        dtypes = self.call.sum_dtype if self.call.is_decode else dtype, dtype, dtype
        return [x.new_zeros(x.shape, dtype=dtype) for x, dtype in zip(self.own[:3], dtypes, strict=True)]


def cut(blocks: Iterable[Block], call: Call, limits: Limits, backward: bool) -> Iterator[Block]:
    """The blocks as kernels and memory want them."""
    cap = MemoryCap.of(call)
    for block in blocks:
        rows, heads = limits.rows if block.queries.rows >= limits.from_rows else None, None
        if cap is not None and cap.max_bytes is not None:
            heads = max(1, cap.max_bytes // max(1, _bytes_per_head(block, call, limits, backward)))
        yield from block.cut(rows, heads, limits.batch)


def _bytes_per_head(block: Block, call: Call, limits: Limits, backward: bool) -> int:
    """The results of one key/value head and its query heads."""
    queries, keys = call.q_per_kv * block.batch * block.queries.rows, block.batch * block.keys.rows
    row = -(-call.head_dim // limits.pad) * limits.pad * call.computed.itemsize
    return (queries + 2 * keys) * row if backward else queries * (row + call.sum_dtype.itemsize)


@functools.lru_cache(maxsize=512)
def _cut_plan(call: Call, limits: Limits, backward: bool, *given: Any) -> Plan:
    whole = plan(call, *given)
    return whole._replace(blocks=tuple(cut(whole.blocks, call, limits, backward)))


def _plan_of_positions(call: Call, limits: Limits, backward: bool, positions: Tensor) -> Plan:
    """The blocks of few queries at positions of their own in each sample; the host waits to read them."""
    blocks: list[Block] = []
    for sample, at in enumerate(positions.tolist()):
        if not 0 <= at <= call.keys - call.queries:
            raise ValueError(outside(f"query_offset[{sample}]", at, call.queries, call.keys))
        for block in _cut_plan(call._replace(samples=1, start=at), limits, backward, False).blocks:
            queries, keys = (view._replace(sample=sample) for view in (block.queries, block.keys))
            blocks.append(block._replace(queries=queries, keys=keys))
    return Plan(tuple(blocks), True)
