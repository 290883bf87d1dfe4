"""Tile sizes and the choice between our kernels and the library's, as measured; sound defaults for other devices.

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


class Config(NamedTuple):
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
DEFAULTS = {
    ("forward", 64): Config(64, 64, 4, 3),
    ("dq", 64): Config(64, 64, 4, 3),
    ("dkdv", 64): Config(32, 64, 4, 3),
    ("forward", 128): Config(64, 64, 4, 2),
    ("dq", 128): Config(64, 32, 4, 2),
    ("dkdv", 128): Config(32, 64, 4, 2),
    ("forward", 256): Config(64, 32, 4, 2),
    ("dq", 256): Config(32, 32, 4, 2),
    ("dkdv", 256): Config(32, 32, 4, 2),
}
SMALL = {64: Config(64, 32, 4, 2), 128: Config(32, 32, 4, 2), 256: Config(16, 16, 4, 1)}
WITHOUT_TENSOR_CORES = {64: Config(32, 32, 4, 1), 128: Config(32, 16, 4, 1), 256: Config(16, 16, 4, 1)}  # exact float32


@functools.cache
def measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(resources.files(__package__).joinpath("measured.json").read_text())
    return found


@functools.cache
def device_class(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}"


def head_dim_class(head_dim: int) -> int:
    return next(size for size in SMALL if head_dim <= size)


def key(kernel: str, size: int, causal: bool, nested: bool, short: bool = False, dense: bool = False) -> str:
    """What a kernel's tile, or the choice for a direction, stands under in the table."""
    words = {"causal": causal, "nested": nested, "short": short, "dense": dense}
    return " ".join([kernel, str(size), *(word for word, holds in words.items() if holds)])


@functools.lru_cache(maxsize=256)
def config(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    causal: bool,
    nested: bool,
    short: bool,
    dense: bool = False,
) -> Config:
    """The tile of a kernel."""
    size = head_dim_class(head_dim)
    if dtype is torch.float32:
        return WITHOUT_TENSOR_CORES[size]
    tiles = measured().get(device_class(device), {}).get("tiles", {}) if device.type == "cuda" else {}
    for kind in product((short, False), (dense, False)):  # which may not have been measured apart
        found = tiles.get(key(kernel, size, causal, nested, *kind))
        if found is not None:
            return Config(*found)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return DEFAULTS[kernel, size]
    return SMALL[size]


def library_from(
    device: torch.device, head_dim: int, causal: bool, nested: bool, backward: bool, dense: bool = False
) -> int | None:
    """The tokens from which on the library's kernels were measured to be faster; None: never."""
    if device.type != "cuda":
        return NOT_MEASURED
    rows = measured().get(device_class(device), {}).get("library_from", {})
    call = ("backward" if backward else "forward", head_dim_class(head_dim), causal, nested)
    others: int | None = rows.get(key(*call), NOT_MEASURED)
    found: int | None = rows.get(key(*call, dense=True), others) if dense else others
    return found


def prefers_library(
    device: torch.device, head_dim: int, causal: bool, nested: bool, tokens: int, backward: bool, dense: bool = False
) -> bool | None:
    """Whether the library's kernels were measured to be faster for such a call; None: such a call was not measured."""
    first = library_from(device, head_dim, causal, nested, backward, dense)
    if first == NOT_MEASURED:
        return None
    return first is not None and tokens >= first
