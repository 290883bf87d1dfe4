"""Few queries at given positions of a longer key sequence, on any backend: dense problems on strided views.

As `_plan` and `_work` for whole sequences, but keys are cut where the queries end, and only those rows of key and
value are read, converted or cleaned that some query sees. The backward pass needs the merged out and lse alone.

Legend: q, out (B, n, H, D); k, v (B, N, Hk, D); lse (B, n, H); padding (B, N), True = ignore; n <= N, group = H // Hk;
firsts: for each sample the position in N of its first query.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention import _engine
from dilated_attention._plan import Block, Plan, head_runs
from dilated_attention._settings import Settings, sample_ends
from dilated_attention._shards import Heads, Shards
from dilated_attention._work import Work
from dilated_attention.backends.choose import choose
from dilated_attention.backends.problem import Masking
from dilated_attention.merge import add_zero_keys_, merge_
from dilated_attention.pattern import DilatedPattern, rows_at_offset

# --- the dense problems -----------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """Some queries and keys that they see, as views of the same heads."""

    queries: Block  # tokens count from the first query
    keys: Block  # tokens count from the first key
    is_causal: bool  # query row i sees key rows up to i; else all


class Rows(NamedTuple):
    """Of one head in one segment: rows before the queries, up to the last query, in all; and torchscale's zero keys."""

    before: int
    upto: int
    everywhere: int
    zeros: int


@functools.lru_cache(maxsize=512)
def stretches(
    pattern: DilatedPattern,
    sample: int,
    samples: int,
    first: int,
    queries: int,
    tokens: int,
    heads: Heads,
    group: int,
    is_causal: bool,
) -> tuple[Stretch, ...]:
    """The work of ``samples`` samples from ``sample`` on, whose queries stand at [first, first + queries)."""
    found: list[Stretch] = []
    for branch, (width, rate) in enumerate(pattern.branches):
        for start, stop, segments in _pieces(first, first + queries, width):
            segment = start - start % width
            length = min(width, tokens - segment)
            placed: list[tuple[int, ...]] = []
            rows: dict[int, Rows] = {}
            for head, offset in heads.of_branch(pattern, branch):
                here = Rows(
                    rows_at_offset(start - segment, rate, offset),
                    rows_at_offset(stop - segment, rate, offset),
                    rows_at_offset(length, rate, offset),
                    pattern.zeros_in_segment(branch, length, offset, tokens),
                )
                if here.upto > here.before:
                    placed.append((head, (offset - (start - segment)) % rate))
                    rows[head] = here
            # samples and segments are not one batch, as their strides do not chain: the fewer of them are a loop
            parts = [(sample, samples, at * width, 1) for at in range(segments)]
            if samples < segments:
                parts = [(sample + i, 1, 0, segments) for i in range(samples)]
            for run, (i, many, at, some) in itertools.product(head_runs(placed, rows.__getitem__, group), parts):
                seen = rows[run.first[0]]
                shape = (branch, i, many, start - first + at, some, width, rate, *run.shape())
                block = Block(*shape, seen.upto - seen.before, segment - first + at, seen.zeros)
                found += _with_keys(block, seen, first, is_causal)
    return tuple(found)


def _with_keys(queries: Block, rows: Rows, first: int, is_causal: bool) -> Iterator[Stretch]:
    """The keys of some queries: the whole segment, or when causal the earlier ones and then a triangle."""
    # heads of a view have equally many rows before the queries, so their offsets step alike from the segment's start
    offset = (queries.offset + queries.start - queries.segment_start) % queries.dilation
    keys = replace(queries, start=queries.segment_start + first, offset=offset)
    if not is_causal:
        yield Stretch(queries, replace(keys, rows=rows.everywhere), False)
    elif queries.rows == 1:
        yield Stretch(queries, replace(keys, rows=rows.upto), False)
    else:
        if rows.before:
            yield Stretch(queries, replace(keys, rows=rows.before), False)
        yield Stretch(queries, replace(queries, start=queries.start + first), True)


def _pieces(first: int, last: int, width: int) -> list[tuple[int, int, int]]:
    """[first, last) cut at segments: (start, stop, how many more like it follow, and itself)."""
    found = []
    if first % width:  # the end of a segment, or a part inside
        stop = min(last, first - first % width + width)
        found.append((first, stop, 1))
        first = stop
    whole = (last - first) // width
    if whole:
        found.append((first, first + width, whole))
        first += whole * width
    if first < last:
        found.append((first, last, 1))
    return found


# --- forward and backward ---------------------------------------------------------------------------------------


