"""One launch of each kernel, prepared: its table on the device, and all of its arguments but the tensors.

What is here sees strides, not tensors, so that whoever calls again with the same ones has nothing to prepare.

Legend: q, dout (B, N, H, D) and k, v (B, N, Hk, D) have any strides. Contiguous: out and dq as q; dk and dv as k; lse,
dlse (B, N, H); stats (B, H, N, 2); padding (B, N), True = ignore; ends (B,).
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends.triton.attention import dkdv_kernel, dq_kernel, forward_kernel
from dilated_attention.backends.triton.cache import CACHE
from dilated_attention.backends.triton.dispatch import TileConfig
from dilated_attention.backends.triton.strips import Strip, Strips, fills, shows_itself
from dilated_attention.backends.triton.table import Demand, Table, table
from dilated_attention.backends.triton.tiles import Constants
from dilated_attention.backends.triton.tiling import Nests
from dilated_attention.branches.base import FOREVER
from dilated_attention.call import Call
from dilated_attention.checks import Ints

LOG2E = 1.4426950408889634
FLOAT = torch.float32
KERNELS: dict[str, tuple[Any, str]] = {  # and the tensors that each takes
    "forward": (forward_kernel, "q k v result lse padding ends seed"),
    "dq": (dq_kernel, "q k v dout out lse dlse result stats padding seed"),
    "dkdv": (dkdv_kernel, "q k v dout stats result result padding seed"),
}

Strides = tuple[Ints, ...]  # of q, k and v, and of dout in the backward pass


def prepare(
    kernel: str, call: Call, strides: Strides, nests: Nests | Strips, config: TileConfig, out_dtype: torch.dtype,
    again: bool = False, has_dlse: bool = False,
) -> Launch:  # fmt: skip
    """A launch of a kernel that takes the tensors named in KERNELS. ``again``: results join those of earlier ones."""
    dim, of_keys = call.head_dim, kernel == "dkdv"  # whose programs have tiles of keys
    own, other = (config.keys, config.rows) if of_keys else config[:2]
    sees = ("later" if of_keys else "earlier") if call.is_causal else "all"
    widest = max(call.heads * dim, *(each[1] for each in strides))
    group = 1 if of_keys else call.q_per_kv
    found = table(Demand(nests, call.samples, call.full_cu_seqlens, group, own, other, sees, widest, call.device))
    aligned = [dim, *(stride for each in strides for stride in each[:3])]
    strips = [each for each in nests if isinstance(each, Strip)]
    has_own_key = all(map(shows_itself, strips))
    has_band = any((strip.low, strip.high) != (-FOREVER, FOREVER) for strip in strips)
    constants = Constants(
        found.parts, dim, *_columns(dim), *config[:2], call.is_causal and not strips,
        call.has_padding, call.drops, has_band, call.has_padding or not has_own_key,
        found.single, 1 + found.edges, found.ragged and found.edges,  # only masked tiles look at it
        "ieee" if call.dtype is FLOAT and not call.tf32 else "tf32",
        all(stride * call.dtype.itemsize % 16 == 0 for stride in aligned), again, not again and fills(nests),
        call.adds_zeros,
        # a running maximum costs a sixth of the time; float16 has too few exponents to do without
        call.dtype is torch.bfloat16 and not (call.has_padding or call.drops) and has_own_key,
        has_dlse and kernel == "dq", call.q_per_kv > 1,
    )  # fmt: skip
    q = call.dtype  # stands in for what is not there
    dtypes = {
        "result": out_dtype, "lse": FLOAT, "stats": FLOAT, "dlse": FLOAT if has_dlse else q,
        "seed": torch.int64 if call.drops else q, "padding": torch.bool if call.has_padding else q,
        "ends": torch.int64 if call.has_padding and call.adds_zeros else q,
    }  # fmt: skip
    function, names = KERNELS[kernel]
    options = {"num_warps": config.warps, "num_stages": config.stages}
    if config.registers:
        options["maxnreg"] = config.registers
    given = tuple(dtypes.get(name, q) for name in names.split())
    return Launch(
        function, call.device, found.programs, (*strides, *_numbers(call)), constants, options, given, found, kernel
    )


def _columns(head_dim: int) -> tuple[int, int, int]:
    """The columns of a row in one part, a power of two from 16 on; and of both parts that kernels have it in: the
    second may be 0."""
    whole = max(16, 1 << (head_dim - 1).bit_length())
    second = max(16, 1 << (head_dim - whole // 2 - 1).bit_length())
    return (whole, whole // 2, second) if second < whole // 2 else (whole, whole, 0)


def _numbers(call: Call) -> tuple[float, ...]:
    """The numbers that all kernels take, as of `tiles.NUMBERS`. With a scale of 0, a masked score would be NaN."""
    threshold = min(round(call.dropout_p * 2**32), 2**32 - 1)
    factor = 1.0 / (1.0 - call.dropout_p) if call.dropout_p < 1.0 else 0.0
    scales = max(call.scale, 1e-30) * LOG2E, call.scale
    return call.keys, call.heads, call.q_per_kv, call.first_head, *scales, threshold, factor


class Launch:
    """A kernel with its numbers and constants, and its table if it has one; called with tensors, in the kernel's order.

    An optional tensor that is not there is never read: any other one stands in for it.
    """

    def __init__(
        self, kernel: Any, device: torch.device, programs: int, numbers: tuple[Any, ...], constants: Any,
        options: dict[str, Any], dtypes: tuple[torch.dtype, ...] = (), found: Table | None = None, name: str = "",
    ) -> None:  # fmt: skip
        """``numbers``: tuples of strides, and plain ones. ``dtypes``: of the tensors."""
        self.kernel, self.device, self.dtypes, self.options = kernel, device, dtypes, options
        self.name, self.grid = name, (programs, 1, 1)
        self.on_device = device.type == "cuda"  # asked once, as torch makes a string of it
        self.found = found  # for as long as this is kept, so that others like it share it
        self.table = () if found is None else (found.sections, found.tiles, found.runs)
        self.nbytes = sum(x.nbytes for x in self.table)
        self.given = (*self.table, *numbers, constants)
        # nearly what Triton compiles apart; the kernel by its id, as Triton would read all of its source for a hash
        self.kind = (id(kernel), device, dtypes, constants, *options.items())
        self.tail: tuple[Any, ...] = ()
        self.runs: Any = None

    def compile(self) -> None:
        """Compile the kernel for tensors that are aligned as torch's are, and what launches it, without running it."""
        with torch.cuda.device(self.device):
            made = self.kernel.warmup(*self.dtypes, *self.given, grid=self.grid, **self.options)
            made[self.grid]  # which Triton 3.6 compiles in C, for half a second

    def __call__(self, *tensors: Tensor) -> None:
        if self.on_device and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self(*tensors)
            return
        if self.on_device and torch.cuda.is_current_stream_capturing():
            CACHE.pinned.add(self)
        pointers = [x.data_ptr() for x in tensors]
        bits = functools.reduce(operator.or_, pointers)
        if not self.on_device or bits & 15:  # Triton compiles for aligned tensors apart
            *given, constants = self.given
            constants = constants._replace(ALIGNED=constants.ALIGNED and not bits & 15)
            self.kernel[self.grid](*tensors, *given, constants, **self.options)
        elif self.runs is None:
            compiled = self.kernel[self.grid](*tensors, *self.given, **self.options)
            self.tail = tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in self.given)
            self.runs = compiled[self.grid]
        else:  # past Triton's look at every argument: they are all as they were; of numbers it asks no driver
            self.runs(*pointers, *self.tail)
