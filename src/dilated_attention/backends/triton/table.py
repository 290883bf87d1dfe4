"""A launch's work on the device: the tables of `tiling` for all heads, periods and samples as three runs of integers.

Legend: a section is one course over whole periods, or over the tail that is left; ``own`` rows of a program, which
meets tiles of ``other`` rows.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dilated_attention.backends.triton.tiling import Course, Courses, tiling

CPU = torch.device("cpu")  # named everywhere: torch.set_default_device may say otherwise


class Table(NamedTuple):
    """A launch's table on a device, and its number of programs."""

    sections: Tensor
    tiles: Tensor
    runs: Tensor
    parts: int  # sections
    programs: int
    single: bool  # whether all whole tiles of a program are one run
    edges: bool  # whether any tile is masked
    ragged: bool  # whether any tile is not full


class Part(NamedTuple):
    """The tiles and runs of one period of one offset."""

    tiles: Tensor  # (tiles, 7)
    runs: Tensor  # (runs, 5), the last column as the bits of log2 in float32
    ragged: bool


def table(
    courses: Courses,
    samples: int,
    tokens: int,
    group: int,
    own: int,
    other: int,
    sees: str,
    widest_stride: int,
    device: torch.device,
) -> Table:
    """``group`` programs for each tile of a key/value head: its query heads, or 1."""
    sections: list[int] = []
    variants: list[int] = []
    tiles: list[Tensor] = []
    runs: list[Tensor] = []
    programs = first_tile = first_run = 0
    ragged = False
    for course in courses:
        offsets = sorted(set(course.offsets))
        for start, length, periods in _stretches(course, tokens):
            first, count = first_tile, 0
            for offset in offsets:
                part = _part(course.widths, course.rates, offset, length, own, other, sees)
                count, ragged = len(part.tiles), ragged or part.ragged
                tiles.append(part.tiles + torch.tensor([0, 0, 0, first_run, 0, 0, first_run], device=CPU))
                runs.append(part.runs)
                first_tile, first_run = first_tile + count, first_run + len(part.runs)
            sections += [programs, start, length, course.head, len(course.offsets), first, count]
            sections += [len(variants), periods, course.branch, course.widths[0]]
            programs += samples * periods * len(course.offsets) * group * count
        variants += [offsets.index(offset) for offset in course.offsets]
    runs.append(torch.tensor([[0, 1, 0, 1, 0]] * 2, device=CPU))  # read, not used, after the last run
    # 32 bits are enough unless an offset inside a tile or a position needs more
    steps = max(course.rates[-1] for course in courses) * max(own, other) * widest_stride
    wide = max(steps, tokens, *sections) >= 2**31
    parts = [torch.tensor(sections + variants, device=CPU), torch.cat(tiles).flatten(), torch.cat(runs).flatten()]
    parts = [F.pad(part, (0, -len(part) % 4)) for part in parts]  # each aligned as Triton likes it
    data = _moved(torch.cat(parts).to(torch.int64 if wide else torch.int32), device)
    cut = data.split_with_sizes([len(part) for part in parts])
    single = all(len(course.widths) == 1 for course in courses)
    edges = any(bool(part[:, 5].any()) for part in tiles)
    return Table(cut[0], cut[1], cut[2], len(sections) // 11, programs, single, edges, ragged)


def _stretches(course: Course, tokens: int) -> list[tuple[int, int, int]]:
    """(start, length, periods) of the whole periods, and of the tail if there is one."""
    width = min(course.widths[-1], tokens)
    whole, tail = divmod(tokens, width)
    return [(0, width, whole), *([(whole * width, tail, 1)] if tail else [])]


@functools.lru_cache(maxsize=256)
def _part(
    widths: tuple[int, ...], rates: tuple[int, ...], offset: int, length: int, own: int, other: int, sees: str
) -> Part:
    found = tiling(widths, rates, offset, length, own, other, sees)
    tiles = torch.tensor(found.tiles, device=CPU).view(-1, 7)
    runs = torch.tensor(found.runs, device=CPU).view(-1, 5)
    runs[:, 4] = runs[:, 4].float().log2().view(torch.int32)
    return Part(tiles, runs, found.is_ragged(own, other))


def _moved(numbers: Tensor, device: torch.device) -> Tensor:
    """On the device for longer than this call: outside of the pool that a graph's memory comes from."""
    if device.type != "cuda":
        return numbers
    stream = _stream(device)
    with torch.cuda.stream(stream):
        found = numbers.to(device)
    stream.synchronize()
    return found


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
