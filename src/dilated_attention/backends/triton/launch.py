"""One launch of each kernel: its table on the device and its arguments.

Legend: q, out, dout (B, N, H, D); k, v (B, N, Hk, D); lse, dlse (B, N, H); padding (B, N), True = ignore; ends (B,).
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.triton.backward import dkdv_kernel, dq_kernel
from dilated_attention.backends.triton.configs import Config
from dilated_attention.backends.triton.forward import forward_kernel
from dilated_attention.backends.triton.tiling import Courses, tiling

LOG2E = 1.4426950408889634


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


@functools.lru_cache(maxsize=4096)
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
    tiles: list[int] = []
    runs: list[int] = []
    variants: list[int] = []
    programs, ragged = 0, False
    for course in courses:
        offsets = sorted(set(course.offsets))
        width = min(course.widths[-1], tokens)
        for start, length, periods in ((0, width, tokens // width), (tokens // width * width, tokens % width, 1)):
            if not length:
                continue
            first_tile, count = len(tiles) // 7, 0
            for offset in offsets:
                part = tiling(course.widths, course.rates, offset, length, own, other, sees)
                first_run, count = len(runs) // 5, len(part.tiles)
                ragged |= part.is_ragged(own, other)
                for tile in part.tiles:
                    tiles += [*tile[:3], tile.run + first_run, tile.plain, tile.edge, tile.edge_run + first_run]
                for run in part.runs:
                    runs += [*run[:4], _float_bits(math.log2(run.times))]
            sections += [programs, start, length, course.head, len(course.offsets), first_tile, count]
            sections += [len(variants), periods, course.branch, course.widths[0]]
            programs += samples * periods * len(course.offsets) * group * count
        variants += [offsets.index(offset) for offset in course.offsets]
    runs += [0, 1, 0, 1, 0] * 2  # read, not used, after the last run
    # 32 bits are enough unless an offset inside a tile or a position needs more
    steps = max(course.rates[-1] for course in courses) * max(own, other) * widest_stride
    wide = max(steps, tokens, *sections) >= 2**31
    dtype = torch.int64 if wide else torch.int32
    parts = [_aligned(numbers) for numbers in (sections + variants, tiles, runs)]
    data = torch.tensor(list(itertools.chain(*parts)), dtype=dtype).to(device)
    cut = data.split_with_sizes([len(numbers) for numbers in parts])
    single = all(len(course.widths) == 1 for course in courses)
    return Table(cut[0], cut[1], cut[2], len(sections) // 11, programs, single, any(tiles[5::7]), ragged)


def _aligned(numbers: list[int]) -> list[int]:
    """Filled up to 16 bytes, so that whatever follows is aligned as Triton likes it."""
    return numbers + [0] * (-len(numbers) % 4)


def _float_bits(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.float32).view(torch.int32).item())


class Call(NamedTuple):
    """What all launches of a call share."""

    scale: float
    is_causal: bool
    padding: Tensor | None = None
    ends: Tensor | None = None
    seed: Tensor | None = None
    dropout_p: float = 0.0
    zeros: bool = False  # torchscale's appended keys
    first_head: int = 0
    precision: str = "ieee"

    def threshold(self) -> int:
        return min(round(self.dropout_p * 2**32), 2**32 - 1)

    def factor(self) -> float:
        return 1.0 / (1.0 - self.dropout_p) if self.dropout_p < 1.0 else 0.0

    def constants(self, q: Tensor, found: Table, config: Config) -> dict[str, Any]:
        """What all kernels are compiled for."""
        head_dim = q.shape[-1]
        return {
            "SECTIONS": found.parts,
            "D": head_dim,
            "BD": max(16, 1 << (head_dim - 1).bit_length()),
            "BM": config.rows,
            "BN": config.keys,
            "CAUSAL": self.is_causal,
            "PADDING": self.padding is not None,
            "DROPOUT": self.seed is not None,
            "SINGLE": found.single,
            "EDGES": found.edges,
            "RAGGED": found.ragged,
            "PRECISION": self.precision,
        }

    def numbers(self, tokens: int, group: int) -> tuple[float, ...]:
        """What all kernels take last; a scale of 0 would make NaN of a masked score."""
        scale = max(self.scale, 1e-30) * LOG2E
        return scale, tokens, group, self.first_head, 0, self.threshold(), self.factor()


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, courses: Courses, call: Call, config: Config,
    again: bool, fills: bool,
) -> None:  # fmt: skip
    """One launch of the forward kernel, into ``out`` and ``lse``.

    ``again``: taking in what is there. ``fills``: rows without keys are written too (courses of one branch only).
    """
    samples, tokens, heads, _ = q.shape
    group = heads // k.shape[2]
    sees = "earlier" if call.is_causal else "all"
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *lse.stride())
    found = table(courses, samples, tokens, group, config.rows, config.keys, sees, max(strides[1::3]), q.device)
    padding, ends, seed = _pointers(call, q)
    # a running maximum costs a sixth of the time; float16 has too few exponents to do without
    shifted = q.dtype is torch.bfloat16 and call.padding is None and call.seed is None and not again
    constants = call.constants(q, found, config)
    constants |= {"ZEROS": call.zeros, "CONTINUE": again, "FILLS": fills, "SHIFTED": shifted}
    pointers = (q, k, v, out, lse, padding, ends, seed, *found[:3])
    numbers = (*strides, padding.stride(0), *call.numbers(tokens, group))
    _start(forward_kernel, found.programs, pointers, numbers, constants, config)


def backward_dq(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, dq: Tensor,
    stats: Tensor, courses: Courses, call: Call, config: Config, again: bool, fills: bool,
) -> None:  # fmt: skip
    """One launch for dq, which also writes the rows' statistics; ``again``: added to what is there."""
    samples, tokens, heads, _ = q.shape
    group = heads // k.shape[2]
    sees = "earlier" if call.is_causal else "all"
    given = lse if dlse is None else dlse
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *lse.stride())
    strides += (*dout.stride()[:3], *given.stride(), *dq.stride()[:3])
    found = table(courses, samples, tokens, group, config.rows, config.keys, sees, max(strides[1::3]), q.device)
    padding, _, seed = _pointers(call, q)
    constants = {**call.constants(q, found, config), "HAS_DLSE": dlse is not None, "ADD": again, "FILLS": fills}
    pointers = (q, k, v, out, lse, dout, given, dq, stats, padding, seed, *found[:3])
    numbers = (*strides, *stats.stride()[:2], padding.stride(0), *call.numbers(tokens, group), call.scale)
    _start(dq_kernel, found.programs, pointers, numbers, constants, config)


