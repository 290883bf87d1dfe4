"""A launch's work on the device: the tables of `tiling` for all heads, periods and samples as three runs of integers.

Legend: a section is one nest over whole periods of a sequence, or over the tail that is left (empty where there is
none); ``own`` rows of a program, which meets tiles of ``other`` rows; cu_seqlens: where sequences begin, the last end.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dilated_attention.backends.triton.strips import NONE, Strip, Strips, pieces, tiles_in
from dilated_attention.backends.triton.tiling import CPU, Array, Nest, Nests, Tiling, tiles_of, tiling
from dilated_attention.branches.base import grouped
from dilated_attention.checks import Ints
from dilated_attention.pattern import MAX_BRANCHES

NEVER = 2**31 - 1  # the first program of nothing
LANES = 128  # sections that a program looks at together, where sequences are packed


class Demand(NamedTuple):
    """What a launch needs a table for. Launches that differ in other things, such as the scale, share one."""

    nests: Nests | Strips
    samples: int
    cu_seqlens: Ints
    group: int  # programs for each tile of a key/value head: its query heads, or 1
    own: int
    other: int
    sees: str
    widest_stride: int
    device: torch.device


@dataclass(frozen=True, eq=False)
class Table:
    """A launch's table on a device, and its number of programs."""

    sections: Tensor
    tiles: Tensor
    runs: Tensor
    parts: int  # sections; 0: sequences are packed, and the table says how many
    programs: int
    single: bool  # whether all whole tiles of a program are one run
    edges: bool  # whether any tile is masked
    ragged: bool  # whether any tile is not full


_used: WeakValueDictionary[Demand, Table] = WeakValueDictionary()


def table(demand: Demand) -> Table:
    """A table that was made before and is still in use, or else a new one."""
    found = _used.get(demand)
    if found is None:
        found = _used[demand] = make_table(demand)
    return found


def make_table(demand: Demand) -> Table:
    if demand.device.type != "cuda":
        return _made(demand)
    # By another thread: while torch.compile(mode="reduce-overhead") tries a graph, all that this one allocates lies in
    # the graph's memory, and must be gone with it. A table is there for longer than this call.
    try:
        return another_thread().submit(_made_beside, demand).result()
    except RuntimeError as error:
        if not torch.cuda.is_current_stream_capturing():
            raise
        raise RuntimeError(
            "dilated_attention has work to prepare, once for tensors of such shapes and strides, and cannot while "
            "a CUDA graph is captured: make the same call before, outside of the graph"
        ) from error


def _made_beside(demand: Demand) -> Table:
    """On the stream of tables."""
    with torch.cuda.stream(stream := stream_of_tables(demand.device)):
        found = _made(demand)
    stream.synchronize()
    return found


@functools.cache
def another_thread() -> ThreadPoolExecutor:
    """Kept, as a packing that is new may need dozens of tables."""
    return ThreadPoolExecutor(1, "dilated_attention tables")


