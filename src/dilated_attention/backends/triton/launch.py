"""One launch of each kernel, prepared: its table on the device, and all of its arguments but the tensors.

What is here sees layouts, not tensors, so that whoever calls again with the same ones has nothing to prepare.

Legend: q, out, dout (B, N, H, D); k, v (B, N, Hk, D); lse, dlse (B, N, H); padding (B, N), True = ignore; ends (B,).
"""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.triton.backward import dkdv_kernel, dq_kernel
from dilated_attention.backends.triton.cache import CACHE
from dilated_attention.backends.triton.configs import TileConfig
from dilated_attention.backends.triton.forward import forward_kernel
from dilated_attention.backends.triton.table import Table, table
from dilated_attention.backends.triton.tiling import Nests
from dilated_attention.call import Call

LOG2E = 1.4426950408889634


class Layout(NamedTuple):
    """All of a tensor but its numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Layout:
        return cls(x.shape, x.stride(), x.dtype)

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        *strides, _ = itertools.accumulate((1, *shape[::-1]), lambda step, size: step * max(size, 1))
        return cls(shape, tuple(strides[::-1]), dtype)


def _columns(head_dim: int) -> tuple[int, int]:
    """The columns of the two parts that kernels have a row in: powers of two, from 16 on; the second may be 0."""
    first = max(1 << head_dim.bit_length() - 1, 16)
    if head_dim <= first:
        return first, 0
    second = max(1 << (head_dim - first - 1).bit_length(), 16)
    return (first, second) if second < first else (2 * first, 0)


def _constants(call: Call, found: Table, config: TileConfig, *read: Layout) -> dict[str, Any]:
    """What all kernels are compiled for; ``read``: the layouts of the tensors whose rows they load."""
    strides = [stride for layout in read for stride in layout.strides[:3]]
    columns = _columns(call.head_dim)
    return {
        "SECTIONS": found.parts,
        "D": call.head_dim,
        "BD": columns[0],
        "BE": columns[1],
        "BM": config.rows,
        "BN": config.keys,
        "CAUSAL": call.is_causal,
        "PADDING": call.has_padding,
        "DROPOUT": call.drops,
        "SINGLE": found.single,
        "EDGES": found.edges,
        "RAGGED": found.ragged and found.edges,  # only masked tiles look at it
        "PRECISION": "ieee" if call.dtype is torch.float32 and not call.tf32 else "tf32",
        "ALIGNED": all(stride * call.dtype.itemsize % 16 == 0 for stride in strides),
    }


def _numbers(call: Call) -> tuple[float, ...]:
    """The last arguments of all kernels, from padding's stride on. With a scale of 0, a masked score would be NaN."""
    scale = max(call.scale, 1e-30) * LOG2E
    threshold = min(round(call.dropout_p * 2**32), 2**32 - 1)
    factor = 1.0 / (1.0 - call.dropout_p) if call.dropout_p < 1.0 else 0.0
    return call.keys, scale, call.q_per_kv, call.first_head, threshold, factor


