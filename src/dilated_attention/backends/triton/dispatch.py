"""Whether our kernels can run a call, whether they come first, and with which tiles.

What was measured is in `measured.json` beside this file, which ``python benchmarks/tune.py`` writes on the device:
``library_from`` has from how many rows on PyTorch's kernels are faster, for each kind of call, and ``tiles`` the best
tile of each kernel. `key` makes the names in both. Nothing is searched for at run time.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from importlib import resources
from itertools import product
from typing import Any, NamedTuple

import torch

from dilated_attention.backends.triton import strips
from dilated_attention.backends.triton.endless import too_many
from dilated_attention.backends.triton.nesting import groups
from dilated_attention.branches import Dense, Dilated
from dilated_attention.call import ON_DEVICE, Call
from dilated_attention.checks import Ints
from dilated_attention.pattern import DilatedPattern

KERNELS = ("forward", "dq", "dkdv")
MOST_QUERIES_TO_DECODE = 64  # with more, most rows of a tile take no part in a dilated branch
THIN = 2560  # keys that a query meets on average: with 1,792 torch's kernels were faster, with 3,968 ours
# Large tiles of fewer would leave processors idle: an H200 has 132, which take two or three each. Packed sequences of
# 255,000 rows each were slower with small ones (benchmarks/results/packed-small-tiles, beside packed).
FEW_ROWS = 200_000
INSTALLED = importlib.util.find_spec("triton") is not None


# --- whether they can -------------------------------------------------------------------------------------------


def unsupported(call: Call, backward: bool) -> list[str]:
    """Why these kernels cannot run a call, one sentence each."""
    on_cuda, dim = call.device.type == "cuda", call.head_dim
    interpreted = call.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"  # step by step: for tests
    reasons = {
        "triton is not installed: it comes with torch's CUDA builds": not INSTALLED,
        "it takes whole calls on one device, not the parts that ranks exchange and streams are cut into": call.in_parts,
        "it takes calls whole, and a cap on memory asks for parts": call.memory_cap_id,
        "it does not compute in float64": call.dtype is torch.float64,
        f"it takes a head_dim up to {max(SMALL)}, not {dim}": dim > max(SMALL),
        "its decoding has no dropout": call.is_decode and call.drops,
        "its decoding has no backward pass": call.is_decode and backward,
        "it has no gradient with mixing_gradient='detached'": backward and not call.pattern.is_exact,
        f"it runs on CUDA, not on {call.device.type}": not (on_cuda or interpreted),
    }
    found = [why for why, is_so in reasons.items() if is_so]
    if not found and call.is_decode:
        found = list(filter(None, [too_many(call.pattern, call.model_heads)]))
    elif not found and strips.launches(call) is None:
        return ["two branches have pairs in common that only a mask can tell apart"]
    if found or not on_cuda:
        return found
    capability = torch.cuda.get_device_capability(call.device)
    least = (8, 0) if call.dtype is torch.bfloat16 else (7, 5)
    if capability < least:
        return [f"{call.dtype} needs compute capability {least[0]}.{least[1]}, this is {capability}"]
    if capability < (8, 0) and call.dtype is torch.float32 and dim > 128 and not call.is_decode:
        return [f"float32 with a head_dim over 128 needs compute capability 8.0, this is {capability}"]
    return []


# --- whether they come first ------------------------------------------------------------------------------------


def preference(call: Call, backward: bool) -> tuple[bool, str]:
    """Whether these kernels are the first choice for a call that they can run, and why."""
    if call.is_decode:
        ours = call.start == ON_DEVICE or call.queries <= MOST_QUERIES_TO_DECODE
        limit = f"its decoding is for up to {MOST_QUERIES_TO_DECODE} queries, unless positions are on the device"
        return ours, "" if ours else limit
    if call.has_padding or call.drops:
        return True, "of torch's fast kernels none takes a padding mask or our dropout"
    if call.deterministic:
        return True, "torch.use_deterministic_algorithms is on, and ours are the fastest that repeat"
    if call.dtype is torch.float32:
        return False, "in float32 torch's are faster"
    if call.device.type == "cuda" and torch.cuda.get_device_capability(call.device) < (8, 0):
        return False, "before compute capability 8.0 ours run without tensor cores"
    form = measured_as(call)
    if form == "band":
        return True, "of torch's kernels none takes such a pattern without a mask"
    first = torch_faster_from(call, form, backward)
    if first is None:
        ours = form == "nested" and call.head_dim <= 64
        return ours, "this device was not measured: ours are taken where branches are nested, up to a head_dim of 64"
    if not first:
        return True, "measured: ours are faster at every length"
    told = "tokens times heads, of all samples or of one packed sequence"
    return rows_of_a_sequence(call) < first, f"measured: torch's are faster from {first:,} rows on: {told}"


def torch_faster_from(call: Call, form: str, backward: bool) -> int | None:
    """The rows from which on torch's kernels were measured to be faster for such a call, 0: never; None: not measured.

    A form that was not measured has what holds for the one that it is a kind of. A head dim that was not has what holds
    for 64 or 128, but not where rows have little to do: the fewer keys, the more its size matters.
    """
    rows, size = measured_on(call.device).get("library_from", {}), head_dim_class(call.head_dim)
    like = {32: 64, 48: 64, 96: 128}.get(size, size)
    kinds = [*product((size,), kinds_of(form)), *product((like,), kinds_of(form.removesuffix(" thin")))]
    names = (key("backward" if backward else "forward", size, call.is_causal, kind) for size, kind in kinds)
    return next((rows[name] or 0 for name in names if name in rows), None)


def measured_as(call: Call) -> str:
    """The form of a call; "apart thin" where each of several launches has little to do for a row."""
    form = form_of(call, call.drops)
    is_thin = form == "apart" and sum(width / rate**2 for width, rate in call.dilated.branches) < THIN
    return f"{form} thin" if is_thin else form


def form_of(call: Call, alone: bool) -> str:
    """What measurements tell calls apart by; ``alone``: each branch has a table of its own.

    "dense": each segment is one dense problem; "band": any other pattern that is no DilatedPattern; "nested": some
    pairs are computed once for several branches; "apart": several launches, each of which takes in what the others
    found; "": anything else, in one launch.
    """
    pattern = call.pattern
    if not isinstance(pattern, DilatedPattern):
        one = pattern.branches[0]
        is_dense = isinstance(one, Dense) or (isinstance(one, Dilated) and one.rate == 1)
        return "dense" if is_dense and not pattern.needs_masks else "band"
    if pattern.dilation_rates == (1,):
        return "dense"
    found = groups(call.dilated, call.is_causal, alone)
    if any(len(group) > 1 for group in found):
        return "nested"
    return "apart" if len(found) > 1 and not call.dilated.head_rule.splits_heads else ""


def kinds_of(form: str) -> tuple[str, ...]:
    """A form, and those whose measurements hold where it has none of its own."""
    others = {"nested": ("nested",), "apart thin": (form, "apart", ""), "band": (form, "dense", "")}
    return others.get(form, (form, ""))


def rows_of_a_sequence(call: Call) -> int:
    """Query rows of all samples and heads; where sequences are packed, those of one of them on average."""
    return call.rows // max(1, len(call.cu_seqlens) - 1)


# --- with which tiles -------------------------------------------------------------------------------------------


class TileConfig(NamedTuple):
    """A tile of ``rows`` queries and ``keys`` keys, and how Triton compiles it."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int = 0  # that a thread may have at most, so that more programs share a processor; 0: any number

    def numbers(self) -> Ints:
        """As they are written down."""
        return self[:5] if self.registers else self[:4]