def forward(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, seed: Tensor | None, firsts: Sequence[int], s: Settings
) -> tuple[Tensor, Tensor]:
    with _engine.no_autocast(q.device):
        work = _work(q, k, v, padding, seed, s)
        out, lse = work.empty_result()
        for here, stretch, problem in _problems(work, firsts, q.dtype):
            block, zeros = stretch.queries, here.log_zero_keys(stretch.queries)
            for _, _, (part, part_lse) in work.attend(*problem):
                if zeros is not None:
                    add_zero_keys_(part, part_lse, zeros)
                merge_(block.view(out, work.group), block.view(lse, work.group), part, part_lse)
    return _engine.finished(out, lse, q)


def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    firsts: Sequence[int],
    s: Settings,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of key and value are 0 in rows that no query sees, but as large as key and value."""
    with _engine.no_autocast(q.device):
        q, dout, dlse, out, lse, bad = _engine.without_bad_rows(q, dout, dlse, out, lse)
        work = _work(_engine.one_layout(q), k, v, padding, seed, s)
        rows = work.rows(dout, dlse, out, lse)
        dq = torch.zeros(work.q.shape, dtype=lse.dtype, device=q.device)
        dk, dv = (torch.zeros(x.shape, dtype=work.q.dtype, device=q.device) for x in (k, v))
        for _, stretch, problem in _problems(work, firsts, q.dtype):
            for _, _, parts in work.attend_backward(work.of_rows(stretch.queries, rows), *problem):
                stretch.queries.view(dq, work.group).add_(parts[0])
                for grad, part in zip((dk, dv), parts[1:], strict=True):
                    stretch.keys.view(grad).add_(part[..., : q.shape[-1]])
    if bad is not None:
        dq = dq.masked_fill(bad.unsqueeze(-1), torch.nan)
    return dq[..., : q.shape[-1]].to(q.dtype).contiguous(), dk.to(k.dtype), dv.to(v.dtype)


def _work(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, seed: Tensor | None, s: Settings) -> Work:
    """As `Work.prepare`, with nothing done to key and value: only views of them are made usable."""
    request = s.request(q, padding is not None)
    ends = None
    if padding is not None and s.pattern.rule == "torchscale" and not s.is_causal:
        ends = sample_ends(padding)
    plan = Plan((), bare=(0, k.shape[2]), fillable=False, merges=True)
    shards, choice = Shards((0,)), choose(s.backend, request)
    work = Work(q, k, v, padding, seed, s, choice, request, plan, shards, rank=1, ends=ends, limit=None)
    return replace(work, q=work.usable(q))


Problem = tuple[Tensor, Tensor, Tensor, Masking]  # q, k, v and how they are masked


def _problems(work: Work, firsts: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[Work, Stretch, Problem]]:
    """Every stretch as a dense problem, with the work as its samples have it: they stand at the same positions."""
    s, queries, tokens, sample = work.settings, work.q.shape[1], work.k.shape[1], 0
    for first, same in itertools.groupby(firsts):
        samples = len(list(same))
        here = replace(work, shards=Shards((0, first, first + queries, tokens)))
        heads = s.heads(work.k)
        for stretch in stretches(
            s.pattern, sample, samples, first, queries, tokens, heads, work.group, s.is_causal
        ):  # fmt: skip
            yield here, stretch, _problem(here, stretch, dtype)
        sample += samples


def _problem(work: Work, stretch: Stretch, dtype: torch.dtype) -> Problem:
    """Here rows of key and value are read, and nowhere else; rounded as autocast rounds them in a whole call."""
    q, k, v = stretch.queries.view(work.q, work.group), *(stretch.keys.view(x).to(dtype) for x in (work.k, work.v))
    padding = dropout = None
    if work.padding is not None:  # 0 * NaN in a masked slot would be NaN
        padding = stretch.keys.view(work.padding_of_heads)
        k, v = (x.masked_fill(padding.unsqueeze(-1), 0.0) for x in (k, v))
    if work.seed is not None:
        dropout = work.dropout_of_keys(stretch.queries, work.seed, _positions(stretch.keys, q.device))
    return q, work.usable(k), work.usable(v), Masking(work.settings.scale, stretch.is_causal, padding, dropout)


def _positions(block: Block, device: torch.device) -> Tensor:
    """(b, L, h): the tokens of a block's rows."""
    segment, row, head = (torch.arange(n, device=device) for n in (block.segments, block.rows, block.heads))
    token = block.start + block.segment_length * segment[:, None, None] + block.dilation * row[:, None]
    return (token + block.offset + block.offset_step * head).repeat(block.samples, 1, 1)
