"""A launch's work on the device: the tables of `tiling` for all heads, periods and samples as three runs of integers.

Legend: a section is one nest over whole periods of a sequence, or over the tail that is left (empty where there is
none); ``own`` rows of a program, which meets tiles of ``other`` rows; borders: where sequences begin, and the last end.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from dilated_attention.backends.triton.tiling import CPU, Nest, Nests, Tiling, rows_of, tiling

NEVER = 2**31 - 1  # the first program of nothing
P = ParamSpec("P")
LANES = 128  # sections that a program looks at together, where sequences are packed
AT_ONCE = 1 << 22  # candidates for a run, each of which takes some ten integers, in making a table
FEW = 1 << 19  # candidates: those of more are looked through on the device


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


def _shared(make: Callable[P, Table]) -> Callable[P, Table]:
    """What was made before and is still in use, and else a new one."""
    used: WeakValueDictionary[tuple[Any, ...], Table] = WeakValueDictionary()

    @functools.wraps(make)
    def found_or_made(*args: P.args, **kwargs: P.kwargs) -> Table:
        key = (args, tuple(kwargs.items()))
        found = used.get(key)
        if found is None:
            found = used[key] = make(*args, **kwargs)
        return found

    return found_or_made


@_shared
def table(
    nests: Nests,
    samples: int,
    borders: tuple[int, ...],
    group: int,
    own: int,
    other: int,
    sees: str,
    widest_stride: int,
    device: torch.device,
) -> Table:
    """``group`` programs for each tile of a key/value head: its query heads, or 1.

    Launches that differ in other things, such as the scale, share one.
    """
    given = (nests, samples, borders, group, own, other, sees, widest_stride, device)
    if device.type != "cuda":
        return _made(*given)
    # By another thread: while torch.compile(mode="reduce-overhead") tries a graph, all that this one allocates lies in
    # the graph's memory, and must be gone with it. A table is there for longer than this call.
    with ThreadPoolExecutor(1) as another:
        try:
            return another.submit(_made_beside, *given).result()
        except RuntimeError as error:
            if not torch.cuda.is_current_stream_capturing():
                raise
            raise RuntimeError(
                "dilated_attention has work to prepare, once for tensors of such shapes and strides, and cannot while "
                "a CUDA graph is captured: make the same call before, outside of the graph"
            ) from error


def _made_beside(*given: Any) -> Table:
    """On the stream of tables."""
    stream = stream_of_tables(given[-1])
    with torch.cuda.stream(stream):
        found = _made(*given)
    stream.synchronize()
    return found


@functools.cache
def stream_of_tables(device: torch.device) -> torch.cuda.Stream:
    """The stream whose memory tables lie in."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _made(
    nests: Nests,
    samples: int,
    borders: tuple[int, ...],
    group: int,
    own: int,
    other: int,
    sees: str,
    widest_stride: int,
    device: torch.device,
) -> Table:
    sections: list[Section] = []
    variants: list[int] = []
    found = _Tables(own, other, sees, device)
    programs = 0
    for nest in nests:
        offsets = sorted(set(nest.offsets))
        stretches = _stretches(nest, borders)
        placed = found.add(nest, tuple(offsets), {stretch.length for stretch in stretches})
        for stretch in stretches:
            first, count, apart = placed[stretch.length]
            about = (programs, *stretch, nest.head, len(nest.offsets), first, count, apart)
            sections.append(Section(*about, len(variants), nest.branch, nest.widths[0]))
            programs += samples * stretch.periods * len(nest.offsets) * group * count
        if len(stretches) == 1:  # no tail: a section that no program is in, as kernels are compiled for their number
            sections.append(sections[-1]._replace(program=NEVER, periods=1, tiles=1))
        variants += [offsets.index(offset) for offset in nest.offsets]
    # 32 bits are enough unless an offset inside a tile or a position needs more
    steps = max(nest.rates[-1] for nest in nests) * max(own, other) * widest_stride
    wide = max(steps, borders[-1], programs, max(map(max, sections))) >= 2**31
    is_packed = len(borders) > 2
    tiles, runs = found.joined()
    parts = [_laid_out(sections, variants, is_packed), tiles.flatten(), runs.flatten()]
    parts = [F.pad(part, (0, -len(part) % 4)) for part in parts]  # each aligned as Triton likes it
    data = torch.cat([part.to(tiles.device, torch.int64 if wide else torch.int32) for part in parts]).to(device)
    cut = data.split_with_sizes([len(part) for part in parts])
    single, edges = all(len(nest.widths) == 1 for nest in nests), bool(tiles[:, 5].any())
    return Table(cut[0], cut[1], cut[2], 0 if is_packed else len(sections), programs, single, edges, found.ragged)


