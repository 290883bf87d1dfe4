"""A launch's work on the device: the tables of `tiling` for all heads, periods and samples as three runs of integers.

Legend: a section is one nest over whole periods, or over the tail that is left (empty where there is none); ``own``
rows of a program, which meets tiles of ``other`` rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from dilated_attention.backends.triton.tiling import CPU, Nest, Nests, rows_of, tiling

NEVER = 2**31 - 1  # the first program of nothing
P = ParamSpec("P")
AT_ONCE = 1 << 22  # candidates for a run, each of which takes some ten integers, in making a table


@dataclass(frozen=True, eq=False)
class Table:
    """A launch's table on a device, and its number of programs."""

    sections: Tensor
    tiles: Tensor
    runs: Tensor
    parts: int  # sections
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
    tokens: int,
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
    sections: list[int] = []
    variants: list[int] = []
    tiles: list[Tensor] = []
    runs: list[Tensor] = []
    programs = first_tile = first_run = 0
    ragged = False
    for nest in nests:
        offsets = sorted(set(nest.offsets))
        stretches = _stretches(nest, tokens)
        for start, length, periods in stretches:
            first, count = first_tile, 0
            make = _period if length == nest.widths[-1] else tiling  # a tail seldom comes again
            for some in _batches(nest, tuple(offsets), length, own):
                part = make(nest.widths, nest.rates, some, length, own, other, sees)
                count, ragged = part.tiles.shape[1], ragged or part.ragged
                shift = torch.tensor([0, 0, 0, first_run, 0, 0, first_run], device=CPU)
                tiles.append(part.tiles.flatten(0, 1) + shift)
                runs.append(part.runs)
                first_tile, first_run = first_tile + len(tiles[-1]), first_run + len(part.runs)
            sections += [programs, start, length, nest.head, len(nest.offsets), first, count]
            sections += [len(variants), periods, nest.branch, nest.widths[0]]
            programs += samples * periods * len(nest.offsets) * group * count
        if len(stretches) == 1:  # no tail: a section that no program is in, as kernels are compiled for their number
            sections += [NEVER, 0, 1, nest.head, len(nest.offsets), first, 1, len(variants), 1, nest.branch, 1]
        variants += [offsets.index(offset) for offset in nest.offsets]
    runs.append(torch.tensor([[0, 1, 0, 1, 1]] * 2, device=CPU))  # read, not used, after the last run
    # 32 bits are enough unless an offset inside a tile or a position needs more
    steps = max(nest.rates[-1] for nest in nests) * max(own, other) * widest_stride
    wide = max(steps, tokens, *sections) >= 2**31
    joined = torch.cat(runs)
    joined[:, 4] = joined[:, 4].float().log2().view(torch.int32)  # the kernels take the bits of a float32
    parts = [torch.tensor(sections + variants, device=CPU), torch.cat(tiles).flatten(), joined.flatten()]
    parts = [F.pad(part, (0, -len(part) % 4)) for part in parts]  # each aligned as Triton likes it
    data = _moved(torch.cat(parts).to(torch.int64 if wide else torch.int32), device)
    cut = data.split_with_sizes([len(part) for part in parts])
    single = all(len(nest.widths) == 1 for nest in nests)
    edges = any(bool(part[:, 5].any()) for part in tiles)
    return Table(cut[0], cut[1], cut[2], len(sections) // 11, programs, single, edges, ragged)


def _stretches(nest: Nest, tokens: int) -> list[tuple[int, int, int]]:
    """(start, length, periods) of the whole periods, and of the tail if there is one."""
    width = min(nest.widths[-1], tokens)
    whole, tail = divmod(tokens, width)
    return [(0, width, whole), *([(whole * width, tail, 1)] if tail else [])]


def _batches(nest: Nest, offsets: tuple[int, ...], length: int, own: int) -> list[tuple[int, ...]]:
    """As many offsets at once as the memory for making their tables is bounded to."""
    kinds = len(rows_of(nest.rates, 0))
    tiles = length // own + kinds * (1 + length // nest.widths[0])
    size = max(1, AT_ONCE // (tiles * kinds * 6 * len(nest.rates)))
    return [offsets[first : first + size] for first in range(0, len(offsets), size)]


_period = functools.lru_cache(maxsize=64)(tiling)


def _moved(numbers: Tensor, device: torch.device) -> Tensor:
    """On the device for longer than this call.

    By another thread: while torch.compile(mode="reduce-overhead") tries a graph, all that this one allocates lies in
    the graph's memory, and must be gone with it.
    """
    if device.type != "cuda":
        return numbers
    with ThreadPoolExecutor(1) as another:
        try:
            return another.submit(_move, numbers, device).result()
        except RuntimeError as error:
            if not torch.cuda.is_current_stream_capturing():
                raise
            raise RuntimeError(
                "dilated_attention has work to prepare, once for tensors of such shapes and strides, and cannot while "
                "a CUDA graph is captured: make the same call before, outside of the graph"
            ) from error


def _move(numbers: Tensor, device: torch.device) -> Tensor:
    stream = stream_of_tables(device)
    with torch.cuda.stream(stream):
        found = numbers.to(device)
    stream.synchronize()
    return found


@functools.cache
def stream_of_tables(device: torch.device) -> torch.cuda.Stream:
    """The stream whose memory tables lie in."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
