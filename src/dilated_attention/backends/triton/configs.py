"""Tile sizes and the choice between our kernels and PyTorch's, as measured; sound defaults for other devices.

`measured.json` beside this file is written by ``python benchmarks/tune.py`` on the device; nothing is searched for at
run time.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from itertools import product
from typing import Any, NamedTuple

import torch

KERNELS = ("forward", "dq", "dkdv")
NOT_MEASURED = -1


class TileConfig(NamedTuple):
    """A tile of ``rows`` queries and ``keys`` keys, and how Triton compiles it."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int = 0  # that a thread may have at most, so that more programs share a processor; 0: any number

    def numbers(self) -> tuple[int, ...]:
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
    32: TileConfig(64, 32, 4, 2), 48: TileConfig(64, 32, 4, 2), 64: TileConfig(64, 32, 4, 2),
    96: TileConfig(32, 32, 4, 2), 128: TileConfig(32, 32, 4, 2), 256: TileConfig(16, 16, 4, 1),
}  # fmt: skip
WITHOUT_TENSOR_CORES = {  # exact float32
    32: TileConfig(32, 32, 4, 1), 48: TileConfig(32, 32, 4, 1), 64: TileConfig(32, 32, 4, 1),
    96: TileConfig(32, 16, 4, 1), 128: TileConfig(32, 16, 4, 1), 256: TileConfig(16, 16, 4, 1),
}  # fmt: skip

LIKE = {32: 64, 48: 64, 96: 128}  # where the choice of backend was not measured, it is that of the other head dim


@functools.cache
def measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(resources.files(__package__).joinpath("measured.json").read_text("utf-8"))
    return found


@functools.cache
def device_class(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}"


def head_dim_class(head_dim: int) -> int:
    return next(size for size in SMALL if head_dim <= size)


def key(kernel: str, size: int, causal: bool, form: str, short: bool = False) -> str:
    """The name of a kernel's tile, or of the choice for a direction, in the table."""
    words = (kernel, str(size), "causal" if causal else "", form, "short" if short else "")
    return " ".join(filter(None, words))


def _forms(form: str) -> tuple[str, ...]:
    """A form, and those whose measurements hold where it has none of its own."""
    if form == "nested":
        return (form,)
    return (form, "apart", "") if form == "apart thin" else (form, "")


@functools.lru_cache(maxsize=256)
def config(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    causal: bool,
    form: str,
    short: bool,
) -> TileConfig:
    """The tile of a kernel."""
    size = head_dim_class(head_dim)
    if dtype is torch.float32:
        return WITHOUT_TENSOR_CORES[size]
    tiles = measured().get(device_class(device), {}).get("tiles", {}) if device.type == "cuda" else {}
    for some_short, some_form in product((short, False), _forms(form)):  # which may not have been measured apart
        found = tiles.get(key(kernel, size, causal, some_form, some_short))
        if found is not None:
            return TileConfig(*found)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return DEFAULTS[kernel, size]
    return SMALL[size]


def library_from(device: torch.device, head_dim: int, causal: bool, form: str, backward: bool) -> int | None:
    """The rows from which on torch's kernels were measured to be faster; None: never; or NOT_MEASURED."""
    if device.type != "cuda":
        return NOT_MEASURED
    rows: dict[str, int | None] = measured().get(device_class(device), {}).get("library_from", {})
    direction, size = "backward" if backward else "forward", head_dim_class(head_dim)
    # of another head dim only what holds for rows with much to do: the fewer keys, the more its own size matters
    asked = [(size, some) for some in _forms(form)]
    asked += [(LIKE.get(size, size), some) for some in _forms(form.removesuffix(" thin"))]
    names = (key(direction, some_size, causal, some) for some_size, some in asked)
    return next((rows[name] for name in names if name in rows), NOT_MEASURED)


def prefers_library(
    device: torch.device, head_dim: int, causal: bool, form: str, backward: bool, rows: int
) -> bool | None:
    """Whether PyTorch's kernels were measured to be faster for such a call; None: such a call was not measured."""
    first = library_from(device, head_dim, causal, form, backward)
    if first == NOT_MEASURED:
        return None
    return first is not None and rows >= first