class Section(NamedTuple):
    """Periods with the same tiles, in the order in which the kernels read the numbers."""

    program: int  # the first
    start: int  # of the first period
    length: int  # of each
    periods: int
    begin: int  # of the sequence that they are in
    end: int
    head: int  # the first key/value head,
    heads: int  # and how many
    tile: int  # the first
    tiles: int  # of one head
    apart: int  # tiles from those of one offset to those of the next
    variant: int  # where it is written which offset each head has
    branch: int
    width: int  # of the first branch


def _laid_out(sections: list[Section], variants: list[int], is_packed: bool) -> Tensor:
    """Sections, then variants. Where sequences are packed, before them: how many sections there are, with and without
    filling, and the first program of each, in steps of LANES."""
    numbers = [*itertools.chain.from_iterable(sections), *variants]
    if is_packed:
        sections = [one for one in sections if one.program != NEVER]
        numbers = [*itertools.chain.from_iterable(sections), *variants]
        firsts = [one.program for one in sections]
        filling = -len(firsts) % LANES
        numbers = [len(firsts) + filling, len(firsts), 0, 0, *firsts, *[NEVER] * filling, *numbers]
    return torch.tensor(numbers, device=CPU)


class Stretch(NamedTuple):
    """Periods of one sequence, [begin, end)."""

    start: int
    length: int
    periods: int
    begin: int
    end: int


def _stretches(nest: Nest, borders: tuple[int, ...]) -> list[Stretch]:
    """The whole periods of each sequence, and its tail if there is one; the longest first, so that all processors have
    work up to the end."""
    found = []
    for begin, end in itertools.pairwise(borders):
        width = min(nest.widths[-1], end - begin)
        whole, tail = divmod(end - begin, width)
        found.append(Stretch(begin, width, whole, begin, end))
        if tail:
            found.append(Stretch(end - tail, tail, 1, begin, end))
    return sorted(found, key=lambda stretch: -stretch.length)


class _Tables:
    """The tiles and runs of one launch."""

    def __init__(self, own: int, other: int, sees: str, device: torch.device) -> None:
        self.how, self.device = (own, other, sees), device
        self.tiles: list[Tensor] = []
        self.runs: list[Tensor] = []
        self.number = self.runs_number = 0
        self.ragged = False

    def add(self, nest: Nest, offsets: tuple[int, ...], lengths: set[int]) -> dict[int, tuple[int, int, int]]:
        """Periods of these lengths: of each the first tile, tiles, and tiles from one offset to the next."""
        placed = {}
        rest = sorted(lengths - {nest.widths[-1]})  # those seldom come again
        for make, some in ((_period, sorted(lengths - set(rest))), (tiling, rest)):
            if some:
                at, counts = self._make(make, nest, offsets, tuple(some))
                firsts = itertools.accumulate(counts, initial=at)
                for length, first, count in zip(some, firsts, counts, strict=False):
                    placed[length] = (first, count, sum(counts))
        return placed

    def _make(
        self, make: Callable[..., Tiling], nest: Nest, offsets: tuple[int, ...], lengths: tuple[int, ...]
    ) -> tuple[int, tuple[int, ...]]:
        at = self.number
        counts: tuple[int, ...] = ()
        size = _candidates(nest, lengths, self.how[0])
        where = self.device if make is tiling and size * len(offsets) > FEW else CPU
        at_once = max(1, AT_ONCE // size)
        for first in range(0, len(offsets), at_once):
            part = make(nest.widths, nest.rates, offsets[first : first + at_once], lengths, *self.how, where)
            tiles = part.tiles.flatten(0, 1)
            if self.runs_number:
                tiles = tiles.clone()  # a period's are kept
                tiles[:, 3::3] += self.runs_number
            self.tiles.append(tiles)
            self.runs.append(part.runs)
            self.number, self.runs_number = self.number + len(self.tiles[-1]), self.runs_number + len(part.runs)
            self.ragged, counts = self.ragged or part.ragged, part.counts
        return at, counts

    def joined(self) -> tuple[Tensor, Tensor]:
        """All tiles and runs: on the CPU if all were made there, so that they are moved at once."""
        where = max((x.device for x in self.runs), key=lambda device: device != CPU)
        after = torch.tensor([[0, 1, 0, 1, 1]] * 2, device=CPU)  # the last run: read, not used
        runs = torch.cat([x.to(where) for x in (*self.runs, after)])
        runs[:, 4] = runs[:, 4].float().log2().view(torch.int32)  # the kernels take the bits of a float32
        return torch.cat([x.to(where) for x in self.tiles]), runs


def _candidates(nest: Nest, lengths: tuple[int, ...], own: int) -> int:
    """For a run, of one offset: what making a table takes grows with it."""
    kinds = len(rows_of(nest.rates, 0))
    tiles = sum(length // own + kinds * (1 + length // nest.widths[0]) for length in lengths)
    return tiles * kinds * 6 * len(nest.rates)


_period = functools.lru_cache(maxsize=64)(tiling)