def _optional(call: Call) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of padding and seed; the query stands in for what is not there."""
    return torch.bool if call.has_padding else call.dtype, torch.int64 if call.drops else call.dtype


def forward(
    q: Layout, k: Layout, v: Layout, out: Layout, lse: Layout, nests: Nests, call: Call, config: TileConfig,
    again: bool, fills: bool,
) -> Launch:  # fmt: skip
    """The forward kernel: takes q, k, v, out, lse, padding, ends and seed.

    ``again``: taking in what is there. ``fills``: rows without keys are written too (nests of one branch only).
    """
    sees = "earlier" if call.is_causal else "all"
    strides = _strides(q, k, v, out, lse)
    size = (call.samples, call.borders, call.q_per_kv, config.rows, config.keys)
    found = table(nests, *size, sees, max(strides[1::3]), call.device)
    # a running maximum costs a sixth of the time; float16 has too few exponents to do without
    shifted = q.dtype is torch.bfloat16 and not (call.has_padding or call.drops)
    constants = _constants(call, found, config, q, k, v)
    constants |= {"ZEROS": call.adds_zeros, "CONTINUE": again, "FILLS": fills, "SHIFTED": shifted}
    mask, seed = _optional(call)
    ends = torch.int64 if call.adds_zeros and call.has_padding else call.dtype
    dtypes = (*(x.dtype for x in (q, k, v, out, lse)), mask, ends)
    numbers = (*strides, *_numbers(call))
    return Launch(forward_kernel, call.device, found, numbers, constants, config, (*dtypes, seed))


def backward_dq(
    q: Layout, k: Layout, v: Layout, out: Layout, lse: Layout, dout: Layout, dlse: Layout | None, dq: Layout,
    stats: Layout, nests: Nests, call: Call, config: TileConfig, again: bool, fills: bool,
) -> Launch:  # fmt: skip
    """The kernel for dq, which also writes the rows' statistics; ``again``: added to what is there.

    It takes q, k, v, out, lse, dout, dlse, dq, stats, padding and seed.
    """
    sees = "earlier" if call.is_causal else "all"
    strides = _strides(q, k, v, out, lse, dout, dlse or lse, dq)
    size = (call.samples, call.borders, call.q_per_kv, config.rows, config.keys)
    found = table(nests, *size, sees, max(strides[1::3]), call.device)
    constants = _constants(call, found, config, q, k, v, out, dout)
    constants |= {"HAS_DLSE": dlse is not None, "ADD": again, "FILLS": fills}
    numbers = (*strides, *stats.strides[:2], *_numbers(call), call.scale)
    dtypes = [x.dtype for x in (q, k, v, out, lse, dout, dlse or q, dq, stats)]
    return Launch(dq_kernel, call.device, found, numbers, constants, config, (*dtypes, *_optional(call)))


def backward_dkdv(
    q: Layout, k: Layout, v: Layout, dout: Layout, stats: Layout, dk: Layout, dv: Layout, nests: Nests, call: Call,
    config: TileConfig, again: bool, fills: bool,
) -> Launch:  # fmt: skip
    """The kernel for dk and dv: takes q, k, v, dout, stats, dk, dv, padding and seed."""
    sees = "later" if call.is_causal else "all"
    strides = _strides(q, k, v, dout, dk, dv)
    found = table(nests, call.samples, call.borders, 1, config.keys, config.rows, sees, max(strides[1::3]), call.device)
    constants = _constants(call, found, config, q, k, v, dout)
    constants |= {"ADD": again, "FILLS": fills, "GROUPED": call.q_per_kv > 1}
    numbers = (*strides, *stats.strides[:2], *_numbers(call), call.scale)
    dtypes = [x.dtype for x in (q, k, v, dout, stats, dk, dv)]
    return Launch(dkdv_kernel, call.device, found, numbers, constants, config, (*dtypes, *_optional(call)))


def _strides(*layouts: Layout) -> tuple[int, ...]:
    """Three of each: sample, token and head."""
    return tuple(itertools.chain.from_iterable(layout.strides[:3] for layout in layouts))


class Launch:
    """A kernel with its table, its numbers and its constants; called with the tensors, in the kernel's order.

    An optional tensor that is not there is never read: any other one stands in for it.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        found: Table,
        numbers: tuple[float, ...],
        constants: dict[str, Any],
        config: TileConfig,
        dtypes: tuple[torch.dtype, ...],
    ) -> None:
        """``dtypes``: of the tensors."""
        self.kernel, self.device, self.numbers, self.dtypes = kernel, device, numbers, dtypes
        self.on_device = device.type == "cuda"  # asked once, as torch makes a string of it
        self.found = found  # for as long as this is kept, so that others like it share it
        self.programs, self.table = found.programs, (found.sections, found.tiles, found.runs)
        self.nbytes = sum(x.nbytes for x in self.table)
        self.given = {**constants, "num_warps": config.warps, "num_stages": config.stages}
        if config.registers:
            self.given["maxnreg"] = config.registers
        # nearly what Triton compiles apart; the kernel by its id, as Triton would read all of its source for a hash
        self.kind = (id(kernel), device, dtypes, *self.given.items())
        self.tail: tuple[Any, ...] = ()
        self.runs: Any = None

    def compile(self) -> None:
        """Compile the kernel for tensors that are aligned as torch's are, and what launches it, without running it."""
        grid = (self.programs, 1, 1)
        with torch.cuda.device(self.device):
            made = self.kernel.warmup(*self.dtypes, *self.table, *self.numbers, grid=grid, **self.given)
            made[grid]  # which Triton 3.6 compiles in C, for half a second

    def __call__(self, *tensors: Tensor) -> None:
        if self.on_device and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self(*tensors)
            return
        if self.on_device and torch.cuda.is_current_stream_capturing():
            CACHE.pin(self)
        pointers = [x.data_ptr() for x in tensors]
        bits = functools.reduce(operator.or_, pointers)
        if not self.on_device or bits & 15:  # Triton compiles for aligned tensors apart
            given = {**self.given, "ALIGNED": self.given["ALIGNED"] and not bits & 15}
            self.kernel[(self.programs,)](*tensors, *self.table, *self.numbers, **given)
        elif self.runs is None:
            compiled = self.kernel[(self.programs,)](*tensors, *self.table, *self.numbers, **self.given)
            constants = (self.given[name] for name in _constants_of(self.kernel))
            self.tail = (*(x.data_ptr() for x in self.table), *self.numbers, *constants)
            self.runs = compiled[(self.programs, 1, 1)]
        else:  # past Triton's look at every argument: they are all as they were; of numbers it asks no driver
            self.runs(*pointers, *self.tail)


@functools.cache
def _constants_of(kernel: Any) -> tuple[str, ...]:
    """The names of a kernel's constants, in their order."""
    return tuple(parameter.name for parameter in kernel.params if parameter.is_constexpr)