def backward_dkdv(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, stats: Tensor, dk: Tensor, dv: Tensor, courses: Courses, call: Call,
    config: Config, again: bool, fills: bool,
) -> None:  # fmt: skip
    """One launch for dk and dv."""
    samples, tokens, heads, _ = q.shape
    group = heads // k.shape[2]
    sees = "later" if call.is_causal else "all"
    strides = (
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *dout.stride()[:3],
        *dk.stride()[:3],
        *dv.stride()[:3],
    )
    found = table(courses, samples, tokens, 1, config.keys, config.rows, sees, max(strides[1::3]), q.device)
    padding, _, seed = _pointers(call, q)
    constants = {**call.constants(q, found, config), "ADD": again, "FILLS": fills, "GROUPED": group > 1}
    pointers = (q, k, v, dout, stats, dk, dv, padding, seed, *found[:3])
    numbers = (*strides, *stats.stride()[:2], padding.stride(0), *call.numbers(tokens, group), call.scale)
    _start(dkdv_kernel, found.programs, pointers, numbers, constants, config)


def _pointers(call: Call, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The optional tensors; one that is not there is never read, and q stands in for its pointer."""
    return tuple(q if x is None else x for x in (call.padding, call.ends, call.seed))  # type: ignore[return-value]


_compiled: dict[tuple[Any, ...], Any] = {}
_captured: list[tuple[Tensor, ...]] = []
MOST_COMPILED = 4096


def _start(
    kernel: Any,
    programs: int,
    pointers: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
    config: Config,
) -> None:
    """Launch a kernel; one that ran with the same numbers before goes past Triton's look at every argument."""
    device = pointers[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _start(kernel, programs, pointers, numbers, constants, config)
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured.append(
            pointers[-3:]
        )  # a graph reads its table for as long as it lives, and does not say when it ends
    given = {**constants, "num_warps": config.warps, "num_stages": config.stages}
    if device.type != "cuda" or any(x.data_ptr() & 15 for x in pointers):
        kernel[(programs,)](*pointers, *numbers, **given)
        return
    key = (kernel, device, tuple(x.dtype for x in pointers), numbers, *given.values())
    found = _compiled.get(key)
    if found is not None:
        found[(programs, 1, 1)](*pointers, *numbers, *(constants[name] for name in _constants_of(kernel)))
        return
    if len(_compiled) >= MOST_COMPILED:
        _compiled.clear()
    _compiled[key] = kernel[(programs,)](*pointers, *numbers, **given)


@functools.cache
def _constants_of(kernel: Any) -> tuple[str, ...]:
    """The names of a kernel's constants, in their order."""
    return tuple(parameter.name for parameter in kernel.params if parameter.is_constexpr)