# For devices that were not measured: what fits into the shared memory of every GPU since compute capability 8.0, and
# did well on one that was measured; and what fits even since 7.5.
_DEFAULTS = {  # stages; rows and keys of each kernel
    32: (3, (64, 64), (64, 64), (64, 64)), 48: (3, (64, 64), (64, 64), (64, 64)),
    64: (3, (64, 64), (64, 64), (32, 64)), 96: (2, (64, 64), (64, 32), (32, 64)),
    128: (2, (64, 64), (64, 32), (32, 64)), 256: (2, (64, 32), (32, 32), (32, 32)),
}  # fmt: skip
DEFAULTS = {
    (kernel, size): TileConfig(rows, keys, 4, stages)
    for size, (stages, *tiles) in _DEFAULTS.items()
    for kernel, (rows, keys) in zip(KERNELS, tiles, strict=True)
}
SMALL = {
    **dict.fromkeys((32, 48, 64), TileConfig(64, 32, 4, 2)),
    **dict.fromkeys((96, 128), TileConfig(32, 32, 4, 2)),
    256: TileConfig(16, 16, 4, 1),
}
WITHOUT_TENSOR_CORES = {  # exact float32
    **dict.fromkeys((32, 48, 64), TileConfig(32, 32, 4, 1)),
    **dict.fromkeys((96, 128), TileConfig(32, 16, 4, 1)),
    256: TileConfig(16, 16, 4, 1),
}


def config(kernel: str, call: Call, form: str) -> TileConfig:
    """The tile of a kernel. Short calls and forms that were not measured apart have the tiles of others."""
    size, device = head_dim_class(call.head_dim), call.device
    if call.dtype is torch.float32:
        return WITHOUT_TENSOR_CORES[size]
    tiles = measured_on(device).get("tiles", {})
    kinds = [*product((True, False) if is_short(call) else (False,), kinds_of(form))]
    if form == "band":  # its own tiles, of long calls, are faster in short ones too (by 12 % with 256 channels)
        kinds.insert(0, (False, form))
    names = (key(kernel, size, call.is_causal, kind, short) for short, kind in kinds)
    is_new = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    default = DEFAULTS[kernel, size] if is_new else SMALL[size]
    return next((TileConfig(*tiles[name]) for name in names if name in tiles), default)


def is_short(call: Call) -> bool:
    """Whether a call, or each of its packed sequences, has so few rows that smaller tiles are faster."""
    return rows_of_a_sequence(call) < FEW_ROWS


def head_dim_class(head_dim: int) -> int:
    return next(size for size in SMALL if head_dim <= size)


def key(kernel: str, size: int, causal: bool, form: str, short: bool = False) -> str:
    """The name of a kernel's tile, or of the choice for a direction, in the table."""
    words = (kernel, str(size), "causal" if causal else "", form, "short" if short else "")
    return " ".join(filter(None, words))


@functools.cache
def measured() -> Any:
    return json.loads(resources.files(__package__).joinpath("measured.json").read_text("utf-8"))


def measured_on(device: torch.device) -> Any:
    """What was measured on devices of this compute capability."""
    return measured().get(device_class(device), {})


def device_class(device: torch.device) -> str:
    return ".".join(map(str, torch.cuda.get_device_capability(device))) if device.type == "cuda" else device.type