@functools.cache
def stream_of_tables(device: torch.device) -> torch.cuda.Stream:
    """The stream whose memory tables lie in."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _made(demand: Demand) -> Table:
    nests = demand.nests
    made = _of_strips(demand, nests) if isinstance(nests[0], Strip) else _of_nests(demand, nests)
    sections, parts, variants, single, are_many = made
    kept = sections[:, 0] != NEVER
    here = Section._make(sections.T)
    many = demand.samples * demand.group * here.heads * here.periods * here.tiles * kept
    programs = int(many.sum())
    sections[kept, 0] = (many.cumsum() - many)[kept]
    count = len(sections)
    numbers: list[Any] = [sections.ravel(), variants]
    if are_many:  # how many sections, with and without filling, and the first program of each, in LANES
        filling = -count % LANES
        numbers = [[count + filling, count, 0, 0], sections[:, 0], [NEVER] * filling, *numbers]
    data, tiles, runs = _joined(np.concatenate(numbers), parts, demand, max(programs, sections.max()))
    edges, ragged = any(part.edges for part in parts), any(part.ragged for part in parts)
    return Table(data, tiles, runs, 0 if are_many else count, programs, single, edges, ragged)


# (S, 16) sections without their programs; what they have; variants; whether all whole tiles of a program are one run,
# and whether sections are so many that programs look for theirs
Made = tuple[Array, list[Tiling], list[int], bool, bool]


def _of_nests(demand: Demand, nests: Nests) -> Made:
    rows: list[Array] = []
    variants: list[int] = []
    parts: list[Tiling] = []
    for nest in nests:
        offsets = tuple(sorted(set(nest.offsets)))
        stretches, lengths, which = _stretches(nest.widths[-1], demand.cu_seqlens)
        tiles = _placed(parts, nest, offsets, lengths, demand)[:, which]
        about = nest.head, len(nest.offsets), *tiles, len(variants), nest.branch, nest.widths[0], 0, 0
        found = Section(0, *stretches, *about)
        # without a tail a section that no program is in, as kernels are compiled for their number
        none = [found._replace(program=NEVER, periods=1, tiles=1)] if len(which) == 1 else []
        rows += [np.stack(np.broadcast_arrays(*some), 1) for some in (found, *none)]
        variants += map(offsets.index, nest.offsets)
    single = all(len(nest.widths) == 1 for nest in nests)
    return np.concatenate(rows), parts, variants, single, len(demand.cu_seqlens) > 2


def _of_strips(demand: Demand, strips: Strips) -> Made:
    """Sections that are many are looked for as those of packed sequences are."""
    rows, parts, tile = [], [], 0
    every = (piece for strip in strips for piece in pieces(strip, demand.own))
    for (low, high), alike in grouped(every, lambda piece: (piece.low, piece.high)).items():  # made at once
        limits = max(low, -NONE), min(high, NONE)
        mine, met, many = [], [], 0
        for piece in alike:
            counts = tiles_in(piece.mine, demand.own)
            place = 0, piece.start, piece.period, piece.repeats, 0, demand.cu_seqlens[-1], piece.head, piece.heads
            rows.append(Section(*place, tile, int(counts.sum()), 0, 0, piece.branch, 0, *limits))
            tile += rows[-1].tiles
            mine.append(np.column_stack([piece.mine, counts]))
            met.append(piece.met + np.array([many, 0, 0, 0, 0]))
            many += len(counts)
        own, others = (torch.from_numpy(np.concatenate(x)) for x in (mine, met))
        parts.append(tiles_of(own, others, low, high, demand.own, demand.other))
    if len(rows) == 1:
        rows.append(rows[0]._replace(program=NEVER, periods=1, tiles=1))
    single = all(len(strip.met) == len(strip.mine) for strip in strips)
    return np.array(rows), parts, [0] * max(strip.heads for strip in strips), single, len(rows) > 2


# Periods with the same tiles, in the order in which the kernels read the numbers: of some, an array each.
Section = namedtuple(
    "Section",
    (
        "program", "start", "length", "periods",  # the first program; the first period's start, their length, number
        "begin", "end",  # of the sequence that they are in
        "head", "heads",  # the first key/value head, and how many
        "tile", "tiles",  # the first, and those of one head
        "apart",  # tiles from those of one offset to those of the next
        "variant",  # where it is written which offset each head has
        "branch", "width",  # the first
        "low", "high",  # limits for the position met less that of a row, of strips
    ),
)  # fmt: skip


@functools.lru_cache(maxsize=16)  # other kernels of the call ask again
def _stretches(width: int, cu_seqlens: Ints) -> tuple[Array, Ints, Array]:
    """The whole periods of each sequence, and its tail if there is one: the second to sixth numbers of a section. The
    longest first, so that all processors have work up to the end. And the lengths that there are, with that of each."""
    begin, end = np.array([cu_seqlens[:-1], cu_seqlens[1:]])
    length = np.minimum(width, end - begin)
    whole, tail = np.divmod(end - begin, length)
    both = (begin, length, whole, begin, end), (end - tail, tail, np.ones_like(tail), begin, end)
    found: Array = np.array(both).transpose(1, 2, 0).reshape(5, -1)
    found = found[:, found[1] > 0]
    found = found[:, np.argsort(-found[1], kind="stable")]
    lengths, which = np.unique(found[1], return_inverse=True)
    return found, tuple(lengths.tolist()), which


def _placed(parts: list[Tiling], nest: Nest, offsets: Ints, lengths: Ints, demand: Demand) -> Array:
    """Of each length: the first tile, tiles, and tiles from one offset to the next. What it needs is added to parts."""
    found = np.empty((3, len(lengths)), np.int64)
    tails = len(lengths) - (lengths[-1] == nest.widths[-1])  # which seldom come again, unlike a period
    for make, where, some in ((_period, CPU, slice(tails, None)), (tiling, demand.device, slice(tails))):
        if lengths[some]:
            part = make(nest.widths, nest.rates, offsets, lengths[some], demand.own, demand.other, demand.sees, where)
            found[0, some] = sum(len(one.tiles) for one in parts) + part.counts.cumsum() - part.counts
            found[1, some], found[2, some] = part.counts, part.counts.sum()
            parts.append(part)
    return found


def _joined(sections: Array, parts: list[Tiling], demand: Demand, largest: int) -> tuple[Tensor, ...]:
    """All that kernels read: one tensor, cut into three, and moved at once if all was made on the host."""
    where = CPU if all(part.runs.device.type == "cpu" for part in parts) else demand.device
    after = torch.tensor([[0, 1, 0, 1, 1]] * 2, device=where)  # after the last run: read, not used
    runs = torch.cat([*(part.runs.to(where) for part in parts), after])
    logs = torch.arange(1, MAX_BRANCHES + 1, device=where, dtype=torch.float64).log2().float().view(torch.int32)
    runs[:, 4] = logs[runs[:, 4] - 1]  # kernels take the bits of a float32
    made = np.cumsum([0, *(len(part.runs) for part in parts)]).tolist()
    indices = torch.tensor([0, 0, 0, 1, 0, 0, 1], device=where)  # those of runs
    tiles = torch.cat([part.tiles.to(where) + first * indices for part, first in zip(parts, made, strict=False)])
    flat = [torch.as_tensor(sections, device=where), tiles.view(-1), runs.view(-1)]
    padded = [functional.pad(x, (0, -len(x) % 4)) for x in flat]  # each aligned as Triton likes it
    # 32 bits are enough unless an offset inside a tile or a position needs more
    steps = int(torch.maximum(tiles[:, 1].max(), runs[:, 1].max())) * max(demand.own, demand.other)
    is_wide = max(steps * demand.widest_stride, demand.cu_seqlens[-1], largest) >= 2**31
    data = torch.cat(padded).to(torch.int64 if is_wide else torch.int32)
    return data.to(demand.device).split_with_sizes([len(x) for x in padded])


_period = functools.lru_cache(maxsize=64)(tiling)
